"""What the acceptance rate alpha and the cost coefficient c promise, under the usual assumption that each draft token is
accepted with the same probability, independently. Leviathan et al. 2022 (arXiv 2211.17192), sections 3.1 and 3.3.

alpha: acceptance rate, 0 to 1. gamma: draft tokens a round. c: time of a draft step over time of a target step.
"""

from collections.abc import Callable, Mapping


def expected_tokens(alpha: float, gamma: float) -> float:
    """Tokens per target pass: (1 - alpha^(gamma + 1)) / (1 - alpha), between 1 and gamma + 1 (equation 1)."""
    _check(alpha, gamma)
    if alpha == 1:
        return gamma + 1
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speedup(alpha: float, gamma: float, cost_coefficient: float, width_cost: float = 1.0) -> float:
    """Expected tokens over the cost of a round in target steps (theorem 3.8).

    `width_cost` is the time of a target pass over gamma + 1 positions over that of one position. The paper takes 1;
    on a CPU it is more.
    """
    if cost_coefficient < 0 or width_cost <= 0:
        raise ValueError(f"cost_coefficient={cost_coefficient}, width_cost={width_cost}: costs are positive")
    return expected_tokens(alpha, gamma) / (gamma * cost_coefficient + width_cost)


def speedup_of_rounds(
    alpha: float,
    rounds: Mapping[int, int],
    cost_coefficient: float,
    width_cost: Callable[[int], float] = lambda gamma: 1.0,
) -> float:
    """The same over rounds that draft different numbers. `rounds`: how many have each gamma; `width_cost`: of a gamma."""
    tokens = sum(count * expected_tokens(alpha, gamma) for gamma, count in rounds.items())
    return tokens / sum(count * (gamma * cost_coefficient + width_cost(gamma)) for gamma, count in rounds.items())


def best_gamma(alpha: float, cost_coefficient: float, max_gamma: int = 64) -> int:
    """The gamma from 0 to `max_gamma` with the highest speed-up; the smallest of equals."""
    return max(range(max_gamma + 1), key=lambda gamma: (speedup(alpha, gamma, cost_coefficient), -gamma))


def _check(alpha: float, gamma: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha}: an acceptance rate is between 0 and 1")
    if gamma < 0:
        raise ValueError(f"gamma={gamma}: the number of draft tokens is 0 or more")
