"""Prompt lookup: what followed the last tokens when they last stood in the text. No model, no weights.

Source of the idea: prompt lookup decoding (Saxena 2023), as in transformers' `prompt_lookup_num_tokens`. Here the longest
match wins, and among equals the most recent one; a match that runs into its own end goes on in a circle.
"""

import torch
from torch import Tensor

from specplug.drafters import Proposal, Request


class LookupDrafter:
    """Args: shortest and longest run of tokens to look for."""

    name = "lookup"
    costs_nothing = True

    def __init__(self, min_ngram: int = 2, max_ngram: int = 8) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram={min_ngram}, max_ngram={max_ngram}: need 1 <= min_ngram <= max_ngram")
        self.sizes = range(max_ngram, min_ngram - 1, -1)

    def start(self, request: Request) -> "LookupSession":
        return LookupSession(self.sizes, request.vocab_size)


class LookupSession:
    def __init__(self, sizes: range, vocab_size: int) -> None:
        self.sizes, self.vocab_size = sizes, vocab_size
        self.text: list[int] = []
        self.indexed = 0  # n-grams that end before this position are in `following`
        self.following: dict[tuple[int, ...], int] = {}  # n-gram -> where its latest occurrence is followed up
        self.num_steps, self.seconds_forward = 0, 0.0

    def propose(self, ids: Tensor, gamma: int) -> Proposal:
        self.text += ids[0, len(self.text) :].tolist()
        self._index()
        start, matched = self._find()
        draft: list[int] = []
        if start is not None:
            period = len(self.text) - start
            for k in range(gamma):
                draft.append(self.text[start + k] if k < period else draft[k - period])
                if draft[-1] >= self.vocab_size:  # ids of inputs that the target's head does not have
                    draft.pop()
                    break
        return Proposal(torch.tensor([draft], dtype=torch.long, device=ids.device), None, matched)

    def observe(self, num_accepted: int) -> None:
        pass

    def _index(self) -> None:
        """Every n-gram but those that end with the last token, which nothing follows yet."""
        for end in range(self.indexed, len(self.text) - 1):
            for size in self.sizes:
                if size <= end + 1:
                    self.following[tuple(self.text[end + 1 - size : end + 1])] = end + 1
        self.indexed = max(len(self.text) - 1, 0)

    def _find(self) -> tuple[int | None, int]:
        """Where the latest occurrence of the longest match is followed up, and how long the match is."""
        for size in self.sizes:
            if size <= len(self.text):
                start = self.following.get(tuple(self.text[-size:]))
                if start is not None:
                    return start, size
        return None, 0
