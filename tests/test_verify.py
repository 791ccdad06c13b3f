"""The accept rules: exact laws by enumeration, and rules broken on purpose that the same tests must catch."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from specplug import verify

V = 4
GAMMA = 3


def contexts(seed: int) -> dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]]:
    """p and q, float64, for every text of up to GAMMA tokens: both depend on the whole text."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for length in range(GAMMA + 1):
        for text in itertools.product(range(V), repeat=length):
            p, q = torch.rand(2, V, generator=generator, dtype=torch.float64) ** 2
            p[torch.randint(V, (1,), generator=generator)] = 0  # some tokens the target never says
            made[text] = (p / p.sum(), q / q.sum())
    return made


def complete(p_and_q, law: dict[tuple[int, ...], float], text: tuple[int, ...], weight: float) -> None:
    """Tokens that a round leaves open come from p, as later rounds draw them if the rule is right for shorter texts."""
    if len(text) == GAMMA + 1:
        law[text] = law.get(text, 0.0) + weight
        return
    for token, probability in enumerate(p_and_q[text][0].tolist()):
        if probability:
            complete(p_and_q, law, (*text, token), weight * probability)


def law_of_round(p_and_q, acceptance=None, residual=None, drawn_from=None) -> dict[tuple[int, ...], float]:
    """Exact law of the first GAMMA + 1 tokens when a text is made by rounds of the token rule.

    Every draft sequence is weighed by its probability and every coin by its chance; nothing is sampled.
    """
    acceptance = acceptance or verify.token_acceptance
    residual = residual or verify.residual
    law: dict[tuple[int, ...], float] = {}

    for drafts in itertools.product(range(V), repeat=GAMMA):
        prefixes = [drafts[:i] for i in range(GAMMA)]
        source = drawn_from or (lambda prefix: p_and_q[prefix][1])
        weight = 1.0
        for prefix, token in zip(prefixes, drafts, strict=True):
            weight *= source(prefix)[token].item()
        tokens = torch.tensor([drafts])
        draft_probs = torch.stack([p_and_q[prefix][1] for prefix in prefixes])[None]  # (1, G, V)
        target_probs = torch.stack([p_and_q[drafts[:i]][0] for i in range(GAMMA + 1)])[None]  # (1, G + 1, V)
        keep = acceptance(tokens, draft_probs, target_probs)[0].tolist()
        recovered = residual(tokens, draft_probs, target_probs)[0]
        for i in range(GAMMA):
            for token in range(V):
                chance = weight * (1 - keep[i]) * recovered[i, token].item()
                if chance:
                    complete(p_and_q, law, (*drafts[:i], token), chance)
            weight *= keep[i]
        complete(p_and_q, law, drafts, weight)
    return law


def error_against_target(law, p_and_q) -> float:
    worst = 0.0
    for text in itertools.product(range(V), repeat=GAMMA + 1):
        exact = 1.0
        for i, token in enumerate(text):
            exact *= p_and_q[text[:i]][0][token].item()
        worst = max(worst, abs(law.get(text, 0.0) - exact))
    return worst


@pytest.mark.parametrize("seed", range(3))
def test_token_rule_has_the_law_of_the_target(seed):
    p_and_q = contexts(seed)
    assert error_against_target(law_of_round(p_and_q), p_and_q) < 1e-12


def test_drafts_that_were_not_drawn_have_the_law_of_the_target():
    p_and_q = contexts(5)
    fixed = {text: int(q.argmax()) for text, (_, q) in p_and_q.items()}
    law = law_of_round(
        p_and_q,
        acceptance=lambda tokens, _, target: verify.token_acceptance(tokens, None, target),
        residual=lambda tokens, _, target: verify.residual(tokens, None, target),
        drawn_from=lambda prefix: torch.nn.functional.one_hot(torch.tensor(fixed[prefix]), V).double(),
    )
    assert error_against_target(law, p_and_q) < 1e-12


def no_clamp(tokens, draft, target):
    left = (target[:, : tokens.shape[1]] - draft).abs()
    return left / left.sum(-1, keepdim=True)


def only_drafted_token(tokens, draft, target):
    """As if q were zero but at the drafted token, though it was drawn from all of q."""
    q = torch.zeros_like(draft).scatter(-1, tokens[..., None], draft.gather(-1, tokens[..., None]))
    left = (target[:, : tokens.shape[1]] - q).clamp(min=0)
    return left / left.sum(-1, keepdim=True)


def accept_if_larger(tokens, draft, target):
    p = target[:, : tokens.shape[1]].gather(-1, tokens[..., None]).squeeze(-1)
    return (p > draft.gather(-1, tokens[..., None]).squeeze(-1)).to(p)


BROKEN = {
    "residual without clamping": {"residual": no_clamp},
    "residual with the drafted token alone": {"residual": only_drafted_token},
    "residual is p": {"residual": lambda tokens, draft, target: target[:, : tokens.shape[1]]},
    "accept on p > q": {"acceptance": accept_if_larger},
    "q that was not drawn from": {"drawn_from": lambda prefix: torch.full((V,), 1 / V, dtype=torch.float64)},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rules_are_caught(name):
    p_and_q = contexts(0)
    assert error_against_target(law_of_round(p_and_q, **BROKEN[name]), p_and_q) > 1e-4


def test_acceptance_of_the_known_example():
    p, q = torch.tensor([[0.5, 0.25, 0.15, 0.10], [0.3, 0.4, 0.2, 0.1]], dtype=torch.float64)
    each = verify.token_acceptance(torch.arange(4)[:, None], q.expand(4, 1, 4), p.expand(4, 1, 4))[:, 0]
    assert torch.dot(q, each).item() == pytest.approx(0.8, abs=1e-12)
    assert torch.minimum(p, q).sum().item() == pytest.approx(0.8, abs=1e-12)


def test_verify_token_draws_what_acceptance_and_residual_say():
    """Chi-square over (num_accepted, next_token), 20,000 rows. False alarm below 1e-6."""
    p, q = torch.tensor([[0.5, 0.25, 0.15, 0.10], [0.3, 0.4, 0.2, 0.1]], dtype=torch.float64)
    rows, draft = 20_000, 1  # the draft token 1 is kept with .25 / .4
    generator = torch.Generator().manual_seed(0)
    verified = verify.verify_token(
        torch.full((rows, 2), draft), q.expand(rows, 2, 4), p.expand(rows, 3, 4), generator=generator
    )
    keep, left = 0.25 / 0.4, (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
    expected = torch.stack([(1 - keep) * left, keep * (1 - keep) * left, keep**2 * p]).flatten()
    seen = torch.bincount(verified.num_accepted * 4 + verified.next_token, minlength=12).double()
    possible = expected > 0
    assert seen[~possible].sum() == 0
    assert chisquare(seen[possible], expected[possible] * rows).pvalue > 1e-6


def test_rows_of_a_batch_are_independent_and_end_at_the_first_rejection():
    p = torch.zeros(2, 4, V, dtype=torch.float64)
    p[0, :, 1] = 1  # row 0 keeps drafts of 1
    p[1, :, 2] = 1  # row 1 keeps none of them, and says 2
    q = torch.full((2, 3, V), 0.25, dtype=torch.float64)
    verified = verify.verify_token(torch.ones(2, 3, dtype=torch.long), q, p)
    assert verified.num_accepted.tolist() == [3, 0]
    assert verified.next_token.tolist() == [1, 2]


def test_a_later_match_does_not_count_after_a_rejection():
    p = torch.zeros(1, 4, V, dtype=torch.float64)
    p[0, [0, 1, 2, 3], [1, 3, 1, 0]] = 1
    q = torch.full((1, 3, V), 0.25, dtype=torch.float64)
    assert verify.verify_token(torch.tensor([[1, 1, 1]]), q, p)[:2] == (torch.tensor([1]), torch.tensor([3]))
    greedy = verify.verify_greedy(torch.tensor([[1, 1, 1]]), p)
    assert (greedy.num_accepted.item(), greedy.next_token.item()) == (1, 3)


def test_no_drafts_is_plain_sampling():
    p = torch.tensor([[[0.0, 0.0, 1.0, 0.0]]])
    verified = verify.verify_token(torch.empty(1, 0, dtype=torch.long), torch.empty(1, 0, 4), p)
    assert (verified.num_accepted.item(), verified.next_token.item()) == (0, 2)


def test_empty_residual_falls_back_to_the_target():
    """p and q one rounding apart, and the coin says reject: max(0, p - q) may be all zero."""
    p = torch.tensor([0.25, 0.25, 0.25, 0.25])
    q = torch.nextafter(p, torch.ones(4))
    assert torch.equal(verify.residual(torch.tensor([[0]]), q[None, None], p[None, None])[0, 0], p)
    only = torch.tensor([0.0, 1.0, 0.0, 0.0])
    assert torch.equal(verify.residual(torch.tensor([[1]]), None, only[None, None])[0, 0], only)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([torch.float32, torch.float64]))
def test_no_nan_and_no_impossible_token(seed, dtype):
    """Extreme logits, masks, ties and single-token support, from bf16 logits too."""
    generator = torch.Generator().manual_seed(seed)

    def distribution(*shape: int) -> torch.Tensor:
        logits = torch.randn(*shape, 6, generator=generator) * 10 ** torch.randint(0, 4, (1,), generator=generator)
        logits = logits.bfloat16().to(dtype)
        masked = torch.rand(*shape, 6, generator=generator) < 0.4
        masked[..., 0] &= ~masked.all(-1)
        return logits.masked_fill(masked, float("-inf")).softmax(-1)

    p, q = distribution(3, 5), distribution(3, 4)
    drafts = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(3, 4)
    verified = verify.verify_token(drafts, q, p, generator=generator)
    left = verify.residual(drafts, q, p)
    assert torch.isfinite(left).all() and torch.allclose(left.sum(-1), torch.ones((), dtype=dtype), atol=1e-5)
    for row in range(3):
        kept = verified.num_accepted[row].item()
        assert all(p[row, i, drafts[row, i]] > 0 for i in range(kept))
        assert p[row, kept, verified.next_token[row]] > 0


def test_greedy_rule():
    scores = torch.zeros(2, 3, V)
    scores[:, 0, 1] = scores[:, 1, 2] = scores[:, 2, 3] = 1.0
    verified = verify.verify_greedy(torch.tensor([[1, 2], [1, 0]]), scores)
    assert verified.num_accepted.tolist() == [2, 1]
    assert verified.next_token.tolist() == [3, 2]


def test_drafts_are_drawn_from_their_distribution():
    """Chi-square over 20,000 draws, a token of probability 0 among them. False alarm below 1e-6."""
    torch.manual_seed(0)
    probs = torch.tensor([0.5, 0.25, 0.0, 0.15, 0.10])
    seen = torch.bincount(verify.sample_by_inversion(probs.expand(20_000, 5)), minlength=5).double()
    assert seen[2] == 0
    possible = probs > 0
    assert chisquare(seen[possible], probs[possible].double() / probs[possible].double().sum() * 20_000).pvalue > 1e-6


def test_the_ends_of_the_distribution(monkeypatch):
    """The least and the largest random number find tokens of a probability above 0; of a nan it is told that nothing could be drawn."""
    nan, inf, least = float("nan"), float("inf"), torch.finfo(torch.float32).tiny
    good = [
        [0.0, 0.3, 0.0, 0.7, 0.0],
        [0.0, 0.0, 1.0, 0.0, 0.0],
        [0.0, least, 0.0, least, 0.0],
        [0.0, 1.1, 0.0, 2.9, 0.0],
    ]
    bad = [[nan] * 5, [0.0] * 5, [0.5, inf, 0.0, 0.0, 0.0], [0.5, 0.0, nan, 0.5, 0.0], [0.5, 0.5, 0.0, 0.0, nan]]
    probs = torch.tensor(good + bad)
    for number, expected in ((0.0, [1, 2, 1, 1]), (1 - 2**-53, [3, 2, 3, 3])):
        monkeypatch.setattr(
            verify.torch, "rand", lambda *args, n=number, **kwargs: torch.full((len(probs), 1), n, dtype=torch.float64)
        )
        tokens = verify.sample_by_inversion(probs).tolist()
        assert tokens == [*expected, *[-1] * len(bad)]
    with pytest.raises(RuntimeError, match="nan"):
        verify.checked(tokens)


def test_rows_that_drafted_less():
    """Behind a row's last draft nothing is tested: its bonus token has the target's own distribution there."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(1, 4, 5, generator=generator, dtype=torch.float64).softmax(-1)
    q = torch.rand(1, 3, 5, generator=generator, dtype=torch.float64).softmax(-1)
    num_drafts = torch.tensor([0])
    counts = torch.zeros(5, dtype=torch.float64)
    for _ in range(3000):
        verified = verify.verify_token(torch.tensor([[1, 2, 0]]), q, p, generator, num_drafts)
        assert verified.num_accepted.item() == 0
        counts[verified.next_token] += 1
    assert chisquare(counts, p[0, 0] * 3000).pvalue > 1e-6  # false alarm: 1e-6
    scores = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4, 0]]), 5)
    drafts = torch.tensor([[3, 1, 4]])
    for k in range(4):
        verified = verify.verify_greedy(drafts, scores, torch.tensor([k]))
        assert verified.num_accepted.item() == k and verified.next_token.item() == [3, 1, 4, 0][k]


@pytest.mark.parametrize("dropped", [(), (0, 1, 2, 3), (2,), (2, 3)])
def test_a_draft_may_be_dropped_before_it_is_drawn_but_not_for_what_it_is(dropped):
    """All or none of the tokens dropped is a decision that the draw has no part in; some of them is one that it has."""
    p, q = (torch.tensor([each], dtype=torch.float64) for each in ([[0.4, 0.3, 0.2, 0.1]], [[0.1, 0.2, 0.3, 0.4]]))
    law = torch.zeros(4, dtype=torch.float64)
    for token in range(4):
        chance = q[0, 0, token]
        if token in dropped:
            law += chance * p[0, 0]
            continue
        draft = torch.tensor([[token]])
        kept = verify.token_acceptance(draft, q, p)[0, 0]
        law[token] += chance * kept
        law += chance * (1 - kept) * verify.residual(draft, q, p)[0, 0]
    right = (law - p[0, 0]).abs().max().item() < 1e-12
    assert right == (len(dropped) in (0, 4))


def test_unread_draws_are_those_of_transformers():
    """The same tokens from the same state of the stream, and the stream ends in the same place."""
    for seed in range(50):
        probs = torch.softmax(torch.randn((3, 40), generator=torch.Generator().manual_seed(seed)) * 2, -1)
        torch.manual_seed(seed)
        expected, state = verify.sample(probs), torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(verify.sample_unread(probs), expected) and torch.equal(torch.get_rng_state(), state)
    broken = torch.tensor([[0.0, 0.0], [0.5, float("nan")], [0.0, 1.0]])
    assert verify.sample_unread(broken).tolist() == [-1, -1, 1]
