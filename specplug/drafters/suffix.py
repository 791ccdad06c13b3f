"""Suffix counts: what most often followed the last tokens, wherever they stood before. No model, no weights.

After SuffixDecoding (arXiv 2411.04975): every run of tokens up to a depth is counted with what followed it. A draft is
written token by token, each time the most frequent continuation of the longest run that is known, for as long as the
product of their frequencies says that it is likely. Cold, a call knows its own text alone; warm, it also knows what earlier
calls wrote, which makes benchmarks that ask similar questions look better than they are. A tree takes the likeliest of all
continuations, by the same product.
"""

import heapq
import threading
from collections import Counter, OrderedDict

from torch import Tensor

from specplug.drafters import Proposal, Request, TextSession
from specplug.fixed import to_device
from specplug.tree import Dynamic, Shape, Tree


class Counts:
    """Run of tokens -> what followed it, how often. At most `max_runs` runs; those not met for longest are forgotten."""

    def __init__(self, min_depth: int, max_depth: int, max_runs: int) -> None:
        self.depths = range(max_depth, min_depth - 1, -1)
        self.max_runs = max_runs
        self.following: OrderedDict[tuple[int, ...], Counter[int]] = OrderedDict()
        self.lock = threading.Lock()

    def add(self, text: list[int], start: int) -> None:
        """Count the tokens of `text` from position `start` on as continuations of what is before them."""
        with self.lock:
            for position in range(start, len(text)):
                for depth in self.depths:
                    if depth <= position:
                        run = tuple(text[position - depth : position])
                        counts = self.following.get(run)
                        if counts is None:
                            counts = self.following[run] = Counter()
                        counts[text[position]] += 1
            while len(self.following) > self.max_runs:
                self.following.popitem(last=False)

    def next(self, text: list[int]) -> tuple[int, float, int] | None:
        """Most frequent continuation of the longest known run at the end, its share, and the run's length."""
        counts, depth = self.known(text)
        if not counts:
            return None
        token, times = max(counts.items(), key=lambda each: each[1])
        return token, times / counts.total(), depth

    def known(self, text: list[int]) -> tuple[Counter[int], int]:
        """What followed the longest known run at the end, and the run's length."""
        for depth in self.depths:
            if depth <= len(text):
                counts = self.following.get(tuple(text[-depth:]))
                if counts:
                    return counts, depth
        return Counter(), 0


class SuffixDrafter:
    """Args: shortest and longest run to look for; least likely draft to propose; warm: keep what earlier calls wrote, at
    most `max_runs` runs of it."""

    name = "suffix"
    costs_nothing = True
    drafts_trees = True

    def __init__(
        self,
        min_depth: int = 2,
        max_depth: int = 8,
        min_probability: float = 0.3,
        warm: bool = False,
        max_runs: int = 1_000_000,
    ) -> None:
        if not 1 <= min_depth <= max_depth:
            raise ValueError(f"min_depth={min_depth}, max_depth={max_depth}: need 1 <= min_depth <= max_depth")
        if not 0 <= min_probability <= 1:
            raise ValueError(f"min_probability={min_probability}: a probability between 0 and 1")
        self.min_depth, self.max_depth = min_depth, max_depth
        self.min_probability, self.max_runs = min_probability, max_runs
        self.shared = Counts(min_depth, max_depth, max_runs) if warm else None

    def start(self, request: Request) -> "SuffixSession":
        counts = self.shared or Counts(self.min_depth, self.max_depth, self.max_runs)
        return SuffixSession(counts, self.min_probability, request)


class SuffixSession(TextSession):
    def __init__(self, counts: Counts, min_probability: float, request: Request) -> None:
        self.counts, self.min_probability = counts, min_probability
        self.vocab_size, self.read = request.vocab_size, request.read
        self.text: list[int] = []

    def propose(self, ids: Tensor, gamma: int) -> Proposal:
        known = len(self.text)
        self.text += self.read(ids, known)
        self.counts.add(self.text, known)
        tail = self.text[-self.counts.depths.start :]
        draft: list[int] = []
        likely, matched = 1.0, 0
        while len(draft) < gamma:
            found = self.counts.next(tail)
            if found is None:
                break
            token, share, depth = found
            likely *= share
            if likely < self.min_probability or token >= self.vocab_size:
                break
            matched = matched or depth
            draft.append(token)
            tail.append(token)
        return Proposal(to_device(draft, ids.device)[None], None, matched)

    def propose_tree(self, ids: Tensor, shape: Shape) -> Proposal:
        known = len(self.text)
        self.text += self.read(ids, known)
        self.counts.add(self.text, known)
        tokens: list[int] = []
        parents: list[int] = []
        paths: list[list[int]] = [[]]
        num_children = [0]
        waiting: list[tuple[float, int, int]] = []  # (-likelihood, parent, token): a heap

        def add_children(node: int, likely: float) -> int:
            longest = self.counts.depths.start
            counts, run = self.counts.known([*self.text[-longest:], *paths[node]][-longest:])
            for token, times in tuple(counts.items()):  # other calls may count on
                share = likely * times / counts.total()
                if share >= self.min_probability and token < self.vocab_size:
                    heapq.heappush(waiting, (-share, node, token))
            return run

        matched = add_children(0, 1.0)
        while waiting and len(tokens) < shape.size:
            share, parent, token = heapq.heappop(waiting)
            depth = len(paths[parent])
            if not isinstance(shape, Dynamic) and num_children[parent] == shape.branching[depth]:
                continue
            tokens.append(token)
            parents.append(parent)
            paths.append([*paths[parent], token])
            num_children[parent] += 1
            num_children.append(0)
            if depth + 1 < shape.depth:
                add_children(len(tokens), -share)
        drafts = to_device(tokens, ids.device)[None]
        return Proposal(drafts, None, matched if tokens else 0, Tree(parents))
