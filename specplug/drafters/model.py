"""A smaller model drafts. It keeps its own cache across rounds and never calls `generate`.

The drafted token's `probs` are the draft's logits after the caller's processors, then softmax: exactly what the token was
drawn from. When the call is greedy the draft is greedy too, and there is nothing to state. Where the target's draws are races
whose noise is known, the draft runs the same races, and has nothing to state either.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specplug import warp
from specplug.cache import align, crop, keep, new_draft_cache, select, why_not_croppable
from specplug.drafters import OfSessions, OneRow, Proposal, Request, RowProposals, RowSession, Session
from specplug.drafters.fixed_model import FixedDraft
from specplug.drafters.forward import Forward
from specplug.drafters.growth import Growth
from specplug.drafters.step import Drawn, Step
from specplug.fixed import why_not
from specplug.models import context_length
from specplug.tree import Shape, Tree, attention_mask


class ModelDrafter:
    name = "model"
    costs_nothing = False
    same_vocabulary = True  # a token id means the same to draft and target
    drafts_trees = True
    asks = True  # before each draft, whether it is worth its price, where there is somebody to ask

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        reason = why_not_croppable(new_draft_cache(model.config))
        if model._is_stateful or reason:
            raise ValueError(
                f"the draft {type(model).__name__} cannot be rolled back after a rejection"
                f" ({reason or 'it keeps a recurrent state'}); choose a draft with an ordinary key-value cache"
            )
        self.max_length = context_length(model)
        accepted = inspect.signature(model.forward).parameters
        self.takes_positions, self.takes_keep = "position_ids" in accepted, "logits_to_keep" in accepted

    def start(self, request: Request) -> Session:
        if self._fixed(request, 1):
            return OneRow(FixedDraft(self, request, 1))
        return TreeModelSession(self, request) if request.tree else ModelSession(self, request)

    def start_rows(self, request: Request, num_rows: int) -> RowSession:
        return (FixedDraft if self._fixed(request, num_rows) else ModelRowSession)(self, request, num_rows)

    def start_for(self, request: Request, num_rows: int) -> Any:
        """A session for so many rows, also for one, of which texts may be other ones each time: with `fed` and `hold`."""
        if self._fixed(request, num_rows):
            return FixedDraft(self, request, num_rows)
        # A window cannot be taken back further than the last drafts; a session for rows computes anew what it lacks.
        full = all(type(layer) is DynamicLayer for layer in new_draft_cache(self.model.config).layers)
        if num_rows == 1 and full:
            return OneOfRows(ModelSession(self, request))
        return ModelRowSession(self, request, num_rows)

    def _fixed(self, request: Request, num_rows: int) -> bool:
        """Whether to draft on a ragged cache; not where each row of a batch has a session, and with it a cache, of its own."""
        reason = why_not(self.model, request.capture.graph, num_rows, request.length)
        return not request.tree and request.alone and reason is None


class ModelSession(Forward):
    def __init__(self, drafter: ModelDrafter, request: Request) -> None:
        super().__init__(drafter, request)
        self.num_cached = 0  # leading tokens of the text whose keys and values are in the cache
        self.num_text = 0  # length of the text without the drafts last proposed
        self._step: Step | None = None

    def propose(self, ids: Tensor, gamma: int) -> Proposal:
        device = self.model.device
        text = ids.to(device)
        self.num_text = text.shape[1]
        tokens: list[Tensor] = []  # (1, 1) each
        probs: list[Tensor] = []
        needs_text = not warp.all_pointwise(self.request.processors)
        new = text[:, self.num_cached :]  # the first pass catches up with all that was committed since
        self.num_cached = self.num_text - new.shape[1]
        most = self.room(self.num_text, gamma)
        while len(tokens) < most:
            if new.shape[1] == 1 and self._recorded():
                drawn, by_step, num_fed = self._by_steps(new, most - len(tokens))
                probs += by_step
                stopped = len(drawn) < num_fed
            else:
                scores = warp.process_draft(self.request.processors, text, self._forward(new))
                token = self._draw(scores, probs, [self.request.row], [self.num_text + len(tokens)])
                drawn, num_fed, stopped = [] if token is None else [token[:, None]], new.shape[1], token is None
            tokens += drawn
            self.num_cached += num_fed
            if stopped:
                break
            new = drawn[-1]
            if needs_text:
                text = torch.cat([text, *drawn], dim=1)
        if not tokens:
            return Proposal(ids.new_empty((1, 0)), None)
        drafted = torch.cat(tokens, dim=1).to(ids.device)
        return Proposal(drafted, torch.stack(probs, dim=1).to(ids.device) if probs else None)

    def _recorded(self) -> bool:
        """Whether a step over one token may be a recording."""
        if self._step is None:
            if self.passes is None:
                return False  # the text is not read yet
            self._step = Step(
                self.request, self.passes, lambda new: self._logits(new, 1, recorded=False)[:, 0], self.num_logits
            )
        return self._step.serves(self.cache)

    def _by_steps(self, new: Tensor, most: int) -> Drawn:
        """At most so many drafts behind `new`, (1, 1)."""
        assert self._step is not None
        num_steps, started, before = self.num_steps, self.clock.now(), self.request.capture.seconds
        with torch.inference_mode():
            drawn = self._step(new, self.cache, most)
        if self.num_steps == num_steps:  # they were no passes of Python's, which count themselves
            self.num_steps += drawn.num_fed
            self.clock.add(started, self.request.capture.seconds - before)
        return drawn

    def observe(self, num_accepted: int) -> None:
        """The cache holds the drafts that were fed, which the last one was not; keep those that the target kept."""
        if self.cache is not None:
            rejected = max(self.num_cached - self.num_text - num_accepted, 0)
            crop(self.cache, rejected)
            self.num_cached -= rejected
            self.num_text = self.num_cached  # until the next proposal there is nothing more to take back


class OneOfRows(OfSessions):
    """The session of one sequence as one for several."""

    def __init__(self, session: ModelSession) -> None:
        super().__init__(session)
        self.session = session

    def propose(self, texts: list[Tensor], gamma: int, active: list[int]) -> RowProposals:
        proposal = self.session.propose(texts[0], gamma)
        return RowProposals(proposal.tokens, [proposal.tokens.shape[1]], proposal.probs, [0])

    def fed(self, row: int) -> int:
        """How many of its drafts are in the cache, until they are judged."""
        return max(self.session.num_cached - self.session.num_text, 0)

    def hold(self, row: int, length: int) -> None:
        """No more than so many leading tokens of its text are as they were."""
        if self.session.cache is not None and self.session.num_cached > length:
            crop(self.session.cache, self.session.num_cached - length)
            self.session.num_cached = length

    def observe(self, row: int, num_accepted: int) -> None:
        self.session.observe(num_accepted)


class TreeModelSession(ModelSession):
    """Trees: one pass a level, over the nodes of the level before it."""

    def __init__(self, drafter: ModelDrafter, request: Request) -> None:
        super().__init__(drafter, request)
        # Of the tree last proposed, the nodes whose keys and values are in the cache, in order; -1 for one that was not proposed.
        self.fed: list[int] = []

    def propose_tree(self, ids: Tensor, shape: Shape) -> Proposal:
        text, device = ids.to(self.model.device), self.model.device
        room = self.room(text.shape[1], shape.depth)
        growth = Growth(shape, self.request.do_sample)
        fed: list[int] = []
        self.fed = []
        if room > 0:
            logits = self._forward(text[:, self.num_cached :])  # (1, V); catches up with all that was committed since
            self.num_cached = text.shape[1]
        while growth.frontier and growth.level < room:
            prefixes = [
                torch.cat([text, text.new_tensor([growth.path(node)])], dim=1) if node else text
                for node in growth.frontier
            ]
            probs = warp.to_probs(warp.process_rows(self.request.processors, prefixes, logits))  # (F, V)
            values = probs
            if self.request.noise is not None:  # the races that the target is going to run, as chances to win
                values = probs / self.request.noise.of([self.request.row], [text.shape[1] + growth.level], probs)
                values = values / values.sum(-1, keepdim=True)
            growth.add(probs, values)
            if not growth.frontier or growth.level >= room:
                break
            fed += growth.frontier
            above = Tree(growth.parents).visible()
            before = torch.ones((1, text.shape[1]), dtype=torch.bool, device=device)
            new = text.new_tensor([[growth.tokens[node - 1] for node in growth.frontier]])
            logits = self._logits(
                new,
                new.shape[1],
                attention_mask=attention_mask(above[growth.frontier][:, fed], before, self.model.dtype),
                position_ids=torch.full_like(new, text.shape[1] + growth.level - 1),
            )[0]
        chosen = growth.chosen()
        if not chosen:
            return Proposal(ids.new_empty((1, 0)), None)
        number = {draft + 1: place for place, draft in enumerate(chosen, start=1)}
        self.fed = [number.get(node, -1) for node in fed]
        tokens = ids.new_tensor([[growth.tokens[draft] for draft in chosen]])
        drawn_from = torch.stack([growth.probs[draft] for draft in chosen])[None] if growth.probs else None
        return Proposal(tokens, drawn_from if drawn_from is None else drawn_from.to(ids.device), 0, growth.tree())

    def observe_path(self, nodes: list[int]) -> None:
        """Of the drafts that were fed, those of the path stay in the cache."""
        if self.cache is not None:
            places = [self.fed.index(node) for node in nodes if node in self.fed]
            keep(self.cache, len(self.fed), places)
            self.num_cached += len(places)
            self.fed = []


class ModelRowSession(Forward):
    """Several sequences in one pass, each with its own text and its own number of accepted drafts.

    The cache holds the texts aligned to their ends; what stands on the left of a shorter one is masked.
    """

    def __init__(self, drafter: ModelDrafter, request: Request, num_rows: int) -> None:
        super().__init__(drafter, request)
        self.rows: list[int] = list(range(num_rows))  # that the cache holds
        self.num_cached = [0] * num_rows  # tokens of each text in the cache
        self.num_right = [0] * num_rows  # of those, leading tokens that the target has kept
        self.num_fed: dict[int, int] = {}  # drafts of the last proposal that are in the cache, until they are judged

    def propose(self, texts: list[Tensor], gamma: int, active: list[int]) -> RowProposals:
        lengths = {b: texts[b].shape[1] for b in active}
        gamma = self.room(max(lengths.values()), gamma)
        if gamma == 0:
            return RowProposals.none(torch.cat([text[:, -1:] for text in texts]))
        fed, slots = self._align(active, lengths)
        device = self.model.device
        drafted = {b: texts[b].to(device) for b in active}
        new = torch.cat([_right_aligned(drafted[b], fed) for b in active])  # (A, N)
        ends = torch.tensor([lengths[b] for b in active], device=device)[:, None]  # (A, 1) texts with what is drafted
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for _ in range(gamma):
            slots += new.shape[1]
            mask = torch.arange(slots, device=device) >= slots - ends  # (A, S + N)
            positions = (ends - new.shape[1] + torch.arange(new.shape[1], device=device)).clamp(min=0)
            inputs = {"position_ids": positions} if self.takes_positions else {}
            logits = self._forward(new, padded=True, attention_mask=mask.long(), **inputs)
            prefixes = [drafted[b] for b in active]
            scores = warp.process_rows(self.request.processors, prefixes, logits)
            drawn = self._draw(scores, probs, active, [lengths[b] + len(tokens) for b in active])
            fed_drafts = len(tokens)
            if drawn is None:
                break
            new = drawn[:, None]
            tokens.append(new)
            drafted = {b: torch.cat([drafted[b], new[i : i + 1]], dim=1) for i, b in enumerate(active)}
            ends = ends + 1
        self.num_fed = dict.fromkeys(active, fed_drafts)
        for b in active:
            self.num_cached[b] = lengths[b] + fed_drafts
        if not tokens:
            return RowProposals.none(torch.cat([text[:, -1:] for text in texts]))
        stacked = texts[0].new_zeros((len(texts), len(tokens)))
        stacked[active] = torch.cat(tokens, dim=1).to(stacked.device)
        all_probs = None
        if probs:
            drawn_from = torch.stack(probs, dim=1).to(stacked.device)  # (A, G, V)
            all_probs = drawn_from.new_zeros((len(texts), *drawn_from.shape[1:]))
            all_probs[active] = drawn_from
        made = [len(tokens) if b in lengths else 0 for b in range(len(texts))]
        return RowProposals(stacked, made, all_probs, [0] * len(texts))

    def fed(self, row: int) -> int:
        """How many of the row's drafts are in the cache, until they are judged."""
        return self.num_fed.get(row, 0)

    def hold(self, row: int, length: int) -> None:
        """No more than so many leading tokens of the row's text are as they were."""
        self.num_right[row] = min(self.num_right[row], length)

    def observe(self, row: int, num_accepted: int) -> None:
        """The drafts that were fed are in the cache; those that the target kept may stay."""
        if row in self.num_fed:
            self.num_right[row] = self.num_cached[row] - max(self.num_fed.pop(row) - num_accepted, 0)

    def _align(self, active: list[int], lengths: dict[int, int]) -> tuple[int, int]:
        """Roll back so that every row lacks the same number of tokens: that number, and the cache's length then."""
        right = {b: min(self.num_right[b], lengths[b] - 1) for b in active}
        fed = max(lengths[b] - right[b] for b in active)
        kept = {b: max(lengths[b] - fed, 0) for b in active}
        slots = max(kept.values())
        if self.cache is not None:
            if active != self.rows:
                select(self.cache, [self.rows.index(b) for b in active])
            align(self.cache, torch.tensor([self.num_cached[b] - kept[b] for b in active]), slots)
        self.rows = list(active)
        return fed, slots


def _right_aligned(text: Tensor, width: int) -> Tensor:
    """The last `width` tokens of (1, T), with zeros before a shorter text."""
    return torch.nn.functional.pad(text[:, -width:], (max(width - text.shape[1], 0), 0))
