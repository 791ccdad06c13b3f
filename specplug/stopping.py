"""The caller's stopping criteria, token by token, in order: a round must end where plain decoding would have ended."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

if TYPE_CHECKING:
    from specplug.round import Text


class Stopping:
    """Asks the criteria after every committed token.

    The two that every call has, end-of-sequence and length, are answered from the token id and the length, which saves
    two tensor operations a token. All others are called as plain decoding calls them: once per token, in order.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.eos: set[int] = set()
        self.others = StoppingCriteriaList()
        # Plain decoding asks every criterion after every token. With one that may keep state, so do we.
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos.update(torch.as_tensor(criterion.eos_token_id).reshape(-1).tolist())
            elif type(criterion) is not MaxLengthCriteria:
                self.others.append(criterion)
        # transformers takes lengths that are no whole numbers as well.
        lengths = [math.ceil(each.max_length) for each in criteria if type(each) is MaxLengthCriteria]
        self.max_length = min(lengths, default=None)

    def room(self, length: int) -> int | None:
        """How many tokens may still come after `length` of them; None if there is no limit."""
        return None if self.max_length is None else max(self.max_length - length, 0)

    def should_stop(self, text: "Text", token: int, scores: tuple[Tensor, ...] | None) -> bool:
        """`text` has the new `token` at its end."""
        stop = bool(self.others(text.ids, scores).all()) if self.others else False
        return stop or token in self.eos or (self.max_length is not None and len(text) >= self.max_length)
