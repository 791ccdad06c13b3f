"""Passes of one sequence, recorded once for one position and once for several, and replayed without the Python in between.

A third to a half of the time of a small model's pass is Python: modules, decorators, masks; on a GPU that is often more than the
kernels take. torch's tracer writes down the operations of a pass, and replays them: the same arithmetic in the same order, so that
results are equal bit by bit. That is checked before a recording is used, and at each width anew; a model for which it does not
hold, or which branches on values, runs as usual. torch recommends `torch.compile` instead, which on the CPU needs a C++ compiler,
takes minutes, and rounds differently. Where a later torch has no tracer, nothing is recorded.

Served: stock modules of torch and transformers without hooks, sdpa and eager attention, a cache of full layers, no padding. Sliding windows are
served by ragged_pass.py.
"""

import functools
import inspect
import sys
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerationMixin

from specplug.attention import own_sdpa
from specplug.cache import NAME, Rooms, RoomyLayer
from specplug.choices import Graph
from specplug.recording import RECORDING, Recording, trace_with_weights
from specplug.stats import Stats
from specplug.swapping import modules_of

if TYPE_CHECKING:
    from specplug.fixed import FixedPasses

GRAPHS = tuple(each.value for each in Graph)
MAX_WIDTH = 64
ROOM = 256  # positions; masks are made for a whole multiple of them
# A recording costs about twenty passes and saves a third of one: it is made where there were so many that as many again are
# likely.
USES_BEFORE = 16
PLAIN = frozenset((int, float, bool, str, type(None)))
STOCK = ("torch.nn.", "transformers.", "specplug.")


class Capture:
    """Recordings and graphs of one call, of all its models, the seconds that making them took, and how many passes were replays.

    Args: `graph`, one of GRAPHS; `uses_before`, how many passes of a kind there are before one is recorded, None for as many as
    make it likely that a recording is repaid.
    """

    def __init__(self, graph: str = "off", uses_before: int | None = None) -> None:
        self.graph = graph
        self.uses_before = uses_before
        self.seconds = 0.0  # of recording, without the ordinary passes made meanwhile
        self.num_early = 0  # runs of programs that are going to be captured, and take several times as long until then
        self.num_passes = self.num_replayed = 0
        self.not_replayed: Counter[str] = Counter()  # as `Stats` has it
        self._opened: list[Any] = []

    def count(self, model: PreTrainedModel, replayed: bool, reason: str | None = None, num: int = 1) -> None:
        """So many passes. `reason`: why they were no replays, and never will be."""
        self.num_passes += num
        self.num_replayed += num * replayed
        if reason is not None:
            self.not_replayed[f"{type(model).__name__}: {reason}"] += num

    def add_to(self, stats: Stats) -> None:
        stats.seconds_capture += self.seconds
        stats.num_passes += self.num_passes
        stats.num_replayed += self.num_replayed
        stats.not_replayed.update(self.not_replayed)

    def passes(self, model: PreTrainedModel, reason: str | None = None) -> "Passes":
        """`reason`: why they are not to be recorded in this call."""
        return Passes(self, model, reason)

    def fixed(self, model: PreTrainedModel) -> "FixedPasses":
        """Passes of rows of any lengths, until `close`: at fixed shapes where the device has graphs for them."""
        from specplug.fixed import FixedPasses, has_graphs
        from specplug.ragged_pass import RaggedPasses

        kind = FixedPasses if has_graphs(model, self.graph) else RaggedPasses
        opened: FixedPasses = kind(model, self)
        self._opened.append(opened)
        return opened

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()


class Passes:
    """The passes of one model in one call, on one sequence without padding."""

    def __init__(self, capture: Capture, model: PreTrainedModel, reason: str | None = None) -> None:
        self.capture, self.model = capture, model
        self._uses_before = USES_BEFORE if capture.uses_before is None else capture.uses_before
        self._recordings, self.weights = recordings_of(model, capture.graph) if reason is None else (reason, [])

    def recording(self, key: Hashable, inference: bool, most: int) -> Recording | None:
        """Of the model as it is. None where it is not to be recorded, or there are so many recordings already, and not this one."""
        known = self._recordings
        if isinstance(known, str) or (len(known) >= most and (key, inference) not in known):
            return None
        return known[key, inference]

    def __call__(
        self, ids: Tensor, cache: Any, ordinary: Callable[[], Tensor], given: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Logits (1, W, V) of `ids`, (1, W), which stand behind what `cache` holds, and then are in it.

        `ordinary`: the same as transformers does it. `given`: what it gives the model as `position_ids`, (1, W), and
        `attention_mask`, (1, 1, W, T + W), where the ids are not one behind another.
        """
        width = ids.shape[1]
        if isinstance(self._recordings, str) or width > MAX_WIDTH or not served(cache):
            if cache.get_seq_length():  # else it is a draft's prompt
                other = None if width > MAX_WIDTH else "its cache has layers that do not hold the whole text"
                self.capture.count(self.model, False, self._recordings if isinstance(self._recordings, str) else other)
            return ordinary()
        inputs = _inputs(ids, cache, _is_eager(self.model), given)
        kind = None if given is None and width == 1 else inputs[2].dtype  # of the mask, where there is one
        recording = self._recordings[kind, torch.is_inference_mode_enabled()]
        rooms: Rooms = cache.layers[0].rooms
        if width in recording.ready:
            self.capture.count(self.model, True)
            logits: Tensor = recording.run([*inputs, *rooms.lengthen(width)], self.weights)
            return logits
        make = functools.partial(record, self.model)
        return self.compared(recording, width, inputs, cache, make, lambda: [ordinary()])[0]

    def compared(
        self,
        recording: Recording,
        width: int,
        inputs: list[Tensor],
        cache: Any,
        make: Callable[[Rooms, list[Tensor]], Any],
        ordinary: Callable[[], list[Tensor]],
    ) -> list[Tensor]:
        """What `ordinary` makes, of `inputs` and of what the cache holds, to which it adds `width` positions, as long as the recording
        is not ready for that. On the way there it is made, by `make`, of the inputs and of keys and values with room, and compared."""
        started = time.perf_counter()
        replayed: Any = None
        rooms: Rooms = cache.layers[0].rooms
        recording.uses += 1
        if recording.uses > self._uses_before and not recording.refused:
            rooms.make_room(1)
            length = cache.get_seq_length()
            # Copies, that a mistake may spoil: positions and masks are those of other passes too.
            copies = {id(each): each.clone() for each in inputs}
            given = [copies[id(each)] for each in inputs]
            given += [torch.nn.functional.pad(each, (0, 0, 0, width)) for each in rooms.held(length)]
            replayed = recording.prepare(lambda: make(rooms, given), length, given, self.weights)
        over = time.perf_counter()
        found = ordinary()
        self.capture.seconds += over - started
        if replayed is not None:
            parts = [replayed] if isinstance(replayed, Tensor) else list(replayed)
            recording.check(width, [*parts, *given], [*found, *inputs, *rooms.held(cache.get_seq_length())])
        self.capture.count(self.model, False, recording.refused)
        return found


class GivenLayer(DynamicLayer):
    """A layer of which the keys and values are inputs of the recording, with room at their end for what the pass adds.

    Its length is a plain number, as it is outside a recording: transformers takes it to see that one position needs no mask. `end`:
    where the positions of the pass begin, counted from behind.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int, end: int) -> None:
        super().__init__()
        self.length = length
        self.keys: Any = keys
        self.values: Any = values
        self.end = end
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device

    def get_seq_length(self) -> int:
        return self.length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys[:, :, self.end :].copy_(key_states)
        self.values[:, :, self.end :].copy_(value_states)
        return self.keys, self.values


def record(model: PreTrainedModel, rooms: Rooms, inputs: list[Tensor]) -> Any:
    """A function of `inputs`, see `_inputs`, with keys and values as `rooms` has them, and of the weights, that returns logits.

    Raises as `trace`.
    """
    masked, length = inputs[2] is not inputs[1], inputs[-1].shape[-2] - inputs[0].shape[1]
    # transformers takes a mask of four dimensions as it is, and eager attention adds it.
    added = _is_eager(model) and inputs[2].dtype == torch.bool

    def forward(ids: Tensor, positions: Tensor, mask: Tensor, *past: Tensor) -> Tensor:
        cache = DynamicCache(config=model.config)
        end = -ids.shape[1]  # computed once
        cache.layers = [GivenLayer(*each, length, end) for each in rooms.layers_of(list(past))]
        arguments = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": (_to_add(mask, model.dtype) if added else mask) if masked else None,
            "use_cache": True,
            "return_dict": True,
            NAME: cache,
        }
        logits: Tensor = model(**arguments).logits
        return logits

    # The same with one more position, unless one alone is computed otherwise, and more before it.
    more, before = int(inputs[0].shape[1] > 1), 7
    pad = torch.nn.functional.pad
    ids, positions, mask, *held = inputs
    others = [pad(ids, (0, more)), pad(positions, (0, more)), pad(mask, (0, more))]
    if masked:
        others[2] = pad(mask, (0, before + more, 0, more))
    others += [pad(each, (0, 0, 0, before + more)) for each in held]
    return trace_with_weights(model, forward, inputs, others)


def _to_add(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """As transformers makes it for eager attention."""
    nothing = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, nothing, torch.finfo(dtype).min)


def _is_eager(model: PreTrainedModel) -> bool:
    return model.config._attn_implementation == "eager"


def _inputs(ids: Tensor, cache: Any, always: bool, given: Mapping[str, Tensor] | None = None) -> list[Tensor]:
    """ids (1, W), their positions, and what each may look at of the T positions in the cache and of these. `always`: also where that is
    everything; eager attention has a mask then, too, which transformers would make for this length."""
    if given is not None:
        return [ids, given["position_ids"], given["attention_mask"]]
    width, length = ids.shape[1], cache.layers[0].get_seq_length()
    room = length + -length % ROOM  # for the texts of many rounds
    positions = _positions(room, ids.device)[:, length : length + width]
    if width == 1 and not always:  # may look at everything: no mask, and something in its place
        return [ids, positions, positions]
    return [ids, positions, _seen(width, room, ids.device)[:, :, :, room - length :]]


@functools.lru_cache(4)
@torch.inference_mode(False)
def _positions(room: int, device: torch.device) -> Tensor:
    return torch.arange(room + MAX_WIDTH, device=device)[None]


@functools.lru_cache(32)
@torch.inference_mode(False)
def _seen(width: int, room: int, device: torch.device) -> Tensor:
    """(1, 1, W, R + W): each of the last `width` positions may look at itself and at what is before it. Of a shorter text, the end."""
    return torch.ones((width, room + width), dtype=torch.bool, device=device).tril_(room)[None, None]


def served(cache: Any) -> bool:
    """Whether passes over what it holds may be recorded: full layers alone, with room behind them."""
    layers = cache.layers
    return bool(layers) and type(layers[0]) is RoomyLayer and len(layers[0].rooms.layers) == len(layers)


_KNOWN: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, dict[Any, Recording]]]" = weakref.WeakKeyDictionary()


def recordings_of(model: PreTrainedModel, graph: str) -> tuple[dict[Any, Recording] | str, list[nn.Parameter]]:
    """Those of this model as it is now, or the reason why it is not to be recorded, and its weights, in the order of
    `named_parameters`. A model that was changed is recorded anew."""
    if graph != "capture":
        return f"graph={graph}", []
    with RECORDING:  # meanwhile a model holds other tensors in the place of its weights
        return _recordings(model)


def _recordings(model: PreTrainedModel) -> tuple[dict[Any, Recording] | str, list[nn.Parameter]]:
    modules = modules_of(model)
    reason = why_not(model, modules)
    if reason is not None:
        return reason, []
    weights = [each for module in modules for each in module._parameters.values()]
    buffers = [each for module in modules for each in module._buffers.values()]
    state: list[Any] = [*map(id, weights), *map(id, buffers), {each.dtype for each in weights if each is not None}]
    state += values_of(modules)
    # Functions of theirs too, in the place of which a caller may put others.
    for name in dict.fromkeys(type(module).__module__ for module in modules):
        state += [each for each in vars(sys.modules[name]).values() if type(each) is FunctionType]
    for config in {id(each): each for each in (model.config, model.config.get_text_config())}.values():
        state += plain_values(config)
    known = _KNOWN.get(model)
    if known is None or known[0] != state:
        known = _KNOWN[model] = (state, defaultdict(Recording))
    return known[1], list(dict.fromkeys(each for each in weights if each is not None))


def values_of(modules: Iterable[nn.Module]) -> list[Any]:
    """What they are, and values that a recording has as constants."""
    found: list[Any] = []
    attention: dict[int, Any] = {}  # of a config, which packed.py may have changed; to ask for it takes long
    for module in modules:
        found += type(module), type(module).forward, *plain_values(module)
        config = vars(module).get("config")
        if config is not None:
            if id(config) not in attention:
                attention[id(config)] = getattr(config, "_attn_implementation", None)
            found.append(attention[id(config)])
    return found


def plain_values(holder: Any) -> list[Any]:
    """As the epsilon of a norm is."""
    return [value for value in vars(holder).values() if type(value) in PLAIN]


def why_not(model: PreTrainedModel, modules: list[nn.Module]) -> str | None:
    """None if the passes of this model, which has these modules, may be recorded, else the reason."""
    if not (hasattr(torch._C, "_create_graph_by_tracing") and hasattr(torch._C, "_create_function_from_graph")):
        return "this torch cannot record"
    if model.device.type == "meta":
        return "its weights are kept elsewhere"
    if torch.is_autocast_enabled(model.device.type) or torch.is_grad_enabled():
        return "the call runs under autocast, or with gradients"
    if _get_current_dispatch_mode() is not None or _get_current_function_mode() is not None:
        return "the call runs under a mode that watches operations"
    if model.config._attn_implementation not in ("sdpa", "eager"):
        return f"its attention is {model.config._attn_implementation}, and only sdpa and eager are recorded"
    if not own_sdpa():
        return "sdpa is a function of the caller's"
    if not _takes_positions(type(model).forward):
        return "its forward takes no position_ids"
    if getattr(type(model), "prepare_inputs_for_generation", None) is not GenerationMixin.prepare_inputs_for_generation:
        return "it prepares its inputs in a way of its own"
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return "there are hooks on all modules"
    for kind in {type(module) for module in modules}:
        if not kind.__module__.startswith(STOCK):
            return f"{kind.__name__} is no module of torch or transformers"
    for module in modules:
        held = vars(module)
        if held["training"] or held["_forward_hooks"] or held["_forward_pre_hooks"] or "forward" in held:
            return f"{type(module).__name__} is in training, has hooks or a forward of its own"
        if module._compiled_call_impl is not None or "parametrizations" in held["_modules"]:
            return f"{type(module).__name__} is compiled or parametrized"
    return None


@functools.cache
def _takes_positions(forward: Callable[..., Any]) -> bool:
    return "position_ids" in inspect.signature(forward).parameters
