"""Passes at fixed shapes: the same operations over buffers at fixed addresses, so that a device can replay them as one graph.

A decode step of a small model is bound by the launches of its kernels, so a draft in eager mode costs nearly what the target
costs, and speculation loses. A graph is launched once. What is captured here is a *program*: a function without arguments that
reads and writes buffers, a pass of one width (`Pass`), or a draft's whole loop (drafters/fixed_model.py). Programs and their buffers
are kept with the model for its next calls; a call takes a set of them for itself. A program that cannot be captured is run as it is,
which is said once.

Served: models whose attention takes masks and positions of ours, see `why_not`, on one device; batches of any size.
"""

import inspect
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.generation import GenerationMixin

from specplug.cache import CROPPABLE, NAME, new_draft_cache
from specplug.capture import Capture, plain_values, values_of
from specplug.capture import why_not as why_not_recorded
from specplug.config import first_line
from specplug.graphs import GRAPHS, Graph, compiled_passes, say_once
from specplug.ragged import FULL, SLIDING, RaggedCache
from specplug.swapping import modules_of

# Widths that passes are padded to; a wider pass has its own width.
WIDTHS = (1, 2, 3, 5, 9, 17, 33)
MIN_ROOM = 256  # positions of a row at least; doubled when they are used up
# Sets of buffers that a model keeps for its next calls: so many, and with several no more than such a share of its weights.
KEPT, KEPT_SHARE = 4, 0.25
PROGRAMS = 24  # of a set: widths, and numbers of drafts with each list of processors; the one not used for longest goes
# Of a program, before it is captured: capturing runs it three times and costs as much again, and replays save most of a run.
USES_BEFORE = 4
WINDOWS = 2
OURS = ("torch", "transformers", "bitsandbytes", "specplug")  # packages whose modules may be captured


class Program:
    """A function that reads and writes buffers, how often it was run, and its graph."""

    def __init__(self, function: Any) -> None:
        self.function, self.uses = function, 0
        self.graph: Graph | None = None


class Buffers:
    """The cache of one model for so many rows and so much room, and the programs on it. One call has it at a time."""

    def __init__(self, model: PreTrainedModel, like: DynamicCache, num_rows: int, room: int, state: list[Any]) -> None:
        self.model = weakref.ref(model)  # which these are kept with
        self.cache, self.state = RaggedCache(model, like, num_rows, room), state
        self.programs: dict[Hashable, Program] = {}
        self.shared: dict[str, Any] = {}  # among its graphs
        self.refused: str | None = None  # the reason why it cannot be captured
        self.used: Any = None  # behind the last call's work on the device; the next may be on another stream

    def forward(self, ids: Tensor, positions: Tensor, compiled: bool = False) -> Tensor:
        """A pass as it is, (B, W) and (B, W) -> (B, W, V): part of a program."""
        model: Any = self.model()
        return run_pass(compiled_passes(model) if compiled else model, ids, positions, self.cache)


def run_pass(model: Any, ids: Tensor, positions: Tensor, cache: RaggedCache) -> Tensor:
    """(B, W) and (B, W) -> (B, W, V)"""
    cache.places.positions = positions
    inputs = {
        "input_ids": ids,
        "position_ids": positions,
        "attention_mask": cache.masks(positions),
        "use_cache": True,
        "return_dict": True,
        NAME: cache,
    }
    logits: Tensor = model(**inputs).logits
    return logits


def weakly(buffers: Buffers) -> Callable[[Tensor, Tensor, bool], Tensor]:
    """Their `forward`, for a program, which they keep: else both would stay, and the device's memory with them, until the next collection
    of garbage, which may also come in the middle of a capture."""
    weak = weakref.WeakMethod(buffers.forward)

    def forward(ids: Tensor, positions: Tensor, compiled: bool) -> Tensor:
        own = weak()
        assert own is not None  # who runs a program has its buffers
        return own(ids, positions, compiled)

    return forward


class Pass:
    """One pass of a fixed width: `ids`, (B, W), at `starts`, (B,), and what follows, to `logits`, (B, W, V)."""

    def __init__(self, buffers: Buffers, width: int, compiled: bool) -> None:
        num_rows, device = buffers.cache.num_rows, buffers.cache.device
        with torch.inference_mode(False):
            self.ids = torch.zeros((num_rows, width), dtype=torch.long, device=device)
            self.starts = torch.zeros(num_rows, dtype=torch.long, device=device)
            self.steps = torch.arange(width, device=device)
        self.logits: Tensor | None = None
        self.forward, self.compiled = weakly(buffers), compiled

    def __call__(self) -> None:
        logits = self.forward(self.ids, self.starts[:, None] + self.steps, self.compiled)
        if self.logits is None:
            with torch.inference_mode(False):
                self.logits = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        self.logits.copy_(logits)


class FixedPasses:
    """The passes of one model in one call, on rows of any lengths. `close` when the call is over."""

    has_graphs = True  # so rows that are finished stay while half of them go on, and drafts are made by programs

    def __init__(self, model: PreTrainedModel, capture: Capture) -> None:
        self.model: Any = model
        self.capture, self._compiled = capture, capture.graph == "compile"
        self._graph = None if capture.graph == "off" else GRAPHS.get(model.device.type)
        self._uses_before = USES_BEFORE if capture.uses_before is None else capture.uses_before
        self._state = _state(model)
        self._buffers: Any = None
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._limit = limit if isinstance(limit, int) else None

    def fill(self, cache: DynamicCache, padding: list[int], room: int = 0) -> None:
        """Begin with what the pass over the prompts left in `cache`, with so much padding on the left of each row.

        `room`: positions that a row will need at least.
        """
        room = _rounded(max(room, cache.get_seq_length() + 1))
        self._buffers = _take(self.model, cache, len(padding), room, self._state)
        self._buffers.cache.fill(cache, padding)

    @property
    def cache(self) -> RaggedCache:
        held: RaggedCache = self._buffers.cache
        return held

    def __call__(self, ids: Tensor, starts: Sequence[int]) -> Tensor:
        """Logits (B, W, V), in fp32, of `ids`, (B, W), which stand at `starts` and behind, one start a row."""
        width = ids.shape[1]
        furthest = max(starts)
        padded = next((each for each in WIDTHS if each >= width), width)
        if self._limit is not None and furthest + padded > self._limit:
            padded = width  # padding has positions too, which embeddings of positions may not have
        self.make_room(furthest + padded)
        step = self.program(("pass", padded), lambda buffers, compiled: Pass(buffers, padded, compiled))
        step.function.ids[:, :width].copy_(ids)
        self.write(step.function.starts, starts)
        self.run(step)
        logits: Tensor = step.function.logits[:, :width].to(torch.float32, copy=True)  # which the next pass writes over
        return logits

    def program(self, key: Hashable, make: Callable[[Buffers, bool], Callable[[], None]]) -> Any:
        """The program of this name on the buffers of this call; made where there is none, out of them and whether the model is
        to be compiled."""
        programs = self._buffers.programs
        key = (key, self._compiled, torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled())
        # The last one used stands at the end.
        programs[key] = programs.pop(key, None) or Program(make(self._buffers, self._compiled))
        while len(programs) > PROGRAMS:
            del programs[next(iter(programs))]
        return programs[key]

    def run(self, program: Program) -> None:
        program.uses += 1
        if self._graph is None:  # nothing can be replayed here
            program.function()
            return
        if program.graph is None and program.uses > self._uses_before and not self._buffers.refused:
            self._make_graph(program)
        self.capture.count(self.model, program.graph is not None, self._buffers.refused)
        if program.graph is not None:
            program.graph()
        else:
            if program.uses > 0 and not self._buffers.refused:
                self.capture.num_early += 1
            # As it is captured, so that nothing is compiled for both.
            with torch.inference_mode(False), torch.no_grad():
                program.function()

    def _make_graph(self, program: Program) -> None:
        started = time.perf_counter()
        try:
            assert self._graph is not None
            program.graph = self._graph(program.function, self.cache.device, self._buffers.shared)
        except Exception as error:  # whatever a model does that cannot be captured
            program.uses = -(1 << 62)  # never again
            # Nor any other of the model's, which would fail as well, unless it was this one's size.
            if not isinstance(error, torch.OutOfMemoryError):
                self._buffers.refused = first_line(error)
            say_once(self.model, f"is run without graphs: {first_line(error)}")
        self.capture.seconds += time.perf_counter() - started

    def make_room(self, length: int) -> None:
        """Have so many positions a row; where there are fewer, what is held moves to larger buffers, once for each doubling."""
        old = self.cache
        if length > old.room:
            like: Any = old
            buffers = _take(self.model, like, old.num_rows, _rounded(length), self._state)
            buffers.cache.take_rows(old, to_device(range(old.num_rows), old.device))
            _leave(self.model, self._buffers)
            self._buffers = buffers

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone, in this order."""
        old = self.cache
        like: Any = old
        buffers = _take(self.model, like, len(rows), old.room, self._state)
        buffers.cache.take_rows(old, to_device(rows, old.device))
        _leave(self.model, self._buffers)
        self._buffers = buffers

    def write(self, buffer: Tensor, values: Sequence[int]) -> None:
        """Whole numbers, one a row, without waiting for the device."""
        if len(set(values)) == 1:
            buffer.fill_(values[0])
        else:
            buffer.copy_(to_device(values, buffer.device), non_blocking=True)

    def indices(self, values: Sequence[int]) -> Tensor:
        return to_device(values, self.cache.device)

    def close(self) -> None:
        if self._buffers is not None:
            _leave(self.model, self._buffers)
            self._buffers = None


def has_graphs(model: PreTrainedModel, graph: str) -> bool:
    """Whether passes of this model are to be run at fixed shapes."""
    return graph == "compile" or (graph != "off" and model.device.type in GRAPHS)


def why_not(model: PreTrainedModel, graph: str, num_rows: int = 1, length: int | None = None) -> str | None:
    """None if the passes of this model are to be run on a ragged cache, else the reason why not: where there are graphs for them,
    for several rows wherever passes are recorded, and for one if it has windows, and may come to `length` positions at most."""
    if not has_graphs(model, graph):
        reason = None
        if graph == "off":
            reason = f"graph=off on {model.device.type}"
        elif num_rows == 1:
            reason = _why_not_alone(model, length)
        if reason is not None:
            return reason
    if torch.is_autocast_enabled(model.device.type) or torch.is_grad_enabled():
        return "the call runs under autocast, or with gradients"
    text = model.config.get_text_config()
    if text._attn_implementation not in ("sdpa", "eager"):
        return f"attn_implementation={text._attn_implementation} takes no mask of our own"
    if set(getattr(text, "layer_types", None) or [FULL]) - {FULL, SLIDING} or getattr(
        text, "attention_chunk_size", None
    ):
        return "it has layers that are neither full nor sliding attention"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return "its forward takes no position_ids"
    if getattr(type(model), "prepare_inputs_for_generation", None) is not GenerationMixin.prepare_inputs_for_generation:
        return "it prepares its inputs in a way of its own"
    if len({each.device for each in model.parameters()}) != 1:
        return "it is on several devices"
    if any(type(layer) not in CROPPABLE for layer in new_draft_cache(model.config).layers):
        return "its cache has layers of another kind"
    for module in model.modules():
        reason = _why_not_module(module)
        if reason is not None:
            return f"{type(module).__name__} {reason}"
    if model not in _TRIED:
        _TRIED[model] = _tried_out(model)
    return _TRIED[model]


def _why_not_alone(model: PreTrainedModel, length: int | None) -> str | None:
    """One sequence has recordings of another kind, which are quicker, see capture.py; but for windows, since their layers drop what they
    do not see any more. Here they hold it, and look past it, so the text should not be much longer than they are."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if not window or SLIDING not in (getattr(config, "layer_types", None) or [SLIDING]):
        return "one sequence of full layers is recorded in another way"
    if length is None or length > WINDOWS * window:
        return f"a text may be longer than {WINDOWS} windows of {window} positions"
    return why_not_recorded(model, modules_of(model))


def _why_not_module(module: nn.Module) -> str | None:
    """A replay runs nothing of Python: neither hooks, nor what a module of somebody else's may do between its operations."""
    if type(module).__module__.partition(".")[0] not in OURS:
        return f"is none of the modules of {', '.join(OURS)}"
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return "has hooks, or a forward of its own"
    return "is in training" if module.training else None


def to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """(N,) whole numbers, without waiting for the device."""
    found = torch.tensor(values, dtype=torch.long)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def _rounded(length: int) -> int:
    room = MIN_ROOM
    while room < length:
        room *= 2
    return room


_LOCK = threading.Lock()
_IDLE: "weakref.WeakKeyDictionary[PreTrainedModel, list[Buffers]]" = weakref.WeakKeyDictionary()
_TRIED: "weakref.WeakKeyDictionary[PreTrainedModel, str | None]" = weakref.WeakKeyDictionary()


def _take(model: PreTrainedModel, like: DynamicCache, num_rows: int, room: int, state: list[Any]) -> Buffers:
    """Buffers for a call of its own: those of an earlier call, if the model is as it was then, or new ones."""
    with _LOCK:
        idle = _IDLE.setdefault(model, [])
        idle[:] = [each for each in idle if each.state == state]
        for each in idle:
            if each.cache.num_rows == num_rows and each.cache.room == room:
                idle.remove(each)
                if each.used is not None:
                    each.used.wait(torch.cuda.current_stream(each.cache.device))
                each.cache.clear()
                return each
    try:
        return Buffers(model, like, num_rows, room, state)
    except torch.OutOfMemoryError:
        release(model)
        return Buffers(model, like, num_rows, room, state)


def _leave(model: PreTrainedModel, buffers: Buffers) -> None:
    if buffers.cache.device.type == "cuda":
        buffers.used = torch.cuda.Event()
        buffers.used.record(torch.cuda.current_stream(buffers.cache.device))
    with _LOCK:
        idle = _IDLE.setdefault(model, [])
        idle.append(buffers)
        if len(idle) == 1:  # it stays always: without it every call would capture anew
            return
        most = sum(each.numel() * each.element_size() for each in model.parameters()) * KEPT_SHARE
        while len(idle) > 1 and (len(idle) > KEPT or sum(each.cache.num_bytes for each in idle) > most):
            idle.pop(0)


def release(model: PreTrainedModel) -> None:
    """Free the buffers and graphs that are kept for the model's next calls."""
    with _LOCK:
        _IDLE.pop(model, None)


def _state(model: PreTrainedModel) -> list[Any]:
    """What graphs take for granted: where the weights lie, what the modules are, and the numbers that they and the config hold."""
    tensors = [*model.parameters(), *model.buffers()]
    state: list[Any] = [(each.data_ptr(), each.dtype) for each in tensors]
    state += values_of(model.modules())
    for config in {id(each): each for each in (model.config, model.config.get_text_config())}.values():
        state += plain_values(config)
    return state


def _tried_out(model: PreTrainedModel) -> str | None:
    """Two rows of different lengths in one pass have to come out as each of them does alone, as transformers computes it."""
    vocab_size = model.config.get_text_config().vocab_size
    texts = [[number % vocab_size for number in row] for row in ((11, 5, 17, 7, 13, 3), (2, 19, 23, 29))]
    passes = FixedPasses(model, Capture("off"))
    try:
        with torch.no_grad():
            found, expected, others = [], [], []
            prompt = DynamicCache(config=model.config)
            ids = torch.tensor([[texts[0][0]], [texts[1][0]]], device=model.device)
            model(input_ids=ids, use_cache=True, return_dict=True, **{NAME: prompt})
            passes.fill(prompt, [0, 0])
            ids = torch.tensor([texts[0][1:4], [*texts[1][1:3], 0]], device=model.device)
            passes(ids, [1, 1])
            logits = passes(torch.tensor([texts[0][4:], [texts[1][3], 0]], device=model.device), [4, 3])
            for row, (text, at) in enumerate(zip(texts, (1, 0), strict=True)):
                found.append(logits[row, at].float().clone())
                expected.append(_last_logits(model, text))
                others.append(_last_logits(model, text[1:]))
    except Exception as error:
        return f"a pass with a mask and positions of our own fails: {first_line(error)}"
    finally:
        passes.close()
        release(model)
    share = 0.05 if model.dtype == torch.float32 else 0.25
    for one, right, wrong in zip(found, expected, others, strict=True):
        if not float((one - right).norm()) <= share * float((right - wrong).norm()):  # also for nan
            return "it does not heed the mask or the positions that it is given"
    return None


def _last_logits(model: Any, text: list[int]) -> Tensor:
    ids = torch.tensor([text], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -1]
    return logits.float()
