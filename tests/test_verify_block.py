"""The block rule: its exact law by enumeration, its gain over the token rule, and variants broken on purpose."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from test_verify import GAMMA, V, complete, contexts, error_against_target

from specplug import verify


def law_of_block(p_and_q, acceptance=None, first_failure=False, residual_weight=True):
    """Exact law of the first GAMMA + 1 tokens; nothing is sampled. Open tokens are filled from p."""
    acceptance = acceptance or verify.block_acceptance
    law: dict[tuple[int, ...], float] = {}

    mean_kept = 0.0
    for drafts in itertools.product(range(V), repeat=GAMMA):
        drawn = 1.0
        for i, token in enumerate(drafts):
            drawn *= p_and_q[drafts[:i]][1][token].item()
        draft_probs = torch.stack([p_and_q[drafts[:i]][1] for i in range(GAMMA)])[None]
        target_probs = torch.stack([p_and_q[drafts[:i]][0] for i in range(GAMMA + 1)])[None]
        chance, weight = (each[0] for each in acceptance(torch.tensor([drafts]), draft_probs, target_probs))
        left_over = drawn
        lengths = range(GAMMA, -1, -1)
        if first_failure:  # broken: stop at the first coin that fails, as the token rule does
            kept = [1.0]
            for k in range(1, GAMMA + 1):
                kept.append(kept[-1] * chance[k].item())
            shares = {k: drawn * (kept[k] - (kept[k + 1] if k < GAMMA else 0.0)) for k in lengths}
        else:
            shares = {}
            for k in lengths:
                shares[k] = left_over * (chance[k].item() if k else 1.0)
                left_over -= shares[k]
        for k, share in shares.items():
            mean_kept += k * share
            if k == GAMMA:
                complete(p_and_q, law, drafts, share)
                continue
            scale = weight[k] if residual_weight else 1.0
            left = (scale * target_probs[0, k] - draft_probs[0, k]).clamp(min=0)
            recovered = left / left.sum() if left.sum() > 0 else target_probs[0, k]
            for token, probability in enumerate(recovered.tolist()):
                if share * probability:
                    complete(p_and_q, law, (*drafts[:k], token), share * probability)
    return law, mean_kept


@pytest.mark.parametrize("seed", range(4))
def test_block_rule_has_the_law_of_the_target(seed):
    p_and_q = contexts(seed)
    law, _ = law_of_block(p_and_q)
    assert error_against_target(law, p_and_q) < 1e-12


def no_clamp(tokens, draft, target):
    chance, weight = verify.block_acceptance(tokens, draft, target)
    return chance, weight * 1.2


def wrong_q(tokens, draft, target):
    return verify.block_acceptance(tokens, draft.roll(1, dims=-1), target)


BROKEN = {
    "first failure instead of longest block": {"first_failure": True},
    "residual of the token rule": {"residual_weight": False},
    "weight above one": {"acceptance": no_clamp},
    "q of the wrong node": {"acceptance": wrong_q},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_variants_are_caught(name):
    p_and_q = contexts(1)
    law, _ = law_of_block(p_and_q, **BROKEN[name])
    assert error_against_target(law, p_and_q) > 1e-4


def mean_accepted(p, q, gamma, rule):
    """Expected number of drafts kept when p and q do not depend on the text."""
    total = 0.0
    for drafts in itertools.product(range(len(p)), repeat=gamma):
        tokens = torch.tensor([drafts])
        drawn = q[tokens[0]].prod().item()
        draft_probs, target_probs = q.expand(1, gamma, -1), p.expand(1, gamma + 1, -1)
        if rule == "token":
            kept = verify.token_acceptance(tokens, draft_probs, target_probs)[0].cumprod(0).sum().item()
        else:
            chance = verify.block_acceptance(tokens, draft_probs, target_probs)[0][0].tolist()
            kept, open_share = 0.0, 1.0
            for k in range(gamma, 0, -1):
                kept += k * open_share * chance[k]
                open_share *= 1 - chance[k]
        total += drawn * kept
    return total


def test_the_example_of_the_paper():
    p, q = torch.tensor([[1 / 3, 2 / 3], [2 / 3, 1 / 3]], dtype=torch.float64)
    assert mean_accepted(p, q, 2, "token") == pytest.approx(10 / 9, abs=1e-12)
    assert mean_accepted(p, q, 2, "block") == pytest.approx(11 / 9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_never_below_the_token_rule(seed, gamma):
    p, q = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3 + 1e-9
    p, q = p / p.sum(), q / q.sum()
    assert mean_accepted(p, q, gamma, "block") >= mean_accepted(p, q, gamma, "token") - 1e-12


def test_verify_block_draws_what_the_rule_says():
    """False alarm: 1e-6 a test."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 1, 4, 5, generator=generator, dtype=torch.float64).softmax(-1) ** 2
    p, q = p / p.sum(-1, keepdim=True), (q / q.sum(-1, keepdim=True))[:, :3]
    tokens = torch.tensor([[1, 2, 0]])
    chance, weight = verify.block_acceptance(tokens, q, p)
    expected, open_share = torch.zeros(4, 5, dtype=torch.float64), 1.0
    for k in range(3, -1, -1):
        share = open_share * (chance[0, k].item() if k else 1.0)
        open_share -= share
        left = p[0, 3] if k == 3 else (weight[0, k] * p[0, k] - q[0, k]).clamp(min=0)
        expected[k] = share * left / left.sum()
    draws = 20000
    many = [each.expand(draws, *each.shape[1:]) for each in (tokens, q, p)]
    verified = verify.verify_block(*many, generator)
    counts = torch.zeros(4, 5, dtype=torch.float64)
    counts.index_put_(
        (verified.num_accepted, verified.next_token), torch.ones(draws, dtype=torch.float64), accumulate=True
    )
    seen, wanted = counts.flatten(), expected.flatten() * draws
    assert seen[wanted < 1e-9].sum() == 0
    assert chisquare(seen[wanted > 1e-9], wanted[wanted > 1e-9]).pvalue > 1e-6


@pytest.mark.parametrize("num", range(4))
def test_rows_that_drafted_less(num):
    """A row with `num` drafts padded to 3 is the row with `num` drafts."""
    generator = torch.Generator().manual_seed(1)
    p = torch.rand(1, 4, 5, generator=generator, dtype=torch.float64).softmax(-1)
    q = torch.rand(1, 3, 5, generator=generator, dtype=torch.float64).softmax(-1)
    tokens = torch.tensor([[1, 2, 0]])
    short, _ = verify.block_acceptance(tokens[:, :num], q[:, :num], p[:, : num + 1])
    padded, _ = verify.block_acceptance(tokens, q, p, torch.tensor([num]))
    torch.testing.assert_close(padded[:, : num + 1], short)
    for seed in range(30):
        verified = verify.verify_block(tokens, q, p, torch.Generator().manual_seed(seed), torch.tensor([num]))
        assert verified.num_accepted.item() <= num


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([torch.float32, torch.float64]))
def test_no_nan_and_no_impossible_token(seed, dtype):
    """Logits of bf16 with masks of -inf, ties and single tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(2, 3, 5, 7, generator=generator) * 30).bfloat16().to(dtype)
    logits[0].masked_fill_(torch.rand(3, 5, 7, generator=generator) < 0.5, float("-inf"))
    logits[..., 0] = 0.0
    p, q = logits.softmax(-1)
    q = q[:, :4]
    tokens = torch.multinomial(q.reshape(-1, 7), 1, generator=generator).reshape(3, 4)
    verified = verify.verify_block(tokens, q, p, generator)
    for b in range(3):
        n = int(verified.num_accepted[b])
        assert all(p[b, i, tokens[b, i]] > 0 for i in range(n))
        assert p[b, n, verified.next_token[b]] > 0


def test_equal_distributions_keep_everything():
    p = torch.rand(1, 5, 6, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tokens = torch.randint(0, 6, (1, 4))
    for seed in range(50):
        verified = verify.verify_block(tokens, p[:, :4], p, torch.Generator().manual_seed(seed))
        assert verified.num_accepted.item() == 4
