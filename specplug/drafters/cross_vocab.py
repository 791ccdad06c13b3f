"""A model with another tokenizer drafts, exact for greedy decoding and for sampling alike (arXiv 2502.05202).

Two ways. By *intersection* (the paper's section 3.3, token-level): the draft may only say tokens that both vocabularies
have; its distribution over those, renormalised, is what was drawn from and what is stated, so the accept rules hold as they
do for one vocabulary. By *string* (section 3.1): the draft says what it likes, the text is cut into the target's tokens, and
those are drafts like a lookup's, not drawn from anything that could be stated.

Either way the draft reads the text in its own tokens, see translate.py, and its weights are left alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from specplug import warp
from specplug.choices import CrossVocab
from specplug.drafters import OfSessions, OneRow, Request, RowProposals
from specplug.drafters.model import ModelDrafter
from specplug.drafters.translate import TAIL, Reading, Translation, common_prefix
from specplug.fixed import to_device
from specplug.noise import Noise

METHODS = tuple(each.value for each in CrossVocab)


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

        self._shared: dict[tuple[int, torch.device], Shared] = {}  # by the size of the target's vocabulary

    def start(self, request: Request) -> "OneRow":
        return OneRow(CrossVocabSession(self, request, 1))

    def start_rows(self, request: Request, num_rows: int) -> "CrossVocabSession":
        return CrossVocabSession(self, request, num_rows)

    def shared(self, target_size: int) -> "Shared":
        """Made once: a graph of the draft's loop goes by the very tensors."""
        device = self.model.device
        if (target_size, device) not in self._shared:
            drafted, target = (each.to(device) for each in self.translation.shared(target_size))
            silent = torch.ones(self.vocab_size, dtype=torch.bool, device=device)
            silent[drafted] = False
            to_target = torch.zeros(self.vocab_size, dtype=torch.long, device=device)
            to_target[drafted] = target
            self._shared[target_size, device] = Shared(drafted, target, silent, to_target)
        return self._shared[target_size, device]


class Shared(NamedTuple):
    """The tokens that both have, where the draft is."""

    draft: Tensor  # (S,) their ids
    target: Tensor  # (S,) the target's ids of the same
    silent: Tensor  # (V_draft,) the others
    to_target: Tensor  # (V_draft,) the target's id, 0 for the others


class SharedNoise:
    """The noise of the target's draws by the draft's ids. `ahead`: of each row, how many tokens its text has more for the target."""

    def __init__(self, noise: Noise, shared: Shared, target_size: int) -> None:
        self.noise, self.tokens, self.target_size = noise, shared, target_size
        self.ahead: dict[int, int] = {}

    def begin(self, lengths: Sequence[int]) -> None:
        """The target's own noise is told."""

    def of(self, rows: Sequence[int], lengths: Sequence[int], like: Tensor) -> Tensor:
        texts = [length + self.ahead[row] for row, length in zip(rows, lengths, strict=True)]
        found = self.noise.of(rows, texts, like.new_empty((len(rows), self.target_size)))
        noise = torch.full_like(like, float("inf"))  # with which nothing is won
        noise[:, self.tokens.draft] = found[:, self.tokens.target].to(noise)
        return noise


class CrossVocabSession(OfSessions):
    """A session of the draft's own, which is given each text in the draft's tokens. Read again, a word may be cut otherwise than when it was
    drafted, so what its cache holds is compared with the text each time."""

    def __init__(self, drafter: CrossVocabDrafter, request: Request, num_rows: int) -> None:
        self.translation, self.target_vocab_size = drafter.translation, request.vocab_size
        draws = request.do_sample or request.noise is not None
        self.by_string = drafter.method == "string" or (drafter.method == "auto" and not draws)
        self.shared, self.device = drafter.shared(request.vocab_size), drafter.model.device
        processors = [each for each in request.processors if type(each) in warp.NAMELESS]
        self.noise: SharedNoise | None = None
        if not self.by_string:
            processors.insert(0, warp.Only(self.shared.silent))
            if request.noise is not None:
                self.noise = SharedNoise(request.noise, self.shared, request.vocab_size)
        own = dataclasses.replace(
            request,
            processors=LogitsProcessorList(processors),
            vocab_size=drafter.vocab_size,
            noise=self.noise,
            since=None,
        )
        self.drafts = drafter.start_for(own, num_rows)
        super().__init__(self.drafts)
        self.names = list(range(num_rows)) if num_rows > 1 else [request.row]
        self.read = request.read
        self.readings = [Reading(drafter.translation) for _ in range(num_rows)]
        self.texts: list[list[int]] = [[] for _ in range(num_rows)]  # in the target's tokens
        # Of each row, in the draft's tokens: the text as it was read last, and, by string, the drafts behind it that are in the cache.
        self.held: list[list[int]] = [[] for _ in range(num_rows)]
        self.num_kept = [0] * num_rows  # drafts in the cache that the target kept, where they are its tokens one by one

    def propose(self, texts: list[Tensor], gamma: int, active: list[int]) -> RowProposals:
        read: dict[int, list[int]] = {}
        for b in active:
            new = self.read(texts[b], len(self.texts[b]), self.names[b])
            self.texts[b] += new
            read[b] = self.readings[b].read(self.texts[b])
            held = self.held[b] + [self.translation.to_draft.get(token, -1) for token in new[: self.num_kept[b]]]
            self.drafts.hold(b, min(common_prefix(held, read[b]), len(read[b]) - 1))
            self.held[b], self.num_kept[b] = read[b], 0
            if self.noise is not None:
                self.noise.ahead[self.names[b]] = len(self.texts[b]) - len(read[b])
        if any(len(each) < 2 for each in read.values()):  # a draft begins with the last two tokens
            return RowProposals.none(torch.cat([text[:, -1:] for text in texts]))
        own = [to_device(read.get(b, [0]), self.device)[None] for b in range(len(texts))]
        drafts = self.drafts.propose(own, gamma, active)
        return self._as_strings(drafts, texts[0], gamma) if self.by_string else self._as_tokens(drafts, texts[0])

    def observe(self, row: int, num_accepted: int) -> None:
        """What still holds is found when the text is read again; of drafts that are the target's one by one it is known already."""
        in_cache = self.drafts.fed(row)
        if not self.by_string:
            in_cache = self.num_kept[row] = min(in_cache, num_accepted)
        self.drafts.observe(row, in_cache)

    def _as_tokens(self, drafts: RowProposals, like: Tensor) -> RowProposals:
        """The same tokens and their distribution by the target's ids."""
        tokens = self.shared.to_target[drafts.tokens]
        probs = None
        if drafts.probs is not None:
            probs = drafts.probs.new_zeros((*tokens.shape, self.target_vocab_size))
            probs[..., self.shared.target] = drafts.probs[..., self.shared.draft]
            probs = probs.to(like.device)
        return drafts._replace(tokens=tokens.to(like.device), probs=probs)

    def _as_strings(self, drafts: RowProposals, like: Tensor, gamma: int) -> RowProposals:
        """What the drafts say, in the target's tokens."""
        said: list[list[int]] = []
        for b, tokens in enumerate(drafts.tokens.tolist()):
            self.held[b] = self.held[b] + tokens[: self.drafts.fed(b)]
            drafted = tokens[: drafts.lengths[b]]
            made = self.translation.continuation(self.texts[b][-TAIL:], drafted)[:gamma] if drafted else []
            said.append(_below(made, self.target_vocab_size))
        lengths = [len(tokens) for tokens in said]
        longest = max(lengths)
        padded = [token for tokens in said for token in (*tokens, *[0] * (longest - len(tokens)))]
        return RowProposals(to_device(padded, like.device).view(len(said), longest), lengths, None, [0] * len(said))


def _below(tokens: list[int], vocab_size: int) -> list[int]:
    """Up to the first token that the target's vocabulary does not have."""
    return next((tokens[:number] for number, token in enumerate(tokens) if token >= vocab_size), tokens)
