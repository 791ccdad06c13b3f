"""How a tree of drafts grows, level by level, from what a draft says behind the nodes of the level before. No model in here.

Not drawn: the likeliest children. Drawn: children without replacement, and how many of them and where is settled before they
are drawn; a node is never left out for what it turned out to be, which would change the law of what is kept.
"""

import torch
from torch import Tensor

from specplug.tree import Dynamic, Shape, Tree, best, shares


class Growth:
    """Args: the shape; `drawn`: whether children are drawn, or the best are taken.

    Attributes: `frontier`, the nodes for which the draft is asked what comes next: node 0 at first, none when all is done.
    """

    def __init__(self, shape: Shape, drawn: bool) -> None:
        self.shape, self.drawn = shape, drawn
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.values = [1.0]  # by node: how likely the path down to it is, by the draft
        self.probs: list[Tensor] = []  # (V,) that each draft was drawn from
        self.frontier = [0]
        self.level = 0

    def add(self, probs: Tensor, values: Tensor) -> None:
        """One level more. Both (F, V), behind the nodes of the frontier: the draft's distributions, and, for children that are
        not drawn, by what the best are taken."""
        if self.drawn:
            counts = self._counts_drawn(probs)
            children = best(probs / torch.empty_like(probs).exponential_(), counts)
        else:
            children = best(values, [self._breadth()] * len(self.frontier))
        values = probs if self.drawn else values
        new = []
        for row, (parent, tokens) in enumerate(zip(self.frontier, children, strict=True)):
            for token, value in zip(tokens, values[row, tokens].tolist(), strict=True):
                self.tokens.append(token)
                self.parents.append(parent)
                self.values.append(self.values[parent] * value)
                new.append(len(self.tokens))
                if self.drawn:
                    self.probs.append(probs[row])
        self.level += 1
        self.frontier = self._next(new) if self.level < self.shape.depth else []

    def path(self, node: int) -> list[int]:
        """Tokens from the text down to the node."""
        found: list[int] = []
        while node > 0:
            found.append(self.tokens[node - 1])
            node = self.parents[node - 1]
        return found[::-1]

    def chosen(self) -> list[int]:
        """The drafts that are proposed, by number, in order: of a dynamic tree that was not drawn, the likeliest first."""
        if isinstance(self.shape, Dynamic) and not self.drawn:
            return self._likeliest()
        return list(range(len(self.tokens)))

    def tree(self) -> Tree:
        return Tree(self.parents).only(self.chosen())

    def _breadth(self) -> int:
        """Children of a node that are looked at; of a dynamic tree also the nodes of a level that get some."""
        if isinstance(self.shape, Dynamic):
            return min(max(2, -(-self.shape.budget // self.shape.depth)), self.shape.budget)
        return self.shape.branching[self.level]

    def _counts_drawn(self, probs: Tensor) -> list[int]:
        if not isinstance(self.shape, Dynamic):
            return [self._breadth()] * len(self.frontier)
        share, more = divmod(self.shape.budget, self.shape.depth)
        paths = torch.tensor([self.values[node] for node in self.frontier], dtype=probs.dtype, device=probs.device)
        return shares(paths, probs, share + (self.level < more))

    def _next(self, new: list[int]) -> list[int]:
        if self.drawn or not isinstance(self.shape, Dynamic):
            return new
        # Behind a node that has fallen out of the budget nothing can come into it: paths only get less likely.
        inside = {draft + 1 for draft in self._likeliest()}
        hopeful = [node for node in new if node in inside]
        return sorted(hopeful, key=lambda node: -self.values[node])[: self._breadth()]

    def _likeliest(self) -> list[int]:
        """As many drafts as the shape has nodes, by number."""
        return sorted(range(len(self.tokens)), key=lambda draft: -self.values[draft + 1])[: self.shape.size]
