"""Passes of one sequence, recorded once for each width and then replayed without the Python between their operations.

In a pass of a small model that Python (modules, decorators, masks) takes a third to a half of the time, on a GPU often more
than the device needs. torch's tracer writes down which operations a pass comes to, and replays them: the same kernels in
the same order on the same shapes. So results are equal bit by bit, which is looked at before a recording is used; a model of
which that is not so, or which decides by what it sees, is run as ever. torch would rather have `torch.compile` used, which
on the CPU needs a C++ compiler, takes minutes, and rounds differently; where the tracer is gone nothing is recorded.

Served: stock modules of torch and transformers without hooks, sdpa attention, a cache of full layers, no padding.
"""

import inspect
import logging
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import TracerWarning
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerationMixin

from specplug.cache import NAME
from specplug.config import first_line

log = logging.getLogger(__name__)

GRAPHS = ("capture", "off")
MAX_WIDTH = 64
# A recording costs about twenty passes and saves a third of one: it is made where a width has come up so often that it is
# likely to come up so often again.
USES_BEFORE = 16
STOCK = ("torch.nn.", "transformers.", "specplug.")
# What is decided there depends on the width and on whether there is a mask, which are the same in every replay.
DECIDED_BY_WIDTH = ("sdpa_attention.py", "masking_utils.py")


class Capture:
    """What one call spends on recordings, for all its models.

    Args: `graph`, one of GRAPHS; how often a width has to come up before it is recorded.
    """

    def __init__(self, graph: str = "off", uses_before: int | None = None) -> None:
        self.graph = graph
        self.uses_before = USES_BEFORE if uses_before is None else uses_before
        self.seconds = 0.0  # not those of any pass

    def passes(self, model: PreTrainedModel) -> "Passes":
        return Passes(self, model)


class Passes:
    """The passes of one model in one call, on one sequence without padding."""

    def __init__(self, capture: Capture, model: PreTrainedModel) -> None:
        self._capture, self._model = capture, model
        self._recordings: dict[Any, Recording] | None = None
        if capture.graph == "capture":
            with RECORDING:  # meanwhile a model holds other tensors in the place of its weights
                self._recordings, self._weights = _recordings(model), list(model.parameters())

    def __call__(self, ids: Tensor, cache: Any, ordinary: Callable[[], Tensor]) -> Tensor:
        """Logits (1, W, V) of `ids`, (1, W), which stand behind what `cache` holds, and then are in it.

        `ordinary`: the same as transformers does it.
        """
        width = ids.shape[1]
        if self._recordings is None or width > MAX_WIDTH or not _served(cache):
            return ordinary()
        recording = self._recordings[width, torch.is_inference_mode_enabled()]
        if recording.ready:
            logits, *held = recording.run(_inputs(ids, cache), self._weights)
            for layer, keys, values in zip(cache.layers, held[::2], held[1::2], strict=True):
                layer.keys, layer.values = keys, values
            return logits
        started = time.perf_counter()
        replayed = None
        recording.uses += 1
        if recording.uses > self._capture.uses_before and not recording.refused:
            replayed = recording.prepare(self._model, _inputs(ids, cache), self._weights)
        over = time.perf_counter()
        logits = ordinary()
        self._capture.seconds += over - started
        if replayed is not None:
            recording.check(replayed, [logits, *_held(cache)])
        return logits


RECORDING = threading.Lock()


class Recording:
    """The pass of one width: first counted, then recorded, then compared, then used; or refused for good."""

    def __init__(self) -> None:
        self.uses, self.recorded_at = 0, -1
        self.replay: Any = None
        self.ready = self.refused = False

    def prepare(self, model: PreTrainedModel, inputs: list[Tensor], weights: list[nn.Parameter]) -> list[Tensor] | None:
        """Record, or return a replay that is to be compared."""
        length = inputs[-1].shape[-2]
        with RECORDING:
            try:
                if self.refused:  # by another thread
                    return None
                if self.replay is None:
                    self.replay, self.recorded_at = record(model, inputs), length
                elif length != self.recorded_at:  # what was recorded at one length has to be right at another
                    for _ in range(3):  # what torch makes of a recording settles with its second run
                        replayed = self.run(inputs, weights)
                    return replayed
            except Exception as error:  # whatever a model does that cannot be recorded
                self._refuse(f"{type(model).__name__}: {first_line(error)}")
            return None

    def run(self, inputs: list[Tensor], weights: list[nn.Parameter]) -> list[Tensor]:
        """Logits, and keys and values of each layer."""
        if inputs[0].device.type == "cpu":
            return list(self.replay(*inputs, *weights))
        # No fusing of operations: it compiles for long, and rounds otherwise.
        with torch.jit.optimized_execution(False):
            return list(self.replay(*inputs, *weights))

    def check(self, replayed: list[Tensor], expected: list[Tensor]) -> None:
        if not self.refused and len(replayed) == len(expected) and all(map(torch.equal, replayed, expected)):
            self.ready = True
        else:
            self._refuse("a replay differs from the pass")

    def _refuse(self, reason: str) -> None:
        self.ready, self.refused = False, True
        log.debug("specplug: passes are not captured: %s", reason)


class GivenLayer(DynamicLayer):
    """A layer of which the keys and values are inputs of the recording.

    Its length is a plain number, as it is outside a recording: transformers takes it to see that one position needs no mask.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__()
        self.length = length
        self.keys: Any = keys
        self.values: Any = values
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device

    def get_seq_length(self) -> int:
        return self.length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        return self.keys, self.values


def record(model: PreTrainedModel, inputs: list[Tensor]) -> Any:
    """A function of `inputs`, see `_inputs`, and of the weights, that returns logits and what the cache holds then.

    Raises ValueError if the model decides anything by more than the width. The weights are inputs as well, so that a recording
    stays right where they are replaced by others.
    """
    masked, length = inputs[0].shape[1] > 1, inputs[-1].shape[-2]
    names, weights = zip(*model.named_parameters(), strict=True)

    def forward(ids: Tensor, positions: Tensor, mask: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        past, weights = given[: len(given) - len(names)], given[len(given) - len(names) :]
        cache = DynamicCache(config=model.config)
        cache.layers = [GivenLayer(*each, length) for each in zip(past[::2], past[1::2], strict=True)]
        arguments = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": mask if masked else None,
            "use_cache": True,
            "return_dict": True,
            NAME: cache,
        }
        with _reparametrize_module(model, dict(zip(names, weights, strict=True)), tie_weights=True):
            outputs: Any = model(**arguments)
        return outputs.logits, *_held(cache)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # `torch.jit.trace` is these two lines, but that it keeps what it made, megabytes a recording, until the process ends.
        graph, _ = torch._C._create_graph_by_tracing(forward, (*inputs, *weights), lambda _: "", True, False, None, [])
        recording = torch._C._create_function_from_graph("forward", graph)
    for each in caught:
        if issubclass(each.category, TracerWarning) and not each.filename.endswith(DECIDED_BY_WIDTH):
            raise ValueError(f"{each.filename}, line {each.lineno}: {first_line(each.message)}")  # type: ignore[arg-type]
    return recording


def _inputs(ids: Tensor, cache: Any) -> list[Tensor]:
    """ids (1, W), their positions, what each may look at, and keys and values of each layer in turn, (1, H, T, D) each."""
    past = _held(cache)
    width, length = ids.shape[1], past[0].shape[-2]
    positions = torch.arange(length, length + width, device=ids.device)[None]
    if width == 1:  # may look at everything: no mask, and something in its place
        return [ids, positions, positions, *past]
    # Each may look at itself and at what is before it.
    seen = torch.ones((width, length + width), dtype=torch.bool, device=ids.device).tril_(length)
    return [ids, positions, seen[None, None], *past]


def _served(cache: Any) -> bool:
    return bool(cache.layers) and all(type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers)


def _held(cache: Any) -> list[Tensor]:
    return [each for layer in cache.layers for each in (layer.keys, layer.values)]


_KNOWN: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, dict[Any, Recording]]]" = weakref.WeakKeyDictionary()


def _recordings(model: PreTrainedModel) -> dict[Any, Recording] | None:
    """Those of this model as it is now; None if it cannot be recorded. A model that was changed is recorded anew."""
    if why_not(model) is not None:
        return None
    state: list[Any] = []
    for module in model.modules():
        state += map(id, (*module._parameters.values(), *module._buffers.values()))
        state += type(module), type(module).forward, *_plain(module)
    for config in {id(each): each for each in (model.config, model.config.get_text_config())}.values():
        state += _plain(config)
    known = _KNOWN.get(model)
    if known is None or known[0] != state:
        known = _KNOWN[model] = (state, defaultdict(Recording))
    return known[1]


def _plain(holder: Any) -> list[Any]:
    """Values that a recording has as constants, as the epsilon of a norm is."""
    return [value for value in vars(holder).values() if type(value) in (int, float, bool, str, type(None))]


def why_not(model: PreTrainedModel) -> str | None:
    """None if this model's passes may be recorded, else the reason."""
    if not (hasattr(torch._C, "_create_graph_by_tracing") and hasattr(torch._C, "_create_function_from_graph")):
        return "this torch cannot record"
    if torch.is_autocast_enabled(model.device.type) or torch.is_grad_enabled():
        return "the call runs under autocast, or with gradients"
    if _get_current_dispatch_mode() is not None or _get_current_function_mode() is not None:
        return "the call runs under a mode that watches operations"
    if model.config._attn_implementation != "sdpa":
        return f"its attention is {model.config._attn_implementation}, and only sdpa is recorded"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return "its forward takes no position_ids"
    if getattr(type(model), "prepare_inputs_for_generation", None) is not GenerationMixin.prepare_inputs_for_generation:
        return "it prepares its inputs in a way of its own"
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return "there are hooks on all modules"
    for module in model.modules():
        if not type(module).__module__.startswith(STOCK):
            return f"{type(module).__name__} is no module of torch or transformers"
        if module.training or module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"{type(module).__name__} is in training, has hooks or a forward of its own"
        if module._compiled_call_impl is not None or hasattr(module, "parametrizations"):
            return f"{type(module).__name__} is compiled or parametrized"
    return None
