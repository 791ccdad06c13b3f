"""The accept rules and the residual. Pure tensors: no model, no configuration, no processors.

Every distribution in here is processed already: logits after the caller's whole processor list, on the right prefix,
then softmax; and `draft_probs` is the distribution the draft token was really drawn from.

Words: an *accepted* token is a draft token that was kept; the *recovered* token replaces the first one rejected; the
*bonus* token follows when all were kept.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Verified(NamedTuple):
    num_accepted: Tensor  # (B,) how many draft tokens are kept, 0 to G
    # (B,) the recovered token, or the bonus token where num_accepted = G; -1 where neither could be drawn, see `checked`
    next_token: Tensor


def verify_greedy(draft_tokens: Tensor, target_scores: Tensor, num_drafts: Tensor | None = None) -> Verified:
    """Temperature 0: keep draft tokens while each is the target's argmax.

    Args:
        draft_tokens: (B, G) token ids.
        target_scores: (B, G + 1, V) processed scores or probabilities of the target.
        num_drafts: (B,) how many of the G each row really drafted; None if all did. What is behind them is padding.
    """
    choices = target_scores.argmax(-1)  # (B, G + 1)
    accepted = _drafted(draft_tokens == choices[:, :-1], num_drafts)
    num_accepted = accepted.long().cumprod(-1).sum(-1)
    return Verified(num_accepted, choices.gather(1, num_accepted[:, None]).squeeze(1))


def token_acceptance(draft_tokens: Tensor, draft_probs: Tensor | None, target_probs: Tensor) -> Tensor:
    """min(1, p(x) / q(x)) for each draft token x. Leviathan et al. 2022 (arXiv 2211.17192), section 2.3.

    Args:
        draft_tokens: (B, G) token ids.
        draft_probs: (B, G, V) that the tokens were drawn from, or None for tokens that were not drawn (q(x) = 1).
        target_probs: (B, G, V), or more positions, which are not read.
    Returns:
        (B, G) probabilities. A token that the target cannot say has 0, also where q(x) underflowed to 0.
    """
    num_drafts = draft_tokens.shape[1]
    target = target_probs[:, :num_drafts].gather(-1, draft_tokens[..., None]).squeeze(-1)  # (B, G)
    if draft_probs is None:
        return target.clamp(max=1)
    draft = draft_probs.gather(-1, draft_tokens[..., None]).squeeze(-1)  # (B, G)
    # p / q without a division by zero: q = 0 where p > 0 can only be underflow, and then p / q is large.
    return torch.where(
        target >= draft, (target > 0).to(target), target / draft.clamp(min=torch.finfo(draft.dtype).tiny)
    )


def residual(draft_tokens: Tensor, draft_probs: Tensor | None, target_probs: Tensor) -> Tensor:
    """The distribution of the recovered token: norm(max(0, p - q)), where it is empty by rounding, p itself.

    Shapes as in `token_acceptance`; returns (B, G, V). Source: Leviathan et al. 2022, section 2.3 and appendix A.1.
    """
    target = target_probs[:, : draft_tokens.shape[1]]
    if draft_probs is None:  # q is one at the draft token: p with that token taken out
        left = target.scatter(-1, draft_tokens[..., None], 0)
    else:
        left = (target - draft_probs).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    empty = total < torch.finfo(total.dtype).tiny
    return torch.where(empty, target, left / torch.where(empty, torch.ones_like(total), total))


def verify_token(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    generator: torch.Generator | None = None,
    num_drafts: Tensor | None = None,
) -> Verified:
    """Speculative sampling: each draft token is kept with min(1, p/q), up to the first rejection.

    The tokens that come out, accepted ones and the next one, have exactly the target's distribution.
    Source: Leviathan et al. 2022, algorithm 1; Chen et al. 2023 (arXiv 2302.01318), algorithm 2.

    Args:
        draft_tokens: (B, G) token ids; G may be 0.
        draft_probs: (B, G, V) that the tokens were drawn from, or None for tokens that were not drawn.
        target_probs: (B, G + 1, V).
        generator: source of randomness; None is torch's global stream.
        num_drafts: (B,) how many of the G each row really drafted; None if all did. A row whose drafts are all kept gets
            its bonus token from the position behind the last of them.
    """
    acceptance = token_acceptance(draft_tokens, draft_probs, target_probs)
    # rand() is in [0, 1): a probability of 0 never passes, a probability of 1 always does.
    uniform = torch.rand(acceptance.shape, dtype=acceptance.dtype, device=acceptance.device, generator=generator)
    num_accepted = _drafted(uniform < acceptance, num_drafts).long().cumprod(-1).sum(-1)  # (B,)
    rows, width = torch.arange(len(target_probs), device=target_probs.device), draft_tokens.shape[1]
    if not width:
        return Verified(num_accepted, sample_unread(target_probs[:, 0], generator))
    chosen = target_probs[rows, num_accepted]  # (B, V)
    # One position of each row is needed, not the residuals of all.
    at = num_accepted.clamp(max=width - 1)
    draft = None if draft_probs is None else draft_probs[rows, at][:, None]
    recovered = residual(draft_tokens[rows, at][:, None], draft, chosen[:, None])[:, 0]
    # Behind a row's last draft nothing was tested, so nothing is taken off the target's distribution.
    tested = num_accepted < (width if num_drafts is None else num_drafts)
    chosen = torch.where(tested[:, None], recovered, chosen)
    return Verified(num_accepted, sample_by_inversion(chosen, generator))


def block_acceptance(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, num_drafts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Block verification's `h` and the weight that its residual gives to the target, for each length of a block.

    Args as in `verify_block`. Returns two (B, G + 1): entry k of the first is the chance that the first k drafts are kept,
    given that no longer block is; entry k of the second is `w`, the residual after k drafts being norm(max(0, w p - q)).
    Source: Sun et al. 2024 (arXiv 2403.10444), algorithm 2.
    """
    target, chosen = target_probs[:, :-1], draft_tokens[..., None]
    ratio = target.gather(-1, chosen) / draft_probs.gather(-1, chosen).clamp(min=torch.finfo(draft_probs.dtype).tiny)
    # The weight is w_k = min(1, w_(k-1) p / q). In logarithms, sums that are held at 0 from above: each sum less the largest so far.
    # A dozen operations for any G, and in float64 with no more error than those that fp32 makes anyway.
    logs = ratio.squeeze(-1).double().log()
    running = torch.stack(list(accumulate(logs.unbind(-1))), dim=-1) if _no_sums(logs) else logs.cumsum(-1)
    sums = torch.nn.functional.pad(running, (1, 0))  # (B, G + 1)
    weight = (sums - sums.cummax(-1).values).exp().to(target.dtype)
    before = weight[:, :-1]
    left = (before[..., None] * target - draft_probs).clamp_(min=0).sum(-1)  # (B, G)
    # Nothing left and nothing lost, 0 / 0: p and q are equal there, and the block may end at no cost; it is kept for certain.
    ends = (left / (left + (1 - before))).nan_to_num_(1.0)
    chance = torch.cat([ends, weight[:, -1:]], dim=1)
    if num_drafts is not None:  # a row's own last draft ends its block
        last = torch.arange(chance.shape[1], device=num_drafts.device) == num_drafts[:, None]
        chance = torch.where(last, weight, chance)
    return chance, weight


def verify_block(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    generator: torch.Generator | None = None,
    num_drafts: Tensor | None = None,
) -> Verified:
    """Block verification: the longest block that is kept, drafts being judged together and not one after another.

    Never keeps fewer tokens on average than the token rule, and has the same law. Source: Sun et al. 2024
    (arXiv 2403.10444). Args as in `verify_token`. Drafts that were not drawn go to the token rule, which is as good there.
    """
    if draft_probs is None or draft_tokens.shape[1] == 0:
        return verify_token(draft_tokens, draft_probs, target_probs, generator, num_drafts)
    chance, weight = block_acceptance(draft_tokens, draft_probs, target_probs, num_drafts)
    uniform = torch.rand(chance.shape, dtype=chance.dtype, device=chance.device, generator=generator)
    positions = torch.arange(chance.shape[1], device=chance.device)
    kept = uniform < chance
    if num_drafts is not None:
        kept &= positions <= num_drafts[:, None]
    num_accepted = (kept * positions).amax(-1)  # (B,), 0 for the empty block, which is always kept
    rows = torch.arange(len(chance), device=chance.device)
    target = target_probs[rows, num_accepted]  # (B, V)
    drafted = num_accepted < (draft_tokens.shape[1] if num_drafts is None else num_drafts)
    draft = draft_probs[rows, num_accepted.clamp(max=draft_tokens.shape[1] - 1)]  # (B, V)
    left = (weight[rows, num_accepted][:, None] * target - draft).clamp_(min=0)
    usable = (left.sum(-1) >= torch.finfo(left.dtype).tiny) & drafted
    return Verified(num_accepted, sample_by_inversion(torch.where(usable[:, None], left, target), generator))


class Step(NamedTuple):
    node: int  # where the token was drawn
    token: int
    kept: bool  # a child of the node bears it, and the walk goes on from there


def chain(draft_tokens: Sequence[int]) -> list[dict[int, int]]:
    """Drafts one behind another, as `verify_walk` takes them: node i has one child, node i + 1; the last has none."""
    return [*({token: i + 1} for i, token in enumerate(draft_tokens)), {}]


def verify_walk(children: Sequence[dict[int, int]], draw: Callable[[int], int]) -> Iterator[Step]:
    """Draw from the target at the root; go down to the child that bears the token, and draw there, until none does.

    Every token that comes out was drawn from the target's distribution on the text before it, whatever the drafts are and
    however they came about: they may have seen the very random numbers that the draws use. Nothing is drawn before it is
    asked for, so random numbers are used as plain decoding uses them, one draw a token.

    Args:
        children: for each node the drafts behind it, as {token: node}. Node 0 stands for the text so far. See `chain`.
        draw: node -> a token from the target's distribution there.
    """
    node: int | None = 0
    while node is not None:
        token = draw(node)
        child = children[node].get(token)
        yield Step(node, token, child is not None)
        node = child


def _drafted(accepted: Tensor, num_drafts: Tensor | None) -> Tensor:
    """`accepted`, (B, G), with False where a row has no draft."""
    if num_drafts is None:
        return accepted
    return accepted & (torch.arange(accepted.shape[1], device=accepted.device) < num_drafts[:, None])


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token id per row of (B, V) probabilities, drawn as transformers draws it."""
    return torch.multinomial(probs, num_samples=1, generator=generator).squeeze(1)


def sample_unread(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The token ids that `sample` draws from the same random numbers, (B, V) -> (B,), without waiting for the device to check the
    probabilities: a row with a nan, or with nothing above 0, gets -1, see `checked`. So where nothing is drafted, texts are those
    of plain decoding."""
    tokens = race(probs, torch.empty_like(probs).exponential_(1, generator=generator))
    return torch.where(probs.gather(-1, tokens[:, None]).squeeze(1) > 0, tokens, -1)


def race(probs: Tensor, noise: Tensor) -> Tensor:
    """The winner of an exponential race, (B, V) and (B, V) -> (B,): argmax of p / e has the distribution p.

    Two races with the same noise have the same winner more often than two draws: with a probability of at least
    (1 - d) / (1 + d), d the total variation distance of their distributions. Source: Daliri et al. 2024 (arXiv 2408.07978).
    """
    return (probs / noise).argmax(-1)


def sample_by(probs: Tensor, noise: Tensor) -> Tensor:
    """One token id per row, (B, V) -> (B,), by a race with given noise. Raises RuntimeError where `sample` does."""
    tokens = race(probs, noise)
    if not bool((probs.gather(-1, tokens[:, None]) > 0).all()):  # the argmax of a nan is its place
        raise RuntimeError("probability tensor contains either nan, or no element above 0")
    return tokens


def sample_by_inversion(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token id per row, (B, V) -> (B,), by inverting the distribution function: one random number a row.

    `torch.multinomial` draws one for each token of the vocabulary, which costs more than a small draft's arithmetic, and
    waits for the device. Summed and inverted in float64, so that the law is that of `probs` to its last digit. Not for draws that
    have to be transformers' own. Rows need not sum to 1; one with a nan or inf, or
    with nothing above 0, gets -1, so that nobody has to wait to be told: whoever reads the tokens has to look, see `checked`.
    """
    if _no_sums(probs):
        return sample_unread(probs, generator)
    return invert(probs, torch.rand((len(probs), 1), dtype=torch.float64, device=probs.device, generator=generator))


def invert(probs: Tensor, point: Tensor) -> Tensor:
    """The same with random numbers that were drawn before, (B, 1) in float64, at least 0 and below 1."""
    total = probs.cumsum(-1, dtype=torch.float64)
    # They are at most 1 - 2^-53, so the product is below the sum, also by rounding: the first sum above it is that of a token with a
    # probability above 0. No sum is above nan, inf, or 0 of 0.
    tokens = torch.searchsorted(total, point * total[:, -1:], right=True).squeeze(1)
    return torch.where(tokens < probs.shape[-1], tokens, -1)


def _no_sums(values: Tensor) -> bool:
    """Whether running sums are refused: torch.use_deterministic_algorithms has no such sum of fractions on CUDA, where transformers' own
    draws need none."""
    return values.device.type == "cuda" and torch.are_deterministic_algorithms_enabled()


def checked(tokens: list[int]) -> list[int]:
    """Raises RuntimeError, as `sample` does, if one of them was drawn from what is no distribution."""
    if min(tokens) < 0:
        raise RuntimeError("probability tensor contains either inf, nan, or no element above 0")
    return tokens


RULES = {"token": verify_token, "block": verify_block}  # of drafts that were drawn
RULE_NAMES = (*RULES, "walk")
