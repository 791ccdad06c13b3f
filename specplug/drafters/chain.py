"""Several drafters in order: each is asked when the one before has nothing good. A lookup first, then a model, for one."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specplug.drafters import Drafter, OfSessions, Proposal, Request, Session
from specplug.tree import Shape

BUCKETS = 1000  # a member's buckets are its own: estimates of acceptance are kept apart


class ChainDrafter:
    """Args: drafters in the order in which they are asked, and how many drafts make a proposal good enough.

    `counts`: for each member by its place, proposals made, drafts in them, and drafts kept.
    """

    name = "chain"

    def __init__(self, members: list[Drafter], min_drafts: int = 2) -> None:
        if len(members) < 2:
            raise ValueError(f"a chain of {len(members)} drafters: give two or more, or the one by itself")
        if min_drafts < 1:
            raise ValueError(f"min_drafts={min_drafts}: 1 or more")
        self.members, self.min_drafts = members, min_drafts
        self.costs_nothing = all(member.costs_nothing for member in members)
        self.drafts_trees = all(getattr(member, "drafts_trees", False) for member in members)
        self.counts: list[Counter[str]] = [Counter() for _ in members]
        self.lock = threading.Lock()

    def start(self, request: Request) -> "ChainSession":
        return ChainSession(self, [member.start(request) for member in self.members])


class ChainSession(OfSessions):
    def __init__(self, chain: ChainDrafter, sessions: list[Session]) -> None:
        super().__init__(*sessions)
        self.chain = chain
        self.asked: int | None = None  # whose proposal the target is judging

    def propose(self, ids: Tensor, gamma: int) -> Proposal:
        return self._first_good(
            ids, gamma, lambda session: session.propose(ids, gamma), lambda session: session.observe(0)
        )

    def propose_tree(self, ids: Tensor, shape: Shape) -> Proposal:
        return self._first_good(
            ids,
            shape.size,
            lambda session: session.propose_tree(ids, shape),
            lambda session: session.observe_path([]),
        )

    def _first_good(
        self, ids: Tensor, gamma: int, propose: Callable[[Any], Proposal], unused: Callable[[Any], None]
    ) -> Proposal:
        self.asked = None
        for place, session in enumerate(self.sessions):
            proposal = propose(session)
            num_drafts = proposal.tokens.shape[1]
            # Tokens that were drawn are never left out for being few: how many there are may depend on what they are (a draft stops
            # where it is unsure), and of those that are not left out the law would then be another than is stated.
            settled = place == len(self.sessions) - 1 or proposal.probs is not None
            if num_drafts >= min(self.chain.min_drafts, gamma) or (settled and num_drafts):
                self.asked = place
                with self.chain.lock:
                    self.chain.counts[place].update(proposals=1, drafts=num_drafts)
                return proposal._replace(bucket=place * BUCKETS + proposal.bucket)
            unused(session)  # its drafts, if there are any
        return Proposal(torch.empty((1, 0), dtype=torch.long, device=ids.device), None)

    def observe(self, num_accepted: int) -> None:
        self._observe(num_accepted, lambda session: session.observe(num_accepted))

    def observe_path(self, nodes: list[int]) -> None:
        self._observe(len(nodes), lambda session: session.observe_path(nodes))

    def _observe(self, num_accepted: int, tell: Callable[[Any], None]) -> None:
        if self.asked is not None:
            tell(self.sessions[self.asked])
            with self.chain.lock:
                self.chain.counts[self.asked]["kept"] += num_accepted
            self.asked = None
