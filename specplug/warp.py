"""Logits to probabilities through the caller's processors.

A processor is *pointwise* when the scores of a position depend on the logits of that position alone, and *stateless* when
they depend on its prefix and logits alone. Such processors may be asked about drafts that are rejected later, all positions
of a round at once. Everything else is called one position at a time, on the prefix that was accepted, once per token and
in order, exactly as plain decoding calls it; `round.py` sees to that.
"""

from collections.abc import Hashable
from typing import Any

import torch
import transformers.generation.logits_process as library
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from specplug.capture import PLAIN


class Only(LogitsProcessor):
    """Takes from a draft the tokens that it may not say: `silent`, (V,) bool."""

    def __init__(self, silent: Tensor) -> None:
        self.silent = silent

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.silent, float("-inf"))


def _known(*names: str) -> frozenset[type]:
    """Exact types: a subclass may do anything. Names that this transformers lacks are left out."""
    return frozenset(getattr(library, name) for name in names if hasattr(library, name))


# Shape a distribution whatever its tokens are called: they also serve a draft that numbers its tokens otherwise.
NAMELESS = _known(
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
    "EpsilonLogitsWarper", "EtaLogitsWarper",
)  # fmt: skip
_BY_NAME = _known("SuppressTokensLogitsProcessor", "LogitNormalization", "InfNanRemoveLogitsProcessor")
POINTWISE = NAMELESS | _BY_NAME | {Only}
# Pure functions of the prefix and the logits: safe on a draft's logits too, on prefixes that may yet be rejected.
STATELESS = POINTWISE | _known(
    "RepetitionPenaltyLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor",
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty", "SuppressTokensAtBeginLogitsProcessor",
)  # fmt: skip
# Depends on which tokens the prefix holds, not on their number or order: prefixes of different lengths make one batch.
SET_BASED = _known("RepetitionPenaltyLogitsProcessor")
# Holds the encoder's or the prompt's ids for the whole batch, so it cannot be asked about one sequence of several.
WHOLE_BATCH = _known("EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor")


def all_pointwise(processors: LogitsProcessorList) -> bool:
    return all(type(processor) in POINTWISE for processor in processors)


def all_stateless(processors: LogitsProcessorList, num_rows: int = 1) -> bool:
    """Whether the scores of a position, in a batch of so many sequences, are a pure function of its prefix and logits."""
    return len(for_draft(processors, num_rows)) == len(processors)


def for_draft(processors: LogitsProcessorList, num_rows: int = 1) -> LogitsProcessorList:
    """What may also shape a draft's distribution. Leaving one out costs acceptance, never exactness."""
    known = STATELESS if num_rows == 1 else STATELESS - WHOLE_BATCH
    # A draft sees texts without their padding.
    return LogitsProcessorList([_with_padding(each, None) for each in processors if type(each) in known])


def for_row(processors: LogitsProcessorList, padding: int) -> LogitsProcessorList:
    """The stateless processors of a batch, for one of its rows alone, that begins with so many padding tokens."""
    return LogitsProcessorList([_with_padding(each, padding) for each in processors])


def _with_padding(processor: Any, padding: int | None) -> Any:
    """`generate` tells the repetition penalty how much padding to leave out, in a tensor for the whole batch."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
        return library.RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=padding)
    return processor


def key_of(processors: LogitsProcessorList) -> Hashable | None:
    """What a recording with these pointwise processors in it depends on; None if there are others, or some that hold more than plain values."""
    if not all_pointwise(processors):
        return None
    found: list[Any] = []
    for each in processors:
        values = sorted(vars(each).items())
        if type(each) is Only:
            values = [
                ("silent", id(each.silent))
            ]  # the same for all calls with one drafter, and kept by what was recorded
        if any(type(value) not in PLAIN for _, value in values):
            return None
        found.append((type(each), *values))
    return tuple(found)


def process(processors: LogitsProcessorList, prefix: Tensor, logits: Tensor) -> Tensor:
    """Processed scores of the position after `prefix`, for any processors: (1, T), (1, V) -> (1, V)."""
    call: Any = processors
    scores: Tensor = call(prefix, logits)
    return scores


def process_draft(processors: LogitsProcessorList, prefix: Tensor, scores: Tensor) -> Tensor:
    """The same for the stateless ones alone: the list's own call looks at each one's signature, every time."""
    for processor in processors:
        scores = processor(prefix, scores)
    return scores


def process_rows(processors: LogitsProcessorList, prefixes: list[Tensor], logits: Tensor) -> Tensor:
    """Processed scores of the position after each prefix, for stateless processors: B of (1, T), (B, V) -> (B, V)."""
    if all_pointwise(processors):
        return process_draft(processors, prefixes[0].expand(len(prefixes), -1), logits)
    return torch.cat([process_draft(processors, prefix, logits[i : i + 1]) for i, prefix in enumerate(prefixes)])


def process_at_once(processors: LogitsProcessorList, prefix: Tensor, drafts: Tensor, logits: Tensor) -> Tensor:
    """Processed scores of the position after `prefix` and of those behind each draft, for stateless processors only.

    (1, T), (1, G), (1, G + 1, V) -> (1, G + 1, V). Pointwise processors see all positions as rows of one batch, and so do
    those that look at the set of tokens in the prefix; any other is called with one prefix after another.
    """
    if not processors:
        return logits
    text, width = torch.cat([prefix, drafts], dim=1), logits.shape[1]
    scores = logits[0]  # (G + 1, V)
    for processor in processors:
        if type(processor) in POINTWISE:
            scores = processor(prefix.expand(width, -1), scores)
        elif type(processor) in SET_BASED:
            # Row i must hold the tokens of prefix + drafts[:i]; what is behind them is overwritten by the last of
            # the prefix, which is none of the padding that the processor leaves out.
            later = torch.arange(text.shape[1], device=text.device) >= (
                prefix.shape[1] + torch.arange(width, device=text.device)[:, None]
            )
            scores = processor(torch.where(later, prefix[:, -1:], text), scores)
        else:
            rows = [processor(text[:, : prefix.shape[1] + i], scores[i : i + 1]) for i in range(width)]
            scores = torch.cat(rows)
    return scores[None]


def to_probs(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1)
