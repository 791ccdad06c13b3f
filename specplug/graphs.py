"""What makes the passes of fixed.py quicker: a device's graph of a program, and torch.compile for a model. Where either fails, that is
said once, and what it was for is run as it is.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from specplug.config import first_line

log = logging.getLogger(__name__)


class Graph(Protocol):
    """What replays a program: made by a call with the program, the device and a place for what graphs share."""

    def __call__(self) -> None: ...


class CudaGraph:
    """A program as a CUDA graph. Whatever it raises, the program can still be run as it is."""

    def __init__(self, program: Callable[[], None], device: torch.device, shared: dict[str, Any]) -> None:
        with torch.cuda.device(device):
            pool = shared.setdefault("pool", torch.cuda.graph_pool_handle())
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries set themselves up in the first runs, which must not be captured
                for _ in range(2):
                    program()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            # Other threads may allocate and wait meanwhile.
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                program()

    def __call__(self) -> None:
        self.graph.replay()


GRAPHS: dict[str, Callable[..., Graph]] = {"cuda": CudaGraph}  # by type of device


_COMPILED: "weakref.WeakKeyDictionary[PreTrainedModel, Compiled]" = weakref.WeakKeyDictionary()


class Compiled:
    """The passes of a model by torch.compile; where that fails, which is said once, as they are."""

    def __init__(self, model: PreTrainedModel) -> None:
        weak = weakref.ref(model)

        def forward(**inputs: Any) -> Any:  # the model is not kept by what is kept with it
            return weak()(**inputs)  # type: ignore[misc]

        self.model, self.failed = weak, False
        self.run = torch.compile(forward, dynamic=False)

    def __call__(self, **inputs: Any) -> Any:
        model: Any = self.model()
        if not self.failed:
            try:
                return self.run(**inputs)
            except Exception as error:  # of the compiler; the model's own come again below
                self.failed = True
                say_once(model, f"is run without torch.compile: {first_line(error)}")
        return model(**inputs)


def compiled_passes(model: PreTrainedModel) -> Compiled:
    """One for each model, which is compiled once."""
    if model not in _COMPILED:
        _COMPILED[model] = Compiled(model)
    return _COMPILED[model]


_SAID: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()


def say_once(model: PreTrainedModel, message: str) -> None:
    if model not in _SAID:
        _SAID.add(model)
        log.warning("specplug: %s %s", type(model).__name__, message)
