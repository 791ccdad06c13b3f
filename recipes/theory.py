"""What theory promises for an acceptance rate and a cost.

specplug recipe=theory recipe.alpha=0.8 recipe.gamma=4 recipe.cost_coefficient=0.05

Prints a table over gamma to stderr, and one line of JSON: expected tokens per target pass, speed-up, best gamma.
Reads no model.
"""

import json
from pathlib import Path

from rich.table import Table

from specplug import theory
from specplug.config import Config, Theory
from specplug.console import console


def run(config: Config, folder: Path) -> int:
    recipe = config.recipe
    assert isinstance(recipe, Theory)
    alpha, c = recipe.alpha, recipe.cost_coefficient
    best = theory.best_gamma(alpha, c, recipe.max_gamma)
    table = Table("gamma", "tokens per target pass", "speed-up", title=f"alpha {alpha}, draft step / target step {c}")
    for gamma in range(recipe.max_gamma + 1):
        row = (str(gamma), f"{theory.expected_tokens(alpha, gamma):.3f}", f"{theory.speedup(alpha, gamma, c):.3f}")
        table.add_row(*row, style="bold" if gamma == best else None)
    console.print(table)
    result = {
        "alpha": alpha,
        "gamma": recipe.gamma,
        "cost_coefficient": c,
        "expected_tokens": theory.expected_tokens(alpha, recipe.gamma),
        "speedup": theory.speedup(alpha, recipe.gamma, c),
        "best_gamma": best,
        "best_speedup": theory.speedup(alpha, best, c),
    }
    print(json.dumps(result))
    return 0
