"""Task scores of both sides and whether they differ, from the samples of a run."""

from typing import Any

import numpy as np

Sample = dict[str, Any]
SIDES = {"baseline": "plain", "speculative": "speculative"}


def task_score(samples: list[Sample], bootstrap: int, seed: int) -> dict[str, Any]:
    """Means of both sides, their difference with a 95 % interval, and a verdict.

    Where all answers have the same token ids the scores are equal, whatever they are, and nothing has to be estimated. Else
    the interval is a paired percentile bootstrap over prompts: `differ` if it leaves out 0, `no difference shown` if not.
    """
    scored = [sample for sample in samples if sample.get("score") is not None]
    if not scored:
        empty = dict.fromkeys(("baseline", "speculative", "difference", "interval", "verdict"))
        return {**empty, "num_scored": 0}
    baseline, ours = (np.array([sample["score"][side] for sample in scored], dtype=float) for side in SIDES)
    interval = None
    identical = all(sample["exactness"]["kind"] == "identical" for sample in scored)
    if identical:
        verdict = "equal"
    else:
        interval = paired_interval(ours - baseline, bootstrap, seed)
        verdict = "differ" if interval and not interval[0] <= 0 <= interval[1] else "no difference shown"
    return {
        "baseline": float(baseline.mean()),
        "speculative": float(ours.mean()),
        "difference": float((ours - baseline).mean()),
        "interval": interval,
        "verdict": verdict,
        "num_scored": len(scored),
        "details": details(scored),
    }


def paired_interval(differences: np.ndarray, bootstrap: int, seed: int) -> list[float] | None:
    """Of the mean, by drawing prompts anew, both sides of each together. None for less than two, or if it is off."""
    if len(differences) < 2 or not bootstrap:
        return None
    rng = np.random.default_rng(seed)
    means = [rng.choice(differences, len(differences)).mean() for _ in range(bootstrap)]
    low, high = np.percentile(means, [2.5, 97.5])
    return [float(low), float(high)]


def details(scored: list[Sample]) -> dict[str, dict[str, float]]:
    """Means of what a metric gives besides its score, as rouge1 and rouge2."""
    each = [sample["score"].get("details") for sample in scored]
    if None in each:
        return {}
    names = [name for name, value in each[0]["baseline"].items() if isinstance(value, float)]
    return {name: {side: float(np.mean([one[side][name] for one in each])) for side in SIDES} for name in names}


def line(score: dict[str, Any]) -> str:
    """What is said of it in a report."""
    metric = (score.get("metric") or "task score").replace("_", " ")
    said = f"{metric}: {score['baseline']:.3f} plain, {score['speculative']:.3f} ours"
    if score["verdict"] == "equal":
        said += ", equal, since the token ids are"
    else:
        said += f", {score['verdict']}: {score['difference']:+.3f}"
        if score["interval"] is not None:
            said += f" (95 % interval {score['interval'][0]:+.3f} to {score['interval'][1]:+.3f})"
    said += f", {score['num_scored']} scored"
    for name, sides in (score.get("details") or {}).items():
        said += f"; {name} {sides['baseline']:.3f}, {sides['speculative']:.3f}"
    if score.get("corpus"):
        said += f"; of the corpus {score['corpus']['baseline']:.3f}, {score['corpus']['speculative']:.3f}"
    return said
