"""A model with another tokenizer drafts, exact for greedy decoding and for sampling alike (arXiv 2502.05202).

Two ways. By *intersection* (the paper's section 3.3, token-level): the draft may only say tokens that both vocabularies
have; its distribution over those, renormalised, is what was drawn from and what is stated, so the accept rules hold as they
do for one vocabulary. By *string* (section 3.1): the draft says what it likes, the text is cut into the target's tokens, and
those are drafts like a lookup's, not drawn from anything that could be stated.

Either way the draft reads the text in its own tokens, see translate.py, and its weights are left alone.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from specplug import warp
from specplug.drafters import OneRow, Request, RowProposals
from specplug.drafters.model import ModelDrafter, ModelRowSession
from specplug.drafters.translate import TAIL, Reading, Translation
from specplug.fixed import to_device
from specplug.verify import race

METHODS = ("auto", "intersection", "string")


class CrossVocabDrafter(ModelDrafter):
    """Args: the draft, its tokenizer, the target's tokenizer; `method`: "intersection" keeps more drafts when sampling, "string"
    can say words that the target writes with other tokens, and "auto" is the first when sampling, the second when greedy.

    Raises ValueError if the two vocabularies have no token in common.
    """

    name = "cross_vocab"
    asks = False  # its drafts are not always the target's one by one
    same_vocabulary = False
    drafts_trees = False

    def __init__(self, model: PreTrainedModel, tokenizer: Any, target_tokenizer: Any, method: str = "auto") -> None:
        if method not in METHODS:
            raise ValueError(f"method={method!r}: give one of {', '.join(METHODS)}")
        super().__init__(model)
        self.method, self.tokenizer = method, tokenizer
        self.vocab_size = model.config.get_text_config().vocab_size
        self.translation = Translation(target_tokenizer, tokenizer, self.vocab_size)
        if method != "string" and not self.translation.num_shared:
            raise ValueError(
                "the tokenizers of draft and target have no token in common; take a draft of the same family, or"
                " draft.cross_vocab=string"
            )

    def start(self, request: Request) -> "OneRow":
        return OneRow(CrossVocabSession(self, request, 1))

    def start_rows(self, request: Request, num_rows: int) -> "CrossVocabSession":
        return CrossVocabSession(self, request, num_rows)


class CrossVocabSession(ModelRowSession):
    def __init__(self, drafter: CrossVocabDrafter, request: Request, num_rows: int) -> None:
        nameless = LogitsProcessorList([each for each in request.processors if type(each) in warp.NAMELESS])
        own = dataclasses.replace(request, processors=nameless, vocab_size=drafter.vocab_size, noise=None, since=None)
        super().__init__(drafter, own, num_rows)
        self.translation, self.target_vocab_size = drafter.translation, request.vocab_size
        self.noise = request.noise  # of the target's tokens and texts
        self.ahead: dict[
            int, int
        ] = {}  # of each row, how many tokens its text has more for the target than for the draft
        draws = request.do_sample or request.noise is not None
        self.by_string = drafter.method == "string" or (drafter.method == "auto" and not draws)
        self.readings = [Reading(drafter.translation) for _ in range(num_rows)]
        self.texts: list[list[int]] = [[] for _ in range(num_rows)]  # in the target's tokens
        self.read = request.read
        self.held: list[list[int]] = [[] for _ in range(num_rows)]  # the draft's tokens that the cache was fed, per row
        drafted, target = drafter.translation.shared(request.vocab_size)
        self.shared_draft, self.shared_target = drafted.to(self.model.device), target.to(self.model.device)
        self.silent = torch.ones(drafter.vocab_size, dtype=torch.bool, device=self.model.device)
        self.silent[self.shared_draft] = False
        self.to_draft = torch.zeros(request.vocab_size, dtype=torch.long, device=self.model.device)
        self.to_draft[self.shared_target] = self.shared_draft
        self.to_target = torch.zeros(drafter.vocab_size, dtype=torch.long, device=self.model.device)
        self.to_target[self.shared_draft] = self.shared_target

    def propose(self, texts: list[Tensor], gamma: int, active: list[int]) -> RowProposals:
        for b in active:
            self.texts[b] += self.read(texts[b], len(self.texts[b]), None if len(texts) == 1 else b)
        read = {b: self.readings[b].read(self.texts[b]) for b in active}
        self.ahead = {b: texts[b].shape[1] - len(read[b]) for b in active}
        for b in active:  # read again, a word may be cut otherwise than when it was drafted
            self.num_right[b] = min(self.num_right[b], _common_prefix(self.held[b], read[b]))
        own = [to_device(read.get(b, [0]), self.model.device)[None] for b in range(len(texts))]
        drafts = super().propose(own, gamma, active)
        drafted = drafts.tokens.tolist()
        for b, num_fed in self.num_fed.items():
            self.held[b] = read[b] + drafted[b][:num_fed]
        return self._as_strings(drafts, drafted, texts[0], gamma) if self.by_string else self._as_tokens(drafts, texts)

    def observe(self, row: int, num_accepted: int) -> None:
        """By string the drafts are not the target's one by one; what still holds is found when the text is read again."""
        super().observe(row, self.num_fed.get(row, 0) if self.by_string else num_accepted)

    def _forward(self, new: Tensor, padded: bool = False, **inputs: Any) -> Tensor:
        logits = super()._forward(new, padded, **inputs)
        return logits if self.by_string else logits.masked_fill(self.silent, float("-inf"))

    def _draw(self, scores: Tensor, probs: list[Tensor], rows: list[int], lengths: list[int]) -> Tensor | None:
        """With the noise of the target's own draws: the same race, over the tokens that both have."""
        if self.noise is None or self.by_string:
            return super()._draw(scores, probs, rows, lengths)
        drawn_from = scores.softmax(-1)
        if self.request.unsure(drawn_from, drawn_from.amax(-1)):
            return None
        named = drawn_from.new_zeros((len(rows), self.target_vocab_size))
        named[:, self.shared_target] = drawn_from[:, self.shared_draft]
        own_rows = [self.request.row] if len(self.readings) == 1 else rows
        texts = [length + self.ahead[row] for row, length in zip(rows, lengths, strict=True)]
        return self.to_draft[race(named, self.noise.of(own_rows, texts, named))]

    def _as_tokens(self, drafts: RowProposals, texts: list[Tensor]) -> RowProposals:
        """The same tokens and their distribution by the target's ids."""
        device = texts[0].device
        tokens = self.to_target[drafts.tokens.to(self.model.device)].to(device)
        if drafts.probs is None:
            return drafts._replace(tokens=tokens)
        probs = drafts.probs.new_zeros((*tokens.shape, self.target_vocab_size))
        probs[..., self.shared_target.to(probs.device)] = drafts.probs[..., self.shared_draft.to(probs.device)]
        return drafts._replace(tokens=tokens, probs=probs.to(device))

    def _as_strings(self, drafts: RowProposals, drafted: list[list[int]], like: Tensor, gamma: int) -> RowProposals:
        """What the drafts say, in the target's tokens."""
        said = [
            self.translation.continuation(text[-TAIL:], tokens[:length])[:gamma] if length else []
            for text, tokens, length in zip(self.texts, drafted, drafts.lengths, strict=True)
        ]
        said = [_below(tokens, self.target_vocab_size) for tokens in said]
        lengths = [len(tokens) for tokens in said]
        longest = max(lengths)
        padded = [token for tokens in said for token in (*tokens, *[0] * (longest - len(tokens)))]
        return RowProposals(to_device(padded, like.device).view(len(said), longest), lengths, None, [0] * len(said))


def _common_prefix(first: list[int], second: list[int]) -> int:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length


def _below(tokens: list[int], vocab_size: int) -> list[int]:
    """Up to the first token that the target's vocabulary does not have."""
    return next((tokens[:number] for number, token in enumerate(tokens) if token >= vocab_size), tokens)
