"""Logits to probabilities through the caller's processors.

A processor is *pointwise* when the scores of a position depend on the logits of that position alone. A list of such
processors may see any number of positions at once, as rows. Everything else is called one position at a time, on the
prefix that was accepted, once per token and in order, exactly as plain decoding calls it; `decode.py` sees to that.
"""

import torch
import transformers.generation.logits_process as library
from torch import Tensor
from transformers import LogitsProcessorList


def _known(*names: str) -> frozenset[type]:
    """Exact types: a subclass may do anything. Names that this transformers lacks are left out."""
    return frozenset(getattr(library, name) for name in names if hasattr(library, name))


POINTWISE = _known(
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "LogitNormalization",
    "InfNanRemoveLogitsProcessor",
)
# Pure functions of the prefix and the logits: safe on a draft's logits too, on prefixes that may yet be rejected.
STATELESS = POINTWISE | _known(
    "RepetitionPenaltyLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
)


def all_pointwise(processors: LogitsProcessorList) -> bool:
    return all(type(processor) in POINTWISE for processor in processors)


def for_draft(processors: LogitsProcessorList) -> LogitsProcessorList:
    """What may also shape a draft's distribution. Leaving one out costs acceptance, never exactness."""
    return LogitsProcessorList([each for each in processors if type(each) in STATELESS])


def process(processors: LogitsProcessorList, prefix: Tensor, logits: Tensor) -> Tensor:
    """Processed scores of the position after `prefix`: (1, T), (1, V) -> (1, V)."""
    return processors(prefix, logits)  # type: ignore[arg-type]


def process_at_once(processors: LogitsProcessorList, prefix: Tensor, logits: Tensor) -> Tensor:
    """Processed scores of W positions, for pointwise processors only: (1, T), (1, W, V) -> (1, W, V)."""
    if not processors:
        return logits
    rows = processors(prefix.expand(logits.shape[1], -1), logits[0])  # type: ignore[arg-type]
    return rows[None]


def to_probs(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1)
