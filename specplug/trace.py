"""What became of each draft of one `generate` call, round by round. Filled by the engines while a plugin has a `trace`.

    plugin.trace = Trace()
    output = model.generate(ids, ...)
    plugin.trace.finish(output[0, ids.shape[1]:].tolist())
    plugin.trace.rounds

One sequence at a time. Of a tree, what is recorded is the path that was kept, and on from there the first drafts. Recording reads from the device in every round, so a call that is traced is not one to time.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specplug import warp
from specplug.schedule import AS_PROPOSED, Plan
from specplug.tree import Tree

Decision = Literal["accepted", "rejected", "not_looked_at"]
Origin = Literal["recovered", "bonus", "plain"]


@dataclass
class Draft:
    token: int
    p: float | None  # processed probability of the target; None where only transformers' loop knows it
    q: float | None  # processed probability of the draft; None for a token that was not drawn
    decision: Decision = "not_looked_at"  # as counted: behind the first that was refused, nothing is looked at


@dataclass
class Following:
    """The token behind the drafts that were kept."""

    token: int | None
    p: float | None
    origin: Origin


@dataclass
class TracedRound:
    gamma: int = 0  # drafts asked for
    reason: str = "the prompt's pass"  # for that number, in the words of the schedule
    drafts: list[Draft] = field(default_factory=list)
    following: Following | None = None  # None if the text ended with a draft

    @property
    def tokens(self) -> list[int | None]:
        kept: list[int | None] = [each.token for each in self.drafts if each.decision == "accepted"]
        return kept if self.following is None else [*kept, self.following.token]


class Trace:
    """The rounds of one call. The engines call `begin`, then `emit` and `end`, or `looked_ahead`; the caller `finish`."""

    def __init__(self) -> None:
        self.rounds: list[TracedRound] = []
        self._round = TracedRound()  # the prompt's pass proposes nothing
        self._prefix: Tensor | None = None
        self._proposed: Tensor | None = None  # (1, G)
        self._kept: list[Tensor] = []  # processed scores (1, V) of the positions that were looked at
        self._next: tuple[int, str] | None = None
        self._tree: Tree | None = None
        self._drawn_from: Tensor | None = None  # (1, G, V)
        self._node = 0  # of the tree, the last that was reached

    def begin(
        self,
        gamma: int,
        room: int | None,
        plan: Plan,
        prefix: Tensor,
        drafts: Tensor,
        probs: Tensor | None,
        tree: Tree | None = None,
    ) -> None:
        """A proposal goes to the target: (1, G) drafts behind the prefix (1, T), drawn from (1, G, V) probs or None."""
        reason = getattr(plan, "reason", "")
        if room is not None and gamma == room - 1:
            reason = "no room in the text for more"
        elif gamma > 0 and drafts.shape[1] == 0 and reason == AS_PROPOSED:
            reason = "the drafter had none"
        self._round = TracedRound(gamma, reason)
        self._prefix, self._kept, self._next = prefix, [], None
        self._proposed, self._drawn_from, self._tree, self._node = drafts, probs, tree, 0
        if tree is None:
            self._list(drafts, probs)

    def _list(self, drafts: Tensor, probs: Tensor | None) -> None:
        q: list[Any] = [None] * drafts.shape[1]
        if probs is not None:
            q = probs.gather(-1, drafts[..., None])[0, :, 0].tolist()
        self._round.drafts = [Draft(token, None, q[i]) for i, token in enumerate(drafts[0].tolist())]

    def emit(self, token: int, origin: str, scores: Tensor, place: int) -> None:
        """The text goes on with this token, an accepted draft or the one behind them. scores: (1, V), processed; `place`: where in
        the pass, of a tree the node."""
        self._kept.append(scores)
        self._node = place
        if self._tree is not None and origin == "accepted" and self._proposed is not None:
            drafts = self._proposed[0].tolist()
            self._node = next(each for each in self._tree.children[place] if drafts[each - 1] == token)
        if origin != "accepted":
            self._next = (token, origin)

    def end(self, logits: Tensor, processors: LogitsProcessorList) -> None:
        """The round is over. logits: (1, G + 1, V). Positions that nobody looked at are asked of processors that keep no
        state; one that keeps some must not see them."""
        if self._tree is not None and self._proposed is not None:
            nodes, node = self._tree.path(self._node), self._node
            while self._tree.children[node]:
                node = self._tree.children[node][0]
                nodes.append(node)
            index = torch.tensor(nodes, dtype=torch.long, device=self._proposed.device)
            self._proposed = self._proposed[:, index - 1]
            self._list(self._proposed, None if self._drawn_from is None else self._drawn_from[:, index - 1])
            logits = logits[:, torch.cat([index.new_zeros(1), index])]
        drafts, looked_at = self._round.drafts, len(self._kept)
        scores = self._kept
        if self._proposed is not None and self._prefix is not None and warp.all_stateless(processors):
            everywhere = warp.process_at_once(processors, self._prefix, self._proposed, logits)
            scores = [*scores, *everywhere[0, looked_at:, None]]
        for i, draft in enumerate(drafts[: len(scores)]):
            draft.p = _probability(scores[i], draft.token)
        accepted = looked_at - (self._next is not None)
        if self._next is not None:
            token, origin = self._next
            self._follow(
                accepted, origin == "recovered", Following(token, _probability(scores[accepted], token), "bonus")
            )
        else:
            self._follow(accepted, False, None)

    def looked_ahead(self, num_kept: int, mismatch: bool, token: int | None, logits: Tensor, processors: Any) -> None:
        """The `lookahead` engine's round is over: the loop chose the first `num_kept` drafts by itself, then `token`
        (None: the text ended, and the loop did not show it). logits: (1, G + 1, V)."""
        scores = None
        if self._proposed is not None and self._prefix is not None and warp.all_stateless(processors):
            scores = warp.process_at_once(processors, self._prefix, self._proposed, logits.float())[0]
            for i, draft in enumerate(self._round.drafts):
                draft.p = _probability(scores[i : i + 1], draft.token)
        p = None if scores is None or token is None else _probability(scores[num_kept : num_kept + 1], token)
        self._follow(num_kept, mismatch, Following(token, p, "bonus"))

    def _follow(self, accepted: int, rejected: bool, following: Following | None) -> None:
        drafts = self._round.drafts
        for draft in drafts[:accepted]:
            draft.decision = "accepted"
        if rejected:
            drafts[accepted].decision = "rejected"
        if following is not None:
            all_kept = bool(drafts) and accepted == len(drafts)
            following.origin = "recovered" if rejected else "bonus" if all_kept else "plain"
        self._round.following = following
        self.rounds.append(self._round)
        self._round, self._kept, self._next, self._proposed = TracedRound(reason=""), [], None, None
        self._tree = None

    def finish(self, ids: list[int]) -> None:
        """`ids`: the new tokens of the call. Those that no round accounts for were decoded plainly."""
        position = 0
        for each in self.rounds:
            position += len(each.tokens)
            if each.following is not None and each.following.token is None and position <= len(ids):
                each.following.token = ids[position - 1]
        for token in ids[position:]:
            self.rounds.append(TracedRound(reason="decoded plainly", following=Following(token, None, "plain")))

    @property
    def tokens(self) -> list[int | None]:
        return [token for each in self.rounds for token in each.tokens]

    def to_list(self) -> list[dict[str, Any]]:
        return [asdict(each) for each in self.rounds]


def _probability(scores: Tensor, token: int) -> float | None:
    found = float(torch.softmax(scores[0].float(), dim=-1)[token])
    return found if math.isfinite(found) else None


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token, special tokens included; joined they are the text of all of them.

    A token may end in the middle of a character, or change how the one before is written, so that what each adds to the
    text so far is taken; the last adds what is left.
    """
    found, before = [], ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=False)
        whole = text if end == len(ids) else text.rstrip("�")
        if not whole.startswith(before):
            return [tokenizer.decode([each], skip_special_tokens=False) for each in ids]
        found.append(whole[len(before) :])
        before = whole
    return found


def describe(trace: Trace, tokenizer: Any) -> dict[str, Any]:
    """The rounds with the text of every token, ready for JSON. After `finish`."""
    ids = [token for token in trace.tokens if token is not None]
    texts = iter(pieces(tokenizer, ids))
    rounds = trace.to_list()
    for each in rounds:
        for draft in each["drafts"]:
            accepted = draft["decision"] == "accepted"
            draft["text"] = next(texts) if accepted else tokenizer.decode([draft["token"]], skip_special_tokens=False)
        if each["following"] is not None:
            each["following"]["text"] = next(texts)
    return {"token_ids": ids, "rounds": rounds}
