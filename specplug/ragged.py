"""A static key-value cache for sequences of different lengths: buffers at fixed addresses, each row written at its own positions.

A row's text begins at slot 0, whatever the others are, and slot and position are the same number. What a query may look at is said by
a mask made from positions alone, so to take tokens back is to go on at an earlier position: nothing is copied, and what stands
behind is written over before anything may look at it. One cache serves one sequence and several.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from specplug.cache import alike, by_layer

FULL, SLIDING = "full_attention", "sliding_attention"


class Places:
    """Where the pass under way writes, for all layers, and how far it may look."""

    def __init__(self, rows: Tensor, positions: Tensor | None = None) -> None:
        self.rows, self.positions = rows, positions  # (B, 1) numbers of the rows, (B, W)
        self.num_slots: int | None = None  # None: all of them


class RaggedLayer(CacheLayerMixin):
    is_compileable = True
    is_sliding = False  # a window is in the mask
    keys: Any
    values: Any

    def __init__(self, keys: Tensor, values: Tensor, places: Places) -> None:
        super().__init__()
        self.keys, self.values, self.places = keys, values, places  # (B, H, S, D)
        self.device, self.is_initialized = keys.device, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do: a ragged layer is made with its buffers."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """(B, H, W, D) are written at the places of this pass; returns the buffers, as far as it may look."""
        at = (self.places.rows, self.places.positions)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer.transpose(1, 2).index_put_(at, states.transpose(1, 2))
        if self.places.num_slots is None:
            return self.keys, self.values
        return self.keys[:, :, : self.places.num_slots], self.values[:, :, : self.places.num_slots]

    def get_seq_length(self) -> int:
        return 0  # positions are always given

    def get_max_length(self) -> int:
        room: int = self.keys.shape[2]
        return room

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0


class RaggedCache(Cache):
    """For `num_rows` sequences of up to `room` positions each, made after a `DynamicCache` that holds something."""

    def __init__(self, model: PreTrainedModel, like: Any, num_rows: int, room: int) -> None:
        self.num_rows, self.room = num_rows, room
        held = [each for layer in like.layers if layer.is_initialized for each in (layer.keys, layer.values)]
        self.parts = alike(held)
        self.tensors = [_zeros(held[each[0]], len(each), num_rows, room) for each in self.parts]  # (N, B, H, S, D) each
        rows = torch.arange(num_rows, device=held[0].device)[:, None]
        # A layer that holds nothing shares another's keys and values.
        self.empty = [None if layer.is_initialized else copy.copy(layer) for layer in like.layers]
        self.places = Places(rows)
        super().__init__(layers=self._layers(self.tensors, self.places))
        config = model.config.get_text_config()
        self.window: int = getattr(config, "sliding_window", None) or 0
        kinds = set(getattr(config, "layer_types", None) or [SLIDING if self.window else FULL])
        self.kinds = sorted(kinds)
        self.additive = model.dtype if config._attn_implementation == "eager" else None

    def _layers(self, tensors: list[Tensor], places: Places) -> list[Any]:
        filled = iter(by_layer(tensors, self.parts))
        return [RaggedLayer(*next(filled), places) if each is None else each for each in self.empty]

    def over(self, tensors: list[Tensor], places: Places) -> "RaggedCache":
        """The same over other tensors, for a recording."""
        other = copy.copy(self)
        other.tensors, other.places, other.layers = tensors, places, self._layers(tensors, places)
        return other

    def first(self, num_rows: int) -> "RaggedCache":
        """The first rows, in the same place."""
        rest = self.over([each[:, :num_rows] for each in self.tensors], Places(self.places.rows[:num_rows]))
        rest.num_rows = num_rows
        return rest

    def held(self, num_slots: int) -> list[Tensor]:
        """The first slots of all rows and layers, (N, B, H, num_slots, D) each."""
        return [each[:, :, :, :num_slots] for each in self.tensors]

    @property
    def device(self) -> torch.device:
        return self.places.rows.device

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.tensors)

    def _pairs(self, cache: DynamicCache) -> list[tuple[RaggedLayer, Any]]:
        """Each layer of ours with that of `cache`; without those that share another's keys and values."""
        pairs = zip(self.layers, cache.layers, strict=True)
        return [(mine, theirs) for mine, theirs in pairs if isinstance(mine, RaggedLayer)]

    def clear(self) -> None:
        """Hold what a new one holds: a nan that an earlier call left, of which a mask takes nothing away, would come out of every later one."""
        for each in self.tensors:
            each.zero_()

    def masks(self, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """What the queries at `positions`, (B, W), may look at, (B, 1, W, S) as the model's attention takes it."""
        num_slots = self.tensors[0].shape[3] if self.places.num_slots is None else self.places.num_slots
        slots = torch.arange(num_slots, device=positions.device)
        seen = slots <= positions[..., None]  # (B, W, S)
        by_kind = {FULL: seen}
        if SLIDING in self.kinds:
            by_kind[SLIDING] = seen & (slots > positions[..., None] - self.window)
        masks = {kind: self._as_taken(by_kind[kind][:, None]) for kind in self.kinds}
        return masks if len(masks) > 1 else masks[self.kinds[0]]

    def _as_taken(self, mask: Tensor) -> Tensor:
        if self.additive is None:
            return mask
        lowest = torch.finfo(self.additive).min
        return torch.zeros(mask.shape, dtype=self.additive, device=mask.device).masked_fill_(~mask, lowest)

    def fill(self, cache: DynamicCache, padding: list[int]) -> None:
        """Take over what the pass over the prompts left, (B, H, T, D) each layer, with so much padding on each row's left."""
        # Rows of one length at once: a row at a time is thousands of copies for a large batch.
        places: list[tuple[Any, int]] = list(enumerate(padding))
        if len(set(padding)) == 1:
            places = [(slice(None), padding[0])]
        for layer, source in self._pairs(cache):
            length, first = source.keys.shape[2], 0
            if isinstance(source, DynamicSlidingWindowLayer):  # holds the last positions alone
                first = source.get_seq_length() - length
            for b, left in places:
                skipped = max(left - first, 0)
                start = first + skipped - left
                for buffer, states in ((layer.keys, source.keys), (layer.values, source.values)):
                    buffer[b][..., start : start + length - skipped, :] = states[b][..., skipped:, :]

    def give_back(self, cache: DynamicCache, length: int, padding: int) -> None:
        """For one sequence: leave in `cache`, which holds its prompt, what plain decoding of so many positions behind so much
        padding would have left there."""
        for layer, target in self._pairs(cache):
            held_from, first = target.get_seq_length() - target.keys.shape[2], 0
            if isinstance(target, DynamicSlidingWindowLayer):  # holds the last positions alone
                first = max(padding + length - target.sliding_window + 1, 0)
                target.cumulative_length = padding + length
            target.keys, target.values = (
                torch.cat(
                    [
                        old[:, :, first - held_from : max(padding - held_from, 0)],
                        new[:1, :, max(first - padding, 0) : length],
                    ],
                    dim=2,
                )
                for old, new in ((target.keys, layer.keys), (target.values, layer.values))
            )

    def take_rows(self, other: "RaggedCache", rows: Tensor) -> None:
        """Those rows of another cache, in order, become the first ones here; the other may have less room."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine[:, : len(rows), :, : other.room] = theirs.index_select(1, rows)


def _zeros(like: Tensor, number: int, num_rows: int, room: int) -> Tensor:
    """A slot that is masked still takes part in sums, with a weight of zero, so it must hold a number."""
    with torch.inference_mode(False):  # written in and out of it
        shape = number, num_rows, like.shape[1], room, like.shape[3]
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
