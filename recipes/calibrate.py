"""What a pair promises on a data set: alpha and costs as measured here, and the gamma that theory takes from them.

specplug recipe=calibrate
specplug recipe=calibrate pair=smollm2 dataset=spec_bench dataset.path=question.jsonl recipe.limit=24

Answers `recipe.limit` prompts with `recipe.gamma` drafts a round, times a draft step and target passes of every width up to
`recipe.max_gamma` + 1, and prints for each gamma the speed-up by the paper's formula, where a wider pass costs no more, and
by the widths as measured. Writes calibration.json; the last line of stdout is JSON. Plain decoding is not run: for a
measured speed-up there is recipe=evaluate.
"""

import json
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from specplug import theory, tracker
from specplug.config import Calibrate, Config, ConfigError, Drafter
from specplug.console import Bar, console
from specplug.data import load_rows
from specplug.pipelines import generate_arguments, length_filter, pipeline_from
from specplug.recipes.evaluate import encode
from specplug.round_costs import RoundCosts, check_room, measure_rounds
from specplug.runs import begin, environment_of, write_json
from specplug.schedule import FixedSchedule
from specplug.stats import Stats


def run(config: Config, folder: Path) -> int:
    recipe = config.recipe
    assert isinstance(recipe, Calibrate)
    if config.draft.drafter is Drafter.none:
        raise ConfigError("draft=none: there is nothing to calibrate; name a draft, or draft=lookup")
    tracker.check_installed(config)
    rows = load_rows(config.dataset, recipe.limit, tokenizer=length_filter(config))
    pipe, plugin = pipeline_from(config)
    check_room(pipe.model, plugin.drafter, [recipe.max_gamma], f"recipe.max_gamma={recipe.max_gamma}")
    plugin.schedule = FixedSchedule(recipe.gamma)
    prompts = [encode(pipe.tokenizer, row, config, pipe.model) for row in rows]
    begin(folder, config, environment_of(pipe.model))
    model: Any = pipe.model
    bar = Bar("calibrate").start(len(prompts), 0)
    try:
        for number, ids in enumerate(prompts):
            torch.manual_seed(config.seed + number)
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **generate_arguments(config))
            bar.advance(number + 1)
    except KeyboardInterrupt:
        console.print(f"interrupted: what follows is by {plugin.stats.num_calls} of {len(prompts)} prompts")
        if not plugin.stats.num_calls:
            return 130
    finally:
        bar.stop()
    if plugin.stats.alpha is None:
        raise ConfigError(
            f"draft: {plugin.drafter.name} proposed nothing on these prompts, so there is no alpha to measure"
        )
    gammas = range(recipe.max_gamma + 1)
    costs = measure_rounds(pipe.model, plugin.drafter, prompts[0], gammas, plugin.kernel, plugin.graph, recipe.repeats)
    result = calibration(plugin.stats, costs, recipe.gamma)
    write_json(folder / "calibration.json", result)
    tracking = tracker.start(config, folder)
    tracking.log(result["num_calls"], {"calibration": result})
    tracking.finish()
    show(result)
    print(json.dumps(result))
    return 0


def calibration(stats: Stats, costs: RoundCosts, measured_gamma: int) -> dict[str, Any]:
    """Everything from counts and seconds. `measured_gamma`: with which the counts were made.

    The unit of all costs is a step of plain decoding. A lookup's step is one proposal, whatever its length, and not every round has
    one.
    """
    step = costs.plain_step
    alpha = stats.alpha or 0.0
    proposing = 1 - stats.drafted[0] / max(stats.num_rounds, 1)
    by_gamma = []
    for gamma in sorted(costs.target):
        tokens = theory.expected_tokens(alpha, gamma)
        drafting = costs.drafting(gamma)
        seconds = proposing * costs.seconds(gamma) + (1 - proposing) * (costs.target[0] + drafting)
        of_paper = proposing * (drafting / step + 1) + (1 - proposing) * (1 + drafting / step)
        mean_tokens = proposing * tokens + (1 - proposing)
        by_gamma.append(
            {
                "gamma": gamma,
                "expected_tokens": mean_tokens,
                "width_cost": costs.width_cost(gamma),
                "speedup_of_paper": mean_tokens / of_paper,
                "speedup": mean_tokens * step / seconds,
            }
        )
    best = max(by_gamma, key=lambda each: each["speedup"])
    return {
        "alpha": alpha,
        "acceptance_by_position": stats.acceptance_by_position,
        "rounds_with_drafts": proposing,
        "cost_coefficient": costs.cost_coefficient(measured_gamma),
        "seconds_plain_step": step,
        "seconds_target_step": costs.target[0],
        "seconds_first_draft": costs.first_draft,
        "seconds_later_draft": costs.later_draft,
        "num_calls": stats.num_calls,
        "num_tested": stats.num_tested,
        "best_gamma": best["gamma"],
        "expected_speedup": best["speedup"],
        "by_gamma": by_gamma,
    }


def show(result: dict[str, Any]) -> None:
    title = f"alpha {result['alpha']:.3f} ({result['num_tested']} drafts tested), c {result['cost_coefficient']:.3f}"
    table = Table("gamma", "tokens per pass", "width cost", "speed-up of the paper", "speed-up", title=title)
    for each in result["by_gamma"]:
        cells = (f"{each[key]:.2f}" for key in ("expected_tokens", "width_cost", "speedup_of_paper", "speedup"))
        table.add_row(str(each["gamma"]), *cells, style="bold" if each["gamma"] == result["best_gamma"] else None)
    console.print(table)
    console.print(
        f"best gamma {result['best_gamma']}, expected speed-up {result['expected_speedup']:.2f}x in decoding;"
        " `width cost` is a pass over gamma + 1 positions over a step of plain decoding"
    )
