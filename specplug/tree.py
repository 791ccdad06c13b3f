"""A tree of drafts: several tokens for one place, each with continuations of its own. Lists and masks: no model, no rule.

Node 0 is the text so far. Draft i is node i + 1, and its parent has a smaller number; of siblings, the one with the smaller
number was proposed first. A path from node 0 down is one of the texts that the tree proposes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Static(NamedTuple):
    """The same tree in every round: so many children for each node, by depth. (4, 2, 1) has 4 + 8 + 8 nodes."""

    branching: tuple[int, ...]

    @property
    def size(self) -> int:
        total, width = 0, 1
        for count in self.branching:
            width *= count
            total += width
        return total

    @property
    def depth(self) -> int:
        return len(self.branching)


class Dynamic(NamedTuple):
    """As many nodes as the budget says, where the draft thinks they are likeliest, none deeper than `depth`.

    Source of the idea: EAGLE-2 (arXiv 2406.16858).
    """

    budget: int
    depth: int

    @property
    def size(self) -> int:
        return self.budget


Shape = Static | Dynamic


def shape_of(given: Any) -> Shape:
    """A checked shape from `Static`, `Dynamic` or a list of numbers. Raises ValueError for anything else."""
    if isinstance(given, Dynamic):
        if not all(_positive(each) for each in given):
            raise ValueError(f"tree={given}: budget (nodes a round) and depth are whole numbers, 1 or more")
        return given
    branching = given.branching if isinstance(given, Static) else given
    if not isinstance(branching, (list, tuple)) or not branching or not all(_positive(each) for each in branching):
        raise ValueError(
            f"tree={given!r}: give the numbers of children by depth, as [4, 2, 1], each 1 or more, or Dynamic(budget, depth)"
        )
    return Static(tuple(branching))


def limited(shape: Shape | None, num_drafts: int, depth: int | None) -> Shape | None:
    """The shape for one round: no deeper than `depth`, a dynamic one with so many nodes; None if nothing is left of it."""
    if shape is None or num_drafts < 1 or depth == 0:
        return None
    if isinstance(shape, Static):
        return Static(shape.branching[:depth])
    return Dynamic(num_drafts, min(shape.depth, num_drafts, num_drafts if depth is None else depth))


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class Tree:
    """Args: the parent of each draft, in order: `Tree([0, 0, 1])` has two drafts behind the text, one behind the first.

    Attributes: by node, `parents` (-1 for node 0), `depths` and `children`.
    """

    def __init__(self, parents: Sequence[int]) -> None:
        self.parents = [-1, *parents]
        self.depths = [0]
        self.children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(parents, start=1):
            if not 0 <= parent < node:
                raise ValueError(f"parent {parent} of node {node}: a parent has a smaller number than its child")
            self.depths.append(self.depths[parent] + 1)
            self.children[parent].append(node)

    @property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def is_chain(self) -> bool:
        return self.depth == len(self.parents) - 1

    def path(self, node: int) -> list[int]:
        """The nodes from the first draft down to this one, itself included; node 0 is left out."""
        found: list[int] = []
        while node > 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def by_token(self, tokens: Sequence[int]) -> list[dict[int, int]]:
        """For each node its children as {token: node}, as `verify_walk` takes them. `tokens`: of the drafts, in order."""
        return [{tokens[child - 1]: child for child in reversed(children)} for children in self.children]

    def visible(self) -> Tensor:
        """(N + 1, N + 1) bool: row i is True at node i and at what is above it."""
        seen = torch.eye(len(self.parents), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            seen[node] |= seen[parent]
        return seen

    def only(self, drafts: Sequence[int]) -> "Tree":
        """With these drafts alone, in this order; with each its parent has to be there."""
        number = {0: 0} | {draft + 1: place for place, draft in enumerate(drafts, start=1)}
        return Tree([number[self.parents[draft + 1]] for draft in drafts])


def attention_mask(visible: Tensor, before: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask of a pass over nodes: (N, M) bool, which of the M positions behind `before` each node sees, and (1, T) bool,
    which of the positions before them all see. Returns (1, 1, N, T + M): 0 where seen, else the least number of `dtype`."""
    seen = torch.cat([before.expand(len(visible), -1), visible.to(before.device)], dim=1)
    mask = torch.zeros(seen.shape, dtype=dtype, device=before.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


def best(values: Tensor, counts: Sequence[int]) -> list[list[int]]:
    """For each row of (F, V) values at most so many tokens with the largest values, in order; none whose value is 0."""
    most = min(max(counts, default=0), values.shape[-1])
    if most == 0:
        return [[] for _ in counts]
    top = values.topk(most, dim=-1)
    rows = zip(counts, top.values.tolist(), top.indices.tolist(), strict=True)
    return [[token for value, token in zip(each, ids, strict=True) if value > 0][:count] for count, each, ids in rows]


def shares(path_probs: Tensor, probs: Tensor, num: int) -> list[int]:
    """How many children each node of a level gets if the level gets `num`: (F,) probabilities of the paths so far, (F, V) of
    what comes next -> F numbers. By the places of the `num` likeliest paths.

    Known before a child is drawn: to choose by what was drawn would change its law.
    """
    products = path_probs[:, None] * probs
    top = products.flatten().topk(min(num, products.numel()))
    rows = top.indices[top.values > 0] // probs.shape[-1]
    counts: list[int] = torch.bincount(rows, minlength=len(probs)).tolist()
    return counts
