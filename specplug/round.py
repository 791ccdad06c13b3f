"""One round: verify a proposal against the target's logits and hand out its tokens one by one.

For chains three ways, same law. `verify_at_once` handles all positions as tensors and needs one host read; it is for processors that
keep no state. `verify_in_order` calls the processors once per token, on the accepted prefix, and goes on
only when the caller asks for the next token: a processor or criterion that keeps state sees exactly what plain decoding
shows it. `verify_by_walk` draws each token as plain decoding does, and not before the caller asks for it.

For trees one way, `verify_in_tree`, which goes in order too, but for the traversal rule, which looks at all nodes first.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specplug import warp
from specplug.device import Read
from specplug.drafters import Proposal
from specplug.fixed import to_device
from specplug.verify import RULES, Step, chain, checked, residual, sample, token_acceptance, verify_greedy, verify_walk
from specplug.verify_tree import Drawn, verify_recursive, verify_traversal


class Emitted(NamedTuple):
    token: int
    origin: Literal["accepted", "recovered", "bonus"]
    scores: Tensor  # (1, V) processed
    node: int  # where it was found: how many drafts are before it, or in a tree the node behind which it stands
    # (1, V) there, where processors may have written into them: what output_logits then has
    logits: Tensor | None = None


class Text:
    """The prompt and every token committed so far, (1, T). What was handed out before stays as it was."""

    def __init__(self, ids: Tensor) -> None:
        self._buffer, self._prompt, self._written = ids, ids.shape[1], ids.shape[1]
        self._on_host: Any = None  # the buffer, where a host can write into it
        # Those behind position `_written` are not in the buffer yet: they are written together when somebody asks for the ids.
        self._committed: list[int] = []

    def __len__(self) -> int:
        return self._prompt + len(self._committed)

    @property
    def ids(self) -> Tensor:
        old, new = self._written, len(self)
        if old < new:
            if new > self._buffer.shape[1]:
                self._grow(old + max(new, 64))
            added = self._committed[old - self._prompt :]
            if self._on_host is None:
                self._buffer[0, old:new] = to_device(added, self._buffer.device)
            else:
                self._on_host[0, old:new] = added
            self._written = new
        return self._buffer[:, : self._written]

    def _grow(self, room: int) -> None:
        before = self._buffer[:, : self._written]
        if (
            before.device.type == "cpu"
        ):  # numpy's as well, which writes a few tokens in a tenth of the time that torch takes
            self._on_host = np.zeros((1, room), dtype=str(before.dtype).removeprefix("torch."))
            self._buffer = torch.from_numpy(self._on_host)
        else:
            self._buffer = before.new_zeros((1, room))
        self._buffer[:, : self._written] = before

    def since(self, place: int) -> list[int]:
        """The tokens from there on. Of the prompt they are read from where it is, and else no device is asked."""
        if place < self._prompt:
            return self.ids[0, place:].tolist()
        return self._committed[place - self._prompt :]

    def commit(self, token: int) -> None:
        self._committed.append(token)


def verify_at_once(
    proposal: Proposal,
    logits: Tensor,
    processors: LogitsProcessorList,
    do_sample: bool,
    text: Text,
    rule: str,
    begin: Callable[[Tensor, Tensor], None] | None = None,
) -> Iterator[Emitted]:
    """`logits` is (1, G + 1, V) in fp32; every processor must be stateless. `rule`: see verify.RULES. `begin` is given the verdict
    on the device, (1,) accepted drafts and (1,) next token, before the host waits for it."""
    scores = warp.process_at_once(processors, text.ids, proposal.tokens, logits)  # (1, G + 1, V)
    if not do_sample and begin is None:  # nothing on the device waits for the verdict
        read = torch.cat([_argmax(scores[0]), proposal.tokens[0]]).tolist()  # the one host read of the round
        yield from _walked(read[scores.shape[1] :], read.__getitem__, scores.unbind(1).__getitem__)
        return
    if do_sample:
        verified = RULES[rule](proposal.tokens, proposal.probs, warp.to_probs(scores))
    else:
        verified = verify_greedy(proposal.tokens, scores)
    # The one host read of the round, asked for before the next drafts are: else the host would wait for those as well.
    coming = Read(torch.cat([*verified, proposal.tokens[0]]))
    if begin is not None:
        begin(*verified)
    num_accepted, next_token, *drafts = checked(coming.tolist())
    for i in range(num_accepted):
        yield Emitted(drafts[i], "accepted", scores[:, i], i)
    origin: Literal["recovered", "bonus"] = "bonus" if num_accepted == len(drafts) else "recovered"
    yield Emitted(next_token, origin, scores[:, num_accepted], num_accepted)


def verify_in_order(
    proposal: Proposal, logits: Tensor, processors: LogitsProcessorList, do_sample: bool, text: Text, rule: str
) -> Iterator[Emitted]:
    """Like `verify_at_once`, for any processors. The caller commits each token before it asks for the next.

    By the token rule always: the block rule looks at all positions before it keeps the first.
    """
    num_drafts = proposal.tokens.shape[1]
    for i in range(num_drafts + 1):
        # A copy: a processor may write into the logits it is given, as plain decoding lets it.
        given = logits[:, i].clone()
        scores = warp.process(processors, text.ids, given)  # (1, V)
        if i == num_drafts:
            token = sample(warp.to_probs(scores)) if do_sample else scores.argmax(-1)
            yield Emitted(int(token), "bonus", scores, i, given)
            return
        draft = proposal.tokens[:, i : i + 1]  # (1, 1)
        if do_sample:
            probs = warp.to_probs(scores)[:, None]  # (1, 1, V)
            draft_probs = None if proposal.probs is None else proposal.probs[:, i : i + 1]
            acceptance = token_acceptance(draft, draft_probs, probs)
            accepted = bool(torch.rand_like(acceptance) < acceptance)
            token = draft[0] if accepted else sample(residual(draft, draft_probs, probs)[:, 0])
        else:
            token = scores.argmax(-1)
            accepted = bool(token == draft[0])
        yield Emitted(int(token), "accepted" if accepted else "recovered", scores, i, given)
        if not accepted:
            return


def verify_by_walk(
    proposal: Proposal,
    logits: Tensor,
    processors: LogitsProcessorList,
    text: Text,
    stateless: bool,
    choose: Callable[[Tensor], Tensor],
) -> Iterator[Emitted]:
    """By the walk rule, for processors that keep no state or for any. The caller commits each token before it asks for more.

    `choose`: (1, V) probabilities of the token that comes next -> (1,) token id.
    """
    at_once = None
    if stateless:
        at_once = warp.process_at_once(processors, text.ids, proposal.tokens, logits)  # (1, G + 1, V)
    drafts = proposal.tokens[0].tolist()
    scores, given = logits[:, 0], None

    def draw(node: int) -> int:
        nonlocal scores, given
        if at_once is not None:
            scores = at_once[:, node]
        else:
            given = logits[:, node].clone()
            scores = warp.process(processors, text.ids, given)
        return int(choose(warp.to_probs(scores)))

    for emitted in _walked(drafts, draw, lambda node: scores):
        yield emitted._replace(logits=given)


def _walked(drafts: list[int], draw: Callable[[int], int], scores: Callable[[int], Tensor]) -> Iterator[Emitted]:
    """The walk rule along a chain. `scores`: of a place that was drawn from, (1, V)."""
    for node, token, kept in verify_walk(chain(drafts), draw):
        missed: Literal["recovered", "bonus"] = "bonus" if node == len(drafts) else "recovered"
        yield Emitted(token, "accepted" if kept else missed, scores(node), node)


def verify_in_tree(
    proposal: Proposal,
    logits: Tensor,
    processors: LogitsProcessorList,
    do_sample: bool,
    text: Text,
    rule: str,
    stateless: bool,
    choose: Callable[[Tensor], Tensor] = sample,
) -> Iterator[Emitted]:
    """A tree, `logits` being (1, N + 1, V) by node. The caller commits each token before it asks for the next.

    Drafts that were not drawn, and greedy calls, go by the walk rule; drawn ones by recursive rejection (`rule` "token") or by
    traversal ("block"), and where a processor keeps state by recursive rejection always: traversal looks at all nodes before it
    keeps the first. `choose`: the target's own draw, as in `verify_by_walk`.
    """
    tree, tokens = proposal.tree, proposal.tokens[0].tolist()
    assert tree is not None
    scores: dict[int, Tensor] = {}  # (1, V) processed, by node
    given: dict[int, Tensor] = {}  # (1, V) what they were made from

    def look_at(node: int) -> Tensor:
        """Processed scores behind a node whose path has been committed."""
        given[node] = logits[:, node].clone()
        scores[node] = warp.process(processors, text.ids, given[node])
        return scores[node]

    def draw(node: int) -> int:
        found = look_at(node)
        return int(choose(warp.to_probs(found)) if do_sample else found.argmax(-1))

    steps: Iterable[Step]
    if proposal.probs is None or not do_sample:
        steps = verify_walk(tree.by_token(tokens), draw)
    else:
        probs = proposal.probs[0]
        drawn = Drawn(
            tree.children,
            lambda node: tokens[node - 1],
            lambda node: warp.to_probs(scores[node] if node in scores else look_at(node))[0],
            lambda node: probs[tree.children[node][0] - 1],
        )
        if rule == "block" and stateless:
            prefix = text.ids
            paths = [[tokens[each - 1] for each in tree.path(node)] for node in range(len(tokens) + 1)]
            prefixes = [torch.cat([prefix, prefix.new_tensor([path])], dim=1) if path else prefix for path in paths]
            rows = warp.process_rows(processors, prefixes, logits[0])
            scores = {node: rows[node : node + 1] for node in range(len(rows))}
            steps = verify_traversal(drawn, _coin, _draw)
        else:
            steps = verify_recursive(drawn, _coin, _draw)
    for node, token, kept in steps:
        missed: Literal["recovered", "bonus"] = "recovered" if tree.children[node] else "bonus"
        yield Emitted(token, "accepted" if kept else missed, scores[node], node, given.get(node))


def _argmax(scores: Tensor) -> Tensor:
    """(N, V) -> (N,). On the CPU by numpy, in a tenth of the time that torch takes, with the same answer also among equals and with nan."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    return torch.from_numpy(np.from_dlpack(scores).argmax(-1))


def _coin(chance: Tensor) -> bool:
    return bool(torch.rand_like(chance) < chance)  # rand() is below 1: 0 never passes, 1 always does


def _draw(probs: Tensor) -> int:
    return int(sample(probs[None]))
