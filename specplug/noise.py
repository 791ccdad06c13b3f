"""Where the random numbers of the walk rule come from, and how a draft sees them without taking any.

A draw by an exponential race, argmax of p / e, needs one number e per token of the vocabulary. Whoever knows e before the
target has spoken can let a draft run the same race with its own probabilities: it then wins the target's token far more
often than by its argmax. Two sources: `StreamAhead`, the numbers that torch's global stream is going to give, and `Keyed`,
numbers that belong to a seed, a sequence and a position.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch import Tensor
from transformers import LogitsProcessor

from specplug.verify import sample_by

LARGEST_KEY = 2**64 - 1  # what Philox takes


class Noise(Protocol):
    def begin(self, lengths: Sequence[int]) -> None:
        """A proposal is going to be made for texts of these lengths, one a row."""
        ...

    def of(self, rows: Sequence[int], lengths: Sequence[int], like: Tensor) -> Tensor:
        """The noise of the draws that follow texts of these lengths, (N, V), on the device of `like` and for its V."""
        ...


class StreamAhead:
    """What the target's next draws from the global stream will use: a copy of the stream is run ahead of it.

    The stream itself is only read: to move it and put it back would give other threads the same numbers twice.
    `torch.multinomial` of (B, V), one sample a row, is a race with B * V exponential numbers drawn at once (tested
    for torch 2.13 on the CPU). The target's own draws are made by that very call; so where it works otherwise, drafts are
    kept less often, and nothing else changes.

    Args: the number of sequences that are drawn for at once, the size of the vocabulary, where the draws are made.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.shape, self.device = (num_rows, vocab_size), device
        self.copy: torch.Generator | None = None
        self.draws: list[Tensor] = []  # (B, V) each: of the next draw, of the one behind it, ...
        self.lengths: list[int] = []  # of the texts that the next draw follows

    def begin(self, lengths: Sequence[int]) -> None:
        self.draws, self.lengths = [], list(lengths)
        self.copy = torch.Generator(self.device)
        self.copy.set_state(_state_of_stream(self.device))

    def of(self, rows: Sequence[int], lengths: Sequence[int], like: Tensor) -> Tensor:
        found = []
        for row, length in zip(rows, lengths, strict=True):
            place = length - self.lengths[row]
            while len(self.draws) <= place:
                drawn = torch.empty(self.shape, device=self.device).exponential_(generator=self.copy)
                self.draws.append(drawn)
            found.append(self.draws[place][row])
        return torch.stack(found).to(like.device)


class Seed(NamedTuple):
    """What one call was given: `specplug={"seed": 1, "row_ids": [4, 7]}`."""

    seed: int
    row_ids: list[int] | None = None  # None: each sequence's place in the call

    @classmethod
    def checked(cls, given: dict[str, Any]) -> "Seed | None":
        """None if no seed was given. Raises ValueError for what is no seed, or are no ids."""
        if "seed" not in given:
            if "row_ids" in given:
                raise ValueError(
                    f"specplug={given!r}: row_ids name the sequences for a seed; add one, or leave them out"
                )
            return None
        seed, row_ids = given["seed"], given.get("row_ids")
        if not _is_key(seed):
            raise ValueError(f"seed={seed!r}: give a whole number from 0 to 2**64 - 1")
        if row_ids is None:
            return cls(seed)
        if not isinstance(row_ids, (list, tuple)) or not all(map(_is_key, row_ids)):
            raise ValueError(f"row_ids={row_ids!r}: give a list of whole numbers from 0 to 2**64 - 1, one a sequence")
        if len(set(row_ids)) < len(row_ids):
            raise ValueError(
                f"row_ids={row_ids!r}: two sequences with one id would get the same random numbers; give each its own"
            )
        return cls(seed, list(row_ids))

    def ids_of(self, num_rows: int) -> list[int]:
        if self.row_ids is None:
            return list(range(num_rows))
        if len(self.row_ids) != num_rows:
            raise ValueError(
                f"row_ids={self.row_ids!r}: {len(self.row_ids)} ids for {num_rows} sequences; give one a sequence, in the "
                "order of the output (num_return_sequences of them for each prompt), or leave them out"
            )
        return self.row_ids


def _is_key(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_KEY


class Keyed:
    """Noise that depends on (seed, id of the sequence, position among its new tokens) and on nothing else.

    Philox with the seed and the id for its key, and the position for the highest word of its counter: a stream of its own
    for each, without a state (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). In float64, since the
    smallest numbers decide for rare tokens; the CPU makes them for every device, so they are the same on all.

    Args: the seed, an id for each row of the call, the lengths that the rows' prompts have without padding.
    """

    def __init__(self, seed: int, row_ids: Sequence[int], prompt_lengths: Sequence[int]) -> None:
        self.seed, self.row_ids, self.prompt_lengths = seed, list(row_ids), list(prompt_lengths)
        self.made: list[dict[int, Tensor]] = [{} for _ in self.row_ids]  # of each row, by the length of the text before

    def begin(self, lengths: Sequence[int]) -> None:
        pass

    def choose(self, rows: Sequence[int], lengths: Sequence[int], probs: Tensor) -> Tensor:
        """The target's tokens behind texts of these lengths, the shortest of each row first: (N, V) -> (N,)."""
        reached: dict[int, int] = {}
        for row, length in zip(rows, lengths, strict=True):
            reached.setdefault(row, length)
        for row, length in reached.items():  # what lies ahead is kept: the drafts have seen it, and later draws will
            self.made[row] = {each: noise for each, noise in self.made[row].items() if each >= length}
        return sample_by(probs, self.of(rows, lengths, probs))

    def of(self, rows: Sequence[int], lengths: Sequence[int], like: Tensor) -> Tensor:
        found = []
        for row, length in zip(rows, lengths, strict=True):
            if length not in self.made[row]:
                place = length - self.prompt_lengths[row]
                self.made[row][length] = exponentials(self.seed, self.row_ids[row], place, like.shape[-1]).to(
                    like.device
                )
            found.append(self.made[row][length].to(like.device))
        return torch.stack(found)


def exponentials(seed: int, row_id: int, place: int, size: int) -> Tensor:
    """(size,) numbers of an exponential distribution, none of them 0, in fp32. A shorter one is the beginning of a longer."""
    bits = numpy.random.Philox(
        key=numpy.array([seed, row_id], dtype=numpy.uint64), counter=numpy.array([0, 0, 0, place], dtype=numpy.uint64)
    )
    drawn = torch.from_numpy(numpy.random.Generator(bits).standard_exponential(size))
    return drawn.float().clamp_(min=torch.finfo(torch.float32).tiny)


class Chooser(LogitsProcessor):
    """The last of a call's processors: leaves one token possible, the one that the noise chooses.

    So transformers' own loop, set to take the argmax, says what `Keyed` says and draws nothing.
    """

    def __init__(self, noise: Keyed, hidden: Sequence[int]) -> None:
        self.noise, self.hidden = noise, list(hidden)  # hidden: padding before each prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        lengths = [input_ids.shape[1] - padding for padding in self.hidden]
        tokens = self.noise.choose(range(len(lengths)), lengths, torch.softmax(scores, dim=-1))
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)


def _state_of_stream(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state
