"""The two formulas, against known values and against a simulation of what they describe."""

import random

import pytest

from specplug import theory


def test_the_known_example():
    assert theory.expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert theory.speedup(0.8, 4, 0.05) == pytest.approx(2.80, abs=0.005)


@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_the_ends(gamma):
    assert theory.expected_tokens(1.0, gamma) == gamma + 1
    assert theory.expected_tokens(0.0, gamma) == 1
    assert theory.speedup(0.5, 0, 0.3) == 1


def test_expected_tokens_is_what_rounds_give():
    """100,000 simulated rounds; the mean is within 6 standard errors, false alarm below 1e-8."""
    rng, alpha, gamma, rounds = random.Random(0), 0.7, 3, 100_000
    total = 0
    for _ in range(rounds):
        kept = 0
        while kept < gamma and rng.random() < alpha:
            kept += 1
        total += kept + 1
    assert total / rounds == pytest.approx(theory.expected_tokens(alpha, gamma), abs=6 * 2 / rounds**0.5)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("cost", [0.0, 0.05, 0.5, 2.0])
def test_best_gamma_is_the_best(alpha, cost):
    best = theory.best_gamma(alpha, cost, max_gamma=20)
    assert all(theory.speedup(alpha, best, cost) >= theory.speedup(alpha, gamma, cost) for gamma in range(21))


def test_a_draft_that_costs_more_than_it_saves_is_not_used():
    assert theory.best_gamma(0.3, 0.5) == 0


def test_the_cost_of_a_wider_pass_counts():
    assert theory.speedup(0.8, 4, 0.05, width_cost=2.0) == pytest.approx(3.3616 / 2.2)


@pytest.mark.parametrize("alpha, gamma, cost", [(-0.1, 4, 0.1), (1.1, 4, 0.1), (0.5, -1, 0.1), (0.5, 4, -0.1)])
def test_values_out_of_range(alpha, gamma, cost):
    with pytest.raises(ValueError, match=r"alpha|gamma|cost"):
        theory.speedup(alpha, gamma, cost)
