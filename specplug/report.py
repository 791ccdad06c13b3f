"""summary.json and report.md, always rebuilt from the files of a run folder."""

import json
import random
from collections import Counter
from functools import reduce
from operator import add
from pathlib import Path
from statistics import median
from typing import Any

from specplug import theory
from specplug.runs import read_samples, write_json
from specplug.stats import Stats

SIDES = ("plain", "assisted", "speculative")
VERDICTS = ("identical", "tie", "mismatch", "not_compared")
Sample = dict[str, Any]


def write_reports(folder: Path) -> dict[str, Any]:
    """Read config.json, environment.json, costs.json and samples.jsonl; write summary.json and report.md."""
    config = json.loads((folder / "config.json").read_text())
    summary = summarize(
        read_samples(folder / "samples.jsonl"),
        costs=json.loads((folder / "costs.json").read_text()),
        bootstrap=config["recipe"]["bootstrap"],
        seed=config["seed"],
    )
    summary["environment"] = json.loads((folder / "environment.json").read_text())
    summary["folder"] = str(folder)
    write_json(folder / "summary.json", summary)
    (folder / "report.md").write_text(markdown(summary, config), encoding="utf-8")
    return summary


def summarize(samples: list[Sample], costs: dict[str, Any], bootstrap: int, seed: int) -> dict[str, Any]:
    """Figures over all samples, and the same per category under `categories`."""
    categories = list(dict.fromkeys(sample["category"] for sample in samples))
    summary = figures(samples, costs, bootstrap, seed)
    summary["categories"] = {
        name: figures([s for s in samples if s["category"] == name], costs, bootstrap, seed) for name in categories
    }
    return summary


def figures(samples: list[Sample], costs: dict[str, Any], bootstrap: int, seed: int) -> dict[str, Any]:
    stats = reduce(add, (Stats.from_dict(sample["speculative"]["stats"]) for sample in samples), Stats())
    mean_gamma, alpha = stats.mean_gamma or 0.0, stats.alpha
    predicted = None if alpha is None else theory.speedup(alpha, mean_gamma, costs["cost_coefficient"])
    with_width = (
        None if alpha is None else theory.speedup(alpha, mean_gamma, costs["cost_coefficient"], costs["width_cost"])
    )
    exactness = Counter(sample["exactness"]["kind"] for sample in samples)
    scored = [sample["score"] for sample in samples if sample["score"] is not None]
    return {
        "num_samples": len(samples),
        "speedup": speedup(samples, "plain"),
        "speedup_interval": interval(samples, "plain", bootstrap, seed),
        "speedup_median": median_ratio(samples, "plain"),
        "speedup_decode": speedup(samples, "plain", decode=True),
        "speedup_vs_assisted": speedup(samples, "assisted"),
        "speedup_vs_assisted_interval": interval(samples, "assisted", bootstrap, seed),
        "tokens_per_second": {side: rate(samples, side) for side in SIDES},
        "tokens_per_second_decode": {side: rate(samples, side, decode=True) for side in SIDES},
        "alpha": alpha,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_histogram": stats.acceptance_histogram,
        "acceptance_by_position": stats.acceptance_by_position,
        "num_new_tokens": stats.num_new_tokens,
        "num_rounds": stats.num_rounds,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted": stats.num_accepted,
        "num_tested": stats.num_tested,
        "mean_gamma": mean_gamma,
        "drafted_histogram": {str(gamma): rounds for gamma, rounds in sorted(stats.drafted.items())},
        "cost_coefficient": costs["cost_coefficient"],
        "width_cost": costs["width_cost"],
        "predicted_speedup": predicted,
        "predicted_speedup_with_width": with_width,
        "overhead": stats.overhead,
        "exactness": {kind: exactness[kind] for kind in VERDICTS},
        "mismatches": [sample["id"] for sample in samples if sample["exactness"]["kind"] == "mismatch"],
        "task_score": {
            side: sum(score[side] for score in scored) / len(scored) if scored else None
            for side in ("baseline", "speculative")
        },
    }


def tokens_and_seconds(sample: Sample, side: str, decode: bool = False) -> tuple[int, float] | None:
    """`decode`: the tokens after the first, and the time they took."""
    measured = sample.get(side)
    if measured is None:
        return None
    if decode:
        return measured["new_tokens"] - 1, measured["seconds"] - measured["seconds_first"]
    return measured["new_tokens"], measured["seconds"]


def rate(samples: list[Sample], side: str, decode: bool = False) -> float | None:
    """All tokens over all seconds; None if the side was not measured on every sample."""
    pairs = [tokens_and_seconds(sample, side, decode) for sample in samples]
    known = [pair for pair in pairs if pair is not None]
    tokens, seconds = sum(t for t, _ in known), sum(s for _, s in known)
    return tokens / seconds if seconds > 0 and len(known) == len(pairs) else None


def speedup(samples: list[Sample], over: str, decode: bool = False) -> float | None:
    ours, theirs = rate(samples, "speculative", decode), rate(samples, over, decode)
    return ours / theirs if ours is not None and theirs else None


def median_ratio(samples: list[Sample], over: str) -> float | None:
    ratios = [r for r in (speedup([sample], over) for sample in samples) if r is not None]
    return median(ratios) if ratios else None


def interval(samples: list[Sample], over: str, bootstrap: int, seed: int) -> list[float] | None:
    """95 % percentile bootstrap over prompts of the ratio of totals."""
    rng = random.Random(seed)
    if len(samples) < 2 or not bootstrap or speedup(samples, over) is None:
        return None
    ratios = sorted(speedup(rng.choices(samples, k=len(samples)), over) or 0.0 for _ in range(bootstrap))
    return [ratios[int(0.025 * bootstrap)], ratios[min(int(0.975 * bootstrap), bootstrap - 1)]]


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def spread(interval: list[float] | None) -> str:
    return "" if interval is None else f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})"


def verdict(summary: dict[str, Any]) -> str:
    counts = summary["exactness"]
    if counts["not_compared"] == summary["num_samples"]:
        return "sampled, so not compared token by token"
    parts = [f"{counts[kind]} {kind}" for kind in ("identical", "tie", "mismatch")]
    return f"{', '.join(parts)} of {summary['num_samples']}"


def rows(summary: dict[str, Any]) -> list[list[str]]:
    """The table per category, with a last row for all; the header first. tok/s of the three sides, then ratios."""
    header = [
        "category",
        "n",
        "plain",
        "assisted",
        "ours",
        "speed-up",
        "vs assisted",
        "alpha",
        "tokens / pass",
        "identical",
    ]
    table = [[*header, "score plain / ours"]]
    for name, part in [*summary["categories"].items(), ("all", summary)]:
        speeds = [number(part["tokens_per_second"][side], 0) for side in SIDES]
        score = "/".join(number(part["task_score"][side]) for side in ("baseline", "speculative"))
        identical = "-" if part["exactness"]["not_compared"] else str(part["exactness"]["identical"])
        ratios = [number(part["speedup"], 2, "x"), number(part["speedup_vs_assisted"], 2, "x")]
        rates = [number(part["alpha"], 3), number(part["mean_acceptance_length"])]
        table.append([name, str(part["num_samples"]), *speeds, *ratios, *rates, identical, score])
    return table


def headline(summary: dict[str, Any]) -> list[str]:
    """The result in a few plain lines."""
    lines = [f"speed-up over plain generate: {number(summary['speedup'])}x{spread(summary['speedup_interval'])}"]
    if summary["speedup_vs_assisted"] is not None:
        lines.append(
            f"over transformers' assisted generation: {number(summary['speedup_vs_assisted'])}x"
            f"{spread(summary['speedup_vs_assisted_interval'])}"
        )
    lines.append(f"output: {verdict(summary)}")
    lines.append(
        f"alpha {number(summary['alpha'], 3)}, {number(summary['mean_acceptance_length'])} tokens per target pass, "
        f"a draft step costs {number(summary['cost_coefficient'], 3)} of a target step, "
        f"a target pass {number(summary['width_cost'])} of one"
    )
    drafted = {int(gamma): rounds for gamma, rounds in summary["drafted_histogram"].items()}
    if len(drafted) > 1 and summary["num_rounds"]:
        lines.append(
            f"drafts a round: {number(summary['mean_gamma'], 1)} in the mean, most often {max(drafted, key=drafted.__getitem__)}, "
            f"none in {100 * drafted.get(0, 0) / summary['num_rounds']:.0f} % of the rounds"
        )
    lines.append(
        f"predicted {number(summary['predicted_speedup'])}x by the formula, "
        f"{number(summary['predicted_speedup_with_width'])}x with the cost of the wider pass; "
        f"time outside both models' forward passes: {number(100 * (summary['overhead'] or 0), 1)} % of a round"
    )
    return lines


def markdown(summary: dict[str, Any], config: dict[str, Any]) -> str:
    environment = summary["environment"]
    header, *body = rows(summary)
    table = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *body]]
    target, draft = config["target"], config["draft"]
    sampling = ", ".join(f"{k} {v}" for k, v in config["sampling"].items() if v is not None)
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items() if v is not None)
    histogram = [f"| {k} | {count} |" for k, count in enumerate(summary["acceptance_histogram"])]
    positions = [f"| {k + 1} | {share:.3f} |" for k, share in enumerate(summary["acceptance_by_position"])]
    mismatches = [f"Mismatch in: {', '.join(summary['mismatches'])}.", ""] if summary["mismatches"] else []
    drafted_by = draft["name_or_path"] if draft["drafter"] == "model" else draft["drafter"]
    return "\n".join(
        [
            f"# {target['name_or_path']} with {drafted_by} on {config['dataset']['name']}",
            "",
            *(f"- {line}" for line in headline(summary)),
            "",
            *mismatches,
            *table,
            "",
            "`plain`, `assisted` and `ours` are tokens per second: all new tokens over all seconds of the calls, prompt",
            "included. The sides were run in turn on each prompt, in one process, after"
            f" {config['recipe']['warmup']} of warm-up that are left out.",
            f"Decoding alone, from the second token on: {number(summary['speedup_decode'])}x plain. Median of the ratios"
            f" per prompt: {number(summary['speedup_median'])}x.",
            "",
            "## Acceptance",
            "",
            "| drafts kept in a round | rounds |",
            "| --- | --- |",
            *histogram,
            "",
            "| drafts in a round | rounds |",
            "| --- | --- |",
            *(f"| {gamma} | {rounds} |" for gamma, rounds in summary["drafted_histogram"].items()),
            "",
            "| position of the draft | kept, of the rounds that made it |",
            "| --- | --- |",
            *positions,
            "",
            "## How it was measured",
            "",
            f"- device: {environment['device']}, {environment['dtype']}, batch 1, {environment['threads']} torch threads",
            f"- sampling: {sampling}; seed {config['seed']}",
            f"- versions: {versions}; Python {environment['python']}; commit {environment['commit']}",
            f"- memory: target {environment.get('bytes_target', 0) / 1e6:.1f} MB, draft"
            f" {environment.get('bytes_draft', 0) / 1e6:.1f} MB of weights",
            f"- command: `{' '.join(environment['command'])}`",
            "",
        ]
    )
