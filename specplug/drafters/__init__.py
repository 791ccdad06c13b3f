"""Ways to draft, one file each, all through the small protocol in here.

A `Drafter` can be shared by threads and calls: it holds what does not change. Everything about one call lies in the
`Session` that `start` returns.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specplug.capture import Capture
from specplug.config import first_line
from specplug.noise import Noise
from specplug.schedule import Plan
from specplug.stats import Stats
from specplug.sureness import Judge
from specplug.tree import Shape, Tree

log = logging.getLogger(__name__)
P = TypeVar("P")


class Proposal(NamedTuple):
    tokens: Tensor  # (1, G) token ids, G from 0 to the gamma asked for
    probs: Tensor | None  # (1, G, V) that each token was really drawn from; None for tokens that were not drawn
    bucket: int = 0  # kind of proposal, for estimates of its acceptance: a lookup's is the length of its match
    # How the drafts hang together, if not one behind another. Siblings that were drawn have one row of `probs` in common: that
    # the first was drawn from, the others without those before.
    tree: Tree | None = None

    def first(self, num_drafts: int) -> "Proposal":
        """The same with no more than so many tokens."""
        probs = None if self.probs is None else self.probs[:, :num_drafts]
        tree = self.tree
        if tree is not None and num_drafts < self.tokens.shape[1]:
            tree = tree.only(range(num_drafts))
        return Proposal(self.tokens[:, :num_drafts], probs, self.bucket, tree)

    @property
    def depth(self) -> int:
        """Drafts of its longest path."""
        return self.tokens.shape[1] if self.tree is None else self.tree.depth


@dataclass(frozen=True)
class Request:
    """What a drafter may know of the call."""

    do_sample: bool  # draw the drafts, and state what they were drawn from; else take no random numbers
    processors: LogitsProcessorList  # those of the caller that may be used on drafts, see warp.for_draft
    vocab_size: int  # V of the target; proposals stay below it
    min_confidence: float = 0.0  # stop before a token where the draft is less sure than this, see ConfidenceSchedule
    criterion: str = "probability"
    cache: Any = None  # the target's, where one sequence is decoded: it holds all of the text but the last token
    time_forward: bool = False  # have the device note when forward passes begin and end, for their seconds
    noise: Noise | None = None  # of the target's own draws to come: a draft that wins the same race is kept
    row: int = 0  # which of the noise's rows the session is for, if it is for one
    alone: bool = True  # the session is for all of the call's sequences; else there is one for each
    length: int | None = None  # that a text may come to, where that is known
    tree: bool = False  # trees are going to be asked for: by `propose_tree` and `observe_path`
    judge: Judge | None = None  # asked before each draft, by its distribution, whether to stop
    capture: Capture = field(default_factory=Capture)  # of the call; a draft model's passes may be recorded as well
    # A row and a number of its tokens -> those behind them, without waiting for a device; None where they have to be read from it.
    since: Callable[[int, int], list[int]] | None = None

    def read(self, ids: Tensor, known: int, row: int | None = None) -> list[int]:
        """The tokens of a text, (1, T), as `propose` is given it, behind the first `known` ones. `row`: for a session of several."""
        return ids[0, known:].tolist() if self.since is None else self.since(self.row if row is None else row, known)

    @property
    def asks(self) -> bool:
        """Whether there may be a reason to stop before a token."""
        return self.judge is not None or bool(self.min_confidence)

    def unsure(self, probs: Tensor, highest: Tensor) -> bool:
        """Whether to stop before a token that would be drawn from `probs`, (B, V): less sure than asked for, in the mean.

        `highest`: of each row, (B,).
        """
        if self.judge is not None:
            return not self.judge(highest.item())  # of one sequence
        if not self.min_confidence:
            return False
        sure = highest if self.criterion == "probability" else 1 - torch.special.entr(probs).sum(-1).clamp(min=0).sqrt()
        return float(sure.clamp(min=0).mean()) < self.min_confidence


class Session(Protocol):
    @property
    def num_steps(self) -> int:
        """Forward passes of the draft so far."""
        ...

    @property
    def seconds_forward(self) -> float:
        """Spent in them."""
        ...

    def propose(self, ids: Tensor, gamma: int) -> Proposal:
        """Draft at most `gamma` tokens after `ids`, (1, T): the prompt and everything committed so far."""
        ...

    def observe(self, num_accepted: int) -> None:
        """The target kept so many of the tokens last proposed."""
        ...


class TextSession:
    """A session that drafts from the text alone: it makes no forward pass, and need not be told what was kept."""

    num_steps, seconds_forward = 0, 0.0

    def observe(self, num_accepted: int) -> None:
        pass

    def observe_path(self, nodes: list[int]) -> None:
        pass


class TreeSession(Session, Protocol):
    """What the session of a drafter with `drafts_trees = True` can do as well, where the request says `tree`."""

    def propose_tree(self, ids: Tensor, shape: Shape) -> Proposal:
        """Draft a tree of this shape, or less, after `ids`, (1, T)."""
        ...

    def observe_path(self, nodes: list[int]) -> None:
        """The target kept the drafts at these nodes of the tree last proposed, one behind another."""
        ...


class Drafter(Protocol):
    # A drafter that can draft trees says so by an attribute `drafts_trees = True`.
    name: str
    costs_nothing: bool  # proposals need no forward pass, so more may be asked for than is used

    def start(self, request: Request) -> Session: ...


def members_of(drafter: Any) -> list[Any]:
    """The drafters of a chain, or the one that it is."""
    members: list[Any] = getattr(drafter, "members", [drafter])
    return members


class RowProposals(NamedTuple):
    """Drafts for the sequences of a batch, each with as many as its row has."""

    tokens: Tensor  # (B, G) token ids, padded with 0 behind the row's last draft
    lengths: list[int]  # drafts of each row, 0 to G; 0 for a row that was not asked for
    # (B, G, V) that each token was really drawn from; None for tokens that were not drawn, and 1 at each of them where other rows' were.
    probs: Tensor | None
    buckets: list[int]

    @classmethod
    def none(cls, ids: Tensor) -> "RowProposals":
        """No drafts for any row of (B, T) ids."""
        return cls(ids.new_empty((len(ids), 0)), [0] * len(ids), None, [0] * len(ids))

    def trimmed(self, plan: Plan) -> "RowProposals":
        """With as many drafts a row as the plan finds worth their cost."""
        return self._replace(lengths=[plan.trim(*each) for each in zip(self.lengths, self.buckets, strict=True)])


class RowSession(Protocol):
    """A session for several sequences."""

    @property
    def num_steps(self) -> int: ...

    @property
    def seconds_forward(self) -> float: ...

    def propose(self, texts: list[Tensor], gamma: int, active: list[int]) -> RowProposals:
        """Draft at most `gamma` tokens after each of `texts`, (1, T) each, for the rows that are still `active`."""
        ...

    def observe(self, row: int, num_accepted: int) -> None:
        """The target kept so many of the tokens last proposed for that row."""
        ...


class OfSessions:
    """A session that is made of others, and counts what they count."""

    def __init__(self, *sessions: Any) -> None:
        self.sessions = sessions

    @property
    def num_steps(self) -> int:
        return sum(session.num_steps for session in self.sessions)

    @property
    def seconds_forward(self) -> float:
        return sum(session.seconds_forward for session in self.sessions)


class RowByRow(OfSessions):
    """A session of its own for each sequence: right for drafters that cost no forward pass."""

    def __init__(self, drafter: Drafter, request: Request, num_rows: int) -> None:
        super().__init__(*(drafter.start(replace(request, row=b, alone=num_rows == 1)) for b in range(num_rows)))

    def propose(self, texts: list[Tensor], gamma: int, active: list[int]) -> RowProposals:
        proposals = {b: self.sessions[b].propose(texts[b], gamma) for b in active}
        lengths = [proposals[b].tokens.shape[1] if b in proposals else 0 for b in range(len(texts))]
        tokens = texts[0].new_zeros((len(texts), max(lengths)))
        for b, proposal in proposals.items():
            tokens[b, : lengths[b]] = proposal.tokens[0]
        probs = None
        stated = next((each.probs for each in proposals.values() if each.probs is not None), None)
        if stated is not None:
            probs = stated.new_zeros((*tokens.shape, stated.shape[-1]))
            # Of rows whose tokens were not drawn each is the only one that there could have been.
            probs.scatter_(-1, tokens[..., None], 1.0)
            for b, proposal in proposals.items():
                if proposal.probs is not None:
                    probs[b, : lengths[b]] = proposal.probs[0]
        buckets = [proposals[b].bucket if b in proposals else 0 for b in range(len(texts))]
        return RowProposals(tokens, lengths, probs, buckets)

    def observe(self, row: int, num_accepted: int) -> None:
        self.sessions[row].observe(num_accepted)


class OneRow(OfSessions):
    """A session for one sequence, of one for several."""

    def __init__(self, rows: RowSession) -> None:
        super().__init__(rows)
        self.rows = rows

    def propose(self, ids: Tensor, gamma: int) -> Proposal:
        drafts = self.rows.propose([ids], gamma, [0])
        return Proposal(drafts.tokens, drafts.probs)

    def observe(self, num_accepted: int) -> None:
        self.rows.observe(0, num_accepted)

    def begin(self, num_accepted: Tensor, next_token: Tensor) -> None:
        begin: Any = getattr(self.rows, "begin", None)
        if begin is not None:
            begin(num_accepted, next_token)


def start_rows(drafter: Drafter, request: Request, num_rows: int) -> RowSession:
    """A drafter that can draft for several sequences in one pass says so by a method `start_rows(request, num_rows)`."""
    start: Any = getattr(drafter, "start_rows", None)
    if start is not None and num_rows > 1:
        session: RowSession = start(request, num_rows)
        return session
    return RowByRow(drafter, request, num_rows)


class Safely:
    """Asks for proposals and counts the time. Once a draft has raised, it is not asked again in this call: the text so far is
    right, and decoding goes on plainly."""

    def __init__(self, stats: Stats, noise: Noise | None = None) -> None:
        self.stats, self.noise, self.broken = stats, noise, False

    def __call__(self, propose: Callable[[], P], nothing: P, lengths: Sequence[int]) -> P:
        """`lengths`: of all rows' texts, as the drafts see them."""
        if self.broken:
            return nothing
        started = time.perf_counter()
        try:
            if self.noise is not None:
                self.noise.begin(lengths)
            return propose()
        except Exception as error:
            self.broken = True
            log.warning("specplug: the draft failed, going on without it: %s", first_line(error))
            return nothing
        finally:
            self.stats.seconds_draft += time.perf_counter() - started
