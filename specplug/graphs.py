"""What makes the passes of fixed.py quicker: a device's graph of a program, and torch.compile for a model. Where either fails, that is
said once, and what it was for is run as it is.
"""

import contextlib
import logging
import threading
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


# One capture at a time: each begins by waiting for the device, which would spoil one that is under way in another thread. And one replay,
# and none meanwhile: all draw from one generator, which (before torch 2.13) takes no other numbers from it while one is captured.
_ALONE = threading.Lock()
# To capture on, by device. torch's own stream for that is one for all, and lies on the device that was captured on first: a model on
# another one would leave an empty graph.
_STREAMS: dict[int, Any] = {}
_FAILED: list[Any] = []  # graphs of failed captures, which torch's allocators still point to


class CudaGraph:
    """A program as a CUDA graph. Whatever it raises, the program can still be run as it is."""

    def __init__(self, program: Callable[[], None], device: torch.device, shared: dict[str, Any]) -> None:
        # Outside of inference mode: what is captured in it first makes torch (2.10 and older) keep the graphs' random state in tensors
        # that may then be written in it alone.
        with _ALONE, torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            if "pool" not in shared:
                shared["pool"] = torch.cuda.graph_pool_handle()
            index, current = torch.cuda.current_device(), torch.cuda.current_stream()
            if index not in _STREAMS:
                _STREAMS[index] = torch.cuda.Stream()
            stream = _STREAMS[index]
            stream.wait_stream(current)
            try:  # libraries set themselves up in the first runs, which must not be captured
                with torch.cuda.stream(stream):
                    for _ in range(2):
                        program()
            finally:
                current.wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            # cuBLAS has a workspace for each stream, which a graph goes on writing to. So that it lies in the graph's own memory, and not in
            # that of another graph on the same stream, which may go before this one, there is none when the capture begins, and none left
            # for the next, as in torch's own graphs of compiled models.
            torch._C._cuda_clearCublasWorkspaces()
            try:
                _captured(program, self.graph, index, stream, shared["pool"])
            finally:
                torch._C._cuda_clearCublasWorkspaces()

    def __call__(self) -> None:
        # In it, tensors of either kind may be written: torch's own for random numbers, where somebody else captured first.
        with _ALONE, torch.inference_mode():
            self.graph.replay()


def _captured(program: Callable[[], None], graph: Any, index: int, stream: Any, pool: Any) -> None:
    """Capture; where that fails, raise what the program raised, and close what torch leaves open: its stream, its allocator's pool,
    and, before torch 2.13, the generator, which would refuse to draw from then on."""
    raised: Exception | None = None
    try:
        # Other threads may allocate and wait for streams meanwhile. The outer one puts the stream back, which torch's does not.
        with (
            torch.cuda.stream(stream),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            try:
                program()
            except Exception as error:
                raised = error
                raise
    except Exception as error:
        _FAILED.append(graph)
        with contextlib.suppress(Exception):  # it is closed already
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
        with contextlib.suppress(Exception):  # a capture that ends well closes the generator
            small = torch.cuda.CUDAGraph()
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(small, stream=stream, capture_error_mode="thread_local"),
            ):
                torch.zeros(1, device=torch.device("cuda", index))
        raise (raised or error) from None


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
