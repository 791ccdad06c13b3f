"""Accept rules for trees whose siblings were drawn without replacement. Pure tensors, like verify.py, whose walk rule serves
the trees that were not drawn.

Both rules look at siblings in the order in which they were drawn, and take a rejected one out of both distributions. The
recursive rule goes from the text down and settles each place before the next; the traversal rule begins at the leaves and
judges whole paths, as the block rule does with one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specplug.verify import Step


class Odds(NamedTuple):
    """How things stand at a node when its next child is looked at."""

    weight: (
        Tensor  # (), chance that the path down to the node is kept if none of its further children is; 1 by recursion
    )
    target: Tensor  # (V,) distribution of the token behind the node, if the path is kept and no child so far is
    draft: Tensor  # (V,) that the next child was drawn from


def acceptance(at: Odds, token: int) -> Tensor:
    """min(1, w p(x) / q(x)) for the next child x. Returns (): 0 for a token that the target cannot say.

    With weight 1 this is the chance that the child is kept: SpecInfer (arXiv 2305.09781), multi-step speculative sampling.
    Else it is the weight that the child's own odds begin with: Traversal Verification (arXiv 2505.12398).
    """
    target, draft = at.weight * at.target[token], at.draft[token]
    tiny = torch.finfo(draft.dtype).tiny
    return torch.where(target >= draft, (target > 0).to(target), target / draft.clamp(min=tiny))


def rejected(at: Odds, token: int) -> Odds:
    """The odds for the child after x, when x and everything below it is refused.

    What is left of the target is norm(max(0, w p - q)); of the draft, q without x (Sequoia, arXiv 2402.12374). With
    s the sum of max(0, w p - q) the weight becomes s / (s + 1 - w), which is 1 if it was 1.
    """
    left = (at.weight * at.target - at.draft).clamp(min=0)
    mass, lost = left.sum(), 1 - at.weight
    tiny = torch.finfo(left.dtype).tiny
    total = mass + lost
    # Nothing left and nothing lost: p and q are equal there, and that x was refused can only be rounding.
    weight = torch.where(total > tiny, mass / total.clamp(min=tiny), torch.ones_like(total))
    target = torch.where(mass > tiny, left / mass.clamp(min=tiny), at.target)
    draft = at.draft.clone()
    draft[token] = 0
    return Odds(weight, target, draft / draft.sum().clamp(min=tiny))


class Drawn(NamedTuple):
    """A tree whose siblings were drawn without replacement, and the distributions at its nodes. Node 0 is the text so far."""

    children: Sequence[Sequence[int]]  # of each node, in the order in which they were drawn
    token: Callable[[int], int]  # of a node
    target: Callable[[int], Tensor]  # (V,) processed distribution of the target behind a node
    draft: Callable[[int], Tensor]  # (V,) that the node's first child was drawn from


def verify_recursive(tree: Drawn, coin: Callable[[Tensor], bool], draw: Callable[[Tensor], int]) -> Iterator[Step]:
    """Recursive rejection: at each node the first child that passes is kept; if none does, a token from what is left.

    Nothing is asked for behind a node before its token has been handed out. Sources: SpecInfer (arXiv 2305.09781);
    without replacement, Sequoia (arXiv 2402.12374).

    Args:
        coin: () probability -> whether it happens.
        draw: (V,) distribution -> a token.
    """
    node: int | None = 0
    while node is not None:
        target = tree.target(node)
        at = Odds(torch.ones((), dtype=target.dtype, device=target.device), target, target)
        kept: int | None = None
        for place, child in enumerate(tree.children[node]):
            at = at._replace(draft=tree.draft(node)) if place == 0 else at
            if coin(acceptance(at, tree.token(child))):
                kept = child
                break
            at = rejected(at, tree.token(child))
        yield Step(node, draw(at.target) if kept is None else tree.token(kept), kept is not None)
        node = kept


def verify_traversal(tree: Drawn, coin: Callable[[Tensor], bool], draw: Callable[[Tensor], int]) -> list[Step]:
    """Traversal verification: leaves first. A path that is refused gives way to the next child of the node above, and the path
    to that node comes last; the first path that passes is kept whole, and a token from what is left follows.

    On a chain this is the block rule. Source: Traversal Verification (arXiv 2505.12398). Args as above.

    Why it is exact: `visit(node, w)` keeps the path to the node with probability w, whatever was drawn elsewhere, and then goes on
    by the target's law. For the first child x, drawn from q, it does so with min(q, w p) by token; w p - min(q, w p) is left,
    and has to come with the chance 1 - sum(min(q, w p)) that the child was refused: `rejected` says just that.
    """

    def visit(node: int, weight: Tensor) -> list[Step] | None:
        """What is kept from this node on, or None."""
        target = tree.target(node)
        at = Odds(weight, target, target)
        for place, child in enumerate(tree.children[node]):
            at = at._replace(draft=tree.draft(node)) if place == 0 else at
            token = tree.token(child)
            below = visit(child, acceptance(at, token))
            if below is not None:
                return [Step(node, token, True), *below]
            at = rejected(at, token)
        if node == 0 or coin(at.weight):  # the text so far is kept for certain
            return [Step(node, draw(at.target), False)]
        return None

    first = tree.target(0)
    found = visit(0, torch.ones((), dtype=first.dtype, device=first.device))
    return found or []
