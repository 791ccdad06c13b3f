"""From the files of a run folder to its figures: what summary.json holds, and reports and comparisons are made of."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from specplug import scores, theory
from specplug.rates import SIDES, Sample, by_length, interval, median_ratio, rate, speedup, stats_of
from specplug.runs import each_sample, read_samples
from specplug.stats import Stats

VERDICTS = ("identical", "tie", "mismatch", "not_compared")


class RunFiles(NamedTuple):
    """What an evaluation left in its folder, and the summary of it."""

    config: dict[str, Any]
    samples: list[Sample]
    traces: list[dict[str, Any]]
    summary: dict[str, Any]


def read_run(folder: Path, bootstrap: int | None = None) -> RunFiles:
    """Read config.json, environment.json, costs.json, samples.jsonl and trace.jsonl. Raises OSError, ValueError, KeyError."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    samples, errors, texts = slim_samples(folder, keep_texts=config["dataset"].get("metric") in ("bleu", "chrf"))
    costs = json.loads((folder / "costs.json").read_text(encoding="utf-8"))
    bootstrap = config["recipe"]["bootstrap"] if bootstrap is None else bootstrap
    summary = summarize(samples, costs, bootstrap, config["seed"])
    summary["task_score"] |= {"metric": config["dataset"].get("metric")} | corpus(config, texts)
    summary["errors"] = errors
    summary["environment"] = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    summary["folder"] = str(folder)
    return RunFiles(config, samples, read_samples(folder / "trace.jsonl"), summary)


def slim_samples(folder: Path, keep_texts: bool) -> tuple[list[Sample], list[dict[str, Any]], list[Sample]]:
    """Samples without texts and token ids, which are most of a run; errors; and, where asked for, texts with references.

    By id, whatever has happened to the file: a prompt counts once, and by what was written of it last.
    """
    samples: dict[str, Sample] = {}
    errors: dict[str, dict[str, Any]] = {}
    texts: dict[str, Sample] = {}
    for sample in each_sample(folder / "samples.jsonl"):
        if "error" in sample:
            errors[sample["id"]] = {"id": sample["id"], "reason": sample["error"]}
            continue
        errors.pop(sample["id"], None)
        if keep_texts and sample["score"] is not None:
            said = {side: sample[side]["text"] for side in scores.SIDES.values()}
            texts[sample["id"]] = said | {"references": sample["references"]}
        for side in SIDES:
            for name in ("text", "token_ids") if sample[side] else ():
                sample[side].pop(name, None)
        sample.pop("references", None)
        samples[sample["id"]] = sample
    return list(samples.values()), list(errors.values()), list(texts.values())


def corpus(config: dict[str, Any], texts: list[Sample]) -> dict[str, Any]:
    """BLEU and chrF of all answers together, as papers give them; nothing for other metrics, or without the library."""
    if not texts:
        return {}
    try:
        import sacrebleu  # noqa: F401
    except ImportError:  # a report of a run that was made elsewhere
        return {}
    from specplug.config import Metric
    from specplug.metrics.overlap import corpus_score

    metric, expected = Metric[config["dataset"]["metric"]], [each["references"] for each in texts]
    sides = scores.SIDES.items()
    return {"corpus": {name: corpus_score(metric, [each[side] for each in texts], expected) for name, side in sides}}


def summarize(samples: list[Sample], costs: dict[str, Any], bootstrap: int, seed: int) -> dict[str, Any]:
    """Figures over all samples, and the same per category under `categories`."""
    categories = list(dict.fromkeys(sample["category"] for sample in samples))
    summary = figures(samples, costs, bootstrap, seed)
    summary["errors"] = []
    summary["lengths"] = by_length(samples)
    summary["categories"] = {
        name: figures([s for s in samples if s["category"] == name], costs, bootstrap, seed) for name in categories
    }
    return summary


def figures(samples: list[Sample], costs: dict[str, Any], bootstrap: int, seed: int) -> dict[str, Any]:
    stats = stats_of(samples)
    predicted, with_width = predictions(stats, costs)
    exactness = Counter(sample["exactness"]["kind"] for sample in samples)
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
        "alpha": stats.alpha,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_histogram": stats.acceptance_histogram,
        "acceptance_by_position": stats.acceptance_by_position,
        "num_new_tokens": stats.num_new_tokens,
        "num_rounds": stats.num_rounds,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted": stats.num_accepted,
        "num_tested": stats.num_tested,
        "mean_gamma": stats.mean_gamma or 0.0,
        "members": members(samples),
        "drafted_histogram": {str(gamma): rounds for gamma, rounds in sorted(stats.drafted.items())},
        "cost_coefficient": costs["cost_coefficient"],
        "width_cost": costs["width_cost"],
        "width_cost_gamma": costs.get("gamma"),
        "predicted_speedup": predicted,
        "predicted_speedup_with_width": with_width,
        "overhead": stats.overhead,
        "seconds_capture": stats.seconds_capture,
        "replayed": stats.replayed,
        "not_replayed": dict(stats.not_replayed),
        "seconds_per_round": seconds_per_round(stats),
        "exactness": {kind: exactness[kind] for kind in VERDICTS},
        "mismatches": [sample["id"] for sample in samples if sample["exactness"]["kind"] == "mismatch"],
        "task_score": scores.task_score(samples, bootstrap, seed),
    }


def predictions(stats: Stats, costs: dict[str, Any]) -> tuple[float | None, float | None]:
    """The speed-up that theory makes of the acceptance and the rounds that there were: as the paper has it, and with the cost of wider
    passes, which is taken to grow evenly from that of one position to that which was measured."""
    if stats.alpha is None:
        return None, None
    measured, wide = costs.get("gamma"), costs["width_cost"]
    narrow = wide if not measured else costs["seconds_target_step"] / costs["seconds_plain_step"]
    nodes = (stats.mean_gamma or 0.0) / (stats.mean_depth or 1.0)  # drafted for each level of a tree; of a chain one

    def width_cost(depth: int) -> float:
        return float(narrow + (wide - narrow) * nodes * depth / (measured or 1))

    given = stats.alpha, stats.drafted, costs["cost_coefficient"]
    return theory.speedup_of_rounds(*given), theory.speedup_of_rounds(*given, width_cost)


def seconds_per_round(stats: Stats) -> dict[str, float] | None:
    """Forward passes of the two models and what is left, in the mean; None where no time was taken."""
    if not stats.num_rounds or not stats.seconds_rounds:
        return None
    parts = {"target": stats.seconds_target, "draft": stats.seconds_draft_forward, "other": stats.seconds_other}
    return {name: seconds / stats.num_rounds for name, seconds in parts.items()}


def members(samples: list[Sample]) -> dict[str, dict[str, int]]:
    """Of a chain's members: proposals made, drafts in them, drafts kept."""
    total: dict[str, Counter[str]] = {}
    for sample in samples:
        for name, counts in sample["speculative"].get("members", {}).items():
            total.setdefault(name, Counter()).update(counts)
    return {name: {key: counts[key] for key in ("proposals", "drafts", "kept")} for name, counts in total.items()}
