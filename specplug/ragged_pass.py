"""Passes over several rows of any lengths where there are no graphs for them: recorded as those of one sequence are, see capture.py.

A pass looks no further than the longest row goes, and has the rows and the width that it needs.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specplug.capture import MAX_WIDTH, USES_BEFORE, Capture, recordings_of
from specplug.fixed import FixedPasses, run_pass
from specplug.ragged import Places, RaggedCache
from specplug.recording import trace_with_weights


class RaggedPasses(FixedPasses):
    has_graphs = False

    def __init__(self, model: PreTrainedModel, capture: Capture) -> None:
        super().__init__(model, capture)
        self._num_slots = 0  # that hold anything
        self._rest: RaggedCache | None = None  # what is left of the cache when rows have left
        self._recorded_after = USES_BEFORE if capture.uses_before is None else capture.uses_before
        self._recordings, self._weights = recordings_of(model, capture.graph)

    @property
    def cache(self) -> RaggedCache:
        return super().cache if self._rest is None else self._rest

    def fill(self, cache: DynamicCache, padding: list[int], room: int = 0) -> None:
        super().fill(cache, padding, room)
        self._num_slots = cache.get_seq_length()

    def make_room(self, length: int) -> None:
        before = self._buffers
        super().make_room(length)
        if self._buffers is not before:
            self._rest = None

    def select(self, rows: Sequence[int]) -> None:
        """In place: the others move to the front."""
        cache = self.cache
        index = torch.tensor(rows, device=cache.device)
        with torch.inference_mode():
            for each in cache.held(self._num_slots):
                each[:, : len(rows)] = each.index_select(1, index)
        self._rest = cache.first(len(rows))

    def __call__(self, ids: Tensor, starts: Sequence[int]) -> Tensor:
        width = ids.shape[1]
        num_slots = max(starts) + width
        self.make_room(num_slots)
        self._num_slots = max(self._num_slots, num_slots)
        cache = self.cache
        positions = torch.tensor(starts, device=ids.device)[:, None] + torch.arange(width, device=ids.device)
        if isinstance(self._recordings, str) or width > MAX_WIDTH:
            self.capture.count(self.model, False, self._recordings if isinstance(self._recordings, str) else None)
            return self._ordinary(ids, positions, num_slots)
        # One position is computed otherwise than several.
        recording = self._recordings["ragged", width == 1, torch.is_inference_mode_enabled()]
        inputs, shape = [ids, positions, cache.places.rows], (len(ids), width)
        if shape in recording.ready:
            self.capture.count(self.model, True)
            return recording.run([*inputs, *cache.held(num_slots)], self._weights).float()
        started = time.perf_counter()
        replayed = None
        recording.uses += 1
        if recording.uses > self._recorded_after and not recording.refused:
            aside = [each.clone() for each in cache.held(num_slots)]  # that a mistake may spoil
            given = [*inputs, *aside]
            replayed = recording.prepare(
                lambda: record(self.model, cache, given), num_slots - width, given, self._weights
            )
        over = time.perf_counter()
        logits = self._ordinary(ids, positions, num_slots)
        self.capture.seconds += over - started
        if replayed is not None:
            recording.check(shape, [replayed.float(), *aside], [logits, *cache.held(num_slots)])
        self.capture.count(self.model, False, recording.refused)
        return logits

    def _ordinary(self, ids: Tensor, positions: Tensor, num_slots: int) -> Tensor:
        self.cache.places.num_slots = num_slots
        return run_pass(self.model, ids, positions, self.cache).float()


def record(model: PreTrainedModel, cache: RaggedCache, inputs: list[Tensor]) -> Any:
    """A function of ids and positions, (B, W) each, numbers of the rows, (B, 1), what `cache` holds as far as the pass may look, and
    the weights, that returns logits. Raises as `trace`."""

    def forward(ids: Tensor, positions: Tensor, rows: Tensor, *held: Tensor) -> Tensor:
        return run_pass(model, ids, positions, cache.over(list(held), Places(rows)))

    # The same with one more row, one more position, unless one alone is computed otherwise, and more before it.
    more, before = int(inputs[0].shape[1] > 1), 7
    pad = torch.nn.functional.pad
    ids, positions, _, *held = inputs
    others = [pad(ids, (0, more, 0, 1)), pad(positions, (0, more, 0, 1)), torch.arange(len(ids) + 1)[:, None]]
    others += [pad(each, (0, 0, 0, before + more, 0, 0, 0, 1)) for each in held]
    return trace_with_weights(model, forward, inputs, others)
