"""How the cost of decoding grows with the context, the batch, the number of drafts and the vocabulary: recipe.growth of recipe=bench.

Which points there are, what is wrong with what was asked for, and what is made of the measurements. Runs nothing, and needs no torch.
A sample is one point: under `sides` what our plain loop ("plain") and one speculative side ("speculative") made there.
"""

from collections.abc import Sequence
from typing import Any

from specplug import svg
from specplug.config import Bench, Config, Drafter
from specplug.stats import Stats, number, ratio

POINTS = {
    "context": [128, 256, 512, 1024, 2048, 4096, 8192],  # tokens of a prompt
    "batch": [1, 2, 4, 8, 16, 32],  # sequences
    "gamma": [0, 1, 2, 4, 8, 16],  # drafts a round
    "vocabulary": [32_768, 65_536, 131_072, 262_144],  # tokens
}
AXES = {
    "context": "tokens of the prompt",
    "batch": "sequences decoded together",
    "gamma": "drafts a round",
    "vocabulary": "tokens of the vocabulary",
}
TAKES = {"context": "prompt_tokens", "batch": "batch_size"}  # whose place the points take
HEADER = (
    "side", "drafts", "a token", "outside the models", "of it", "prompt's pass", "tokens a round", "keys and values", "peak memory",
)  # fmt: skip


def axes_of(recipe: Bench) -> list[Any]:
    """What is to grow, one after the other."""
    if recipe.growth is None:
        return []
    return [recipe.growth] if isinstance(recipe.growth, str) else list(recipe.growth)


def points_of(recipe: Bench) -> list[tuple[str, int]]:
    return [(axis, point) for axis in axes_of(recipe) for point in sorted(set(recipe.points or POINTS[axis]))]


def gammas_at(recipe: Bench, axis: str, point: int) -> dict[str, int]:
    """Sides and their drafts a round: nothing drafted, and the last of `recipe.gammas` above 0."""
    if axis == "gamma":
        return {"speculative" if point else "plain": point}
    return {"plain": 0, "speculative": [gamma for gamma in recipe.gammas if gamma][-1]}


def problems(config: Config) -> list[str]:
    """What is wrong, one line each: key, value, what is allowed, the fix."""
    recipe = config.recipe
    assert isinstance(recipe, Bench)
    allowed = f"allowed are {', '.join(POINTS)}, a list of these, or null"
    if not (recipe.growth is None or isinstance(recipe.growth, (str, list))):
        return [f"recipe.growth={recipe.growth}: {allowed}"]
    axes, default, found = axes_of(recipe), Bench(), []

    def need(holds: bool, name: str, allowed: str) -> None:
        if not holds:
            found.append(f"recipe.{name}={getattr(recipe, name)}: {allowed}")

    if not axes:
        need(recipe.growth is None, "growth", allowed)
        need(not recipe.points, "points", "nothing reads it without recipe.growth")
        return found
    if any(axis not in POINTS for axis in axes) or len(set(axes)) < len(axes):
        return [f"recipe.growth={recipe.growth}: {allowed}, each once"]
    need(not recipe.points or len(axes) == 1, "points", "are those of one growth; name one, or leave points out")
    least = 0 if axes == ["gamma"] else 1
    need(all(point >= least for point in recipe.points), "points", f"must be numbers from {least} on")
    for axis, name in TAKES.items():
        same = axis not in axes or getattr(recipe, name) == getattr(default, name)
        need(same, name, f"recipe.growth={axis} takes its place; leave it out")
    need(
        recipe.compare_assisted,
        "compare_assisted",
        "nothing reads it with recipe.growth, where ours alone are measured",
    )
    if axes == ["gamma"]:
        need(recipe.gammas == default.gammas, "gammas", "nothing reads it with recipe.growth=gamma; take recipe.points")
    else:
        need(
            any(gamma > 0 for gamma in recipe.gammas),
            "gammas",
            "has to have a number above 0, for the side that drafts",
        )
    shaped = config.draft.shape is not None or config.draft.drafter is not Drafter.model
    if "vocabulary" in axes and (config.target.shape is None or not shaped):
        found.append(
            f"recipe.growth={recipe.growth}: a vocabulary can be chosen where models are built for it, from target.shape and"
            " draft.shape; take a pair named shape_*"
        )
    return found


def summarize(samples: Sequence[dict[str, Any]], synthetic_alpha: float | None) -> dict[str, Any]:
    """Rows by what grew, in the order of its points; None where nothing was measured."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for sample in sorted(samples, key=lambda each: each["point"]):
        rows.setdefault(sample["axis"], []).extend(row(sample, side, made) for side, made in sample["sides"].items())
    return {"synthetic_alpha": synthetic_alpha, "growth": {axis: rows[axis] for axis in POINTS if axis in rows}}


def row(sample: dict[str, Any], side: str, made: dict[str, Any]) -> dict[str, Any]:
    """One side at one point. Tokens of all sequences together, without the first of each, which comes from the prompt's pass."""
    stats = Stats.from_dict(made["stats"])
    tokens = stats.num_new_tokens - stats.num_prefill_tokens
    return {
        "point": sample["point"],
        "side": side,
        "gamma": made["gamma"],
        "num_new_tokens": stats.num_new_tokens,
        "seconds_per_token": ratio(stats.seconds_rounds - stats.seconds_capture, tokens),
        "seconds_outside_per_token": ratio(stats.seconds_other, tokens),
        "seconds_prefill": stats.seconds_prefill,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "alpha": stats.alpha,
        "kv_bytes": sample["kv_bytes"],
        "peak_bytes": made["peak_bytes"],
    }


def table(axis: str, rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Header and a row a side and point."""
    made = [[axis, *HEADER]]
    for each in rows:
        share = None
        if each["seconds_per_token"]:
            share = each["seconds_outside_per_token"] / each["seconds_per_token"]
        made.append(
            [
                str(each["point"]),
                each["side"],
                str(each["gamma"]),
                number(each["seconds_per_token"], 2, " ms", 1e3),
                number(each["seconds_outside_per_token"], 2, " ms", 1e3),
                number(share, 0, " %", 100),
                number(each["seconds_prefill"], 1, " ms", 1e3),
                number(each["mean_acceptance_length"]),
                number(each["kv_bytes"], 1, " MiB", 2**-20),
                number(each["peak_bytes"], 0, " MiB", 2**-20),
            ]
        )
    return made


def plot(axis: str, rows: Sequence[dict[str, Any]]) -> svg.Plot | None:
    """Milliseconds a token over the points, and the part outside the models. None if nothing was decoded."""
    shown = [each for each in rows if each["seconds_per_token"] is not None]
    if not shown:
        return None
    points = sorted({each["point"] for each in shown})
    lines = {"ours, by drafts": shown} if axis == "gamma" else {}
    for each in shown if axis != "gamma" else []:
        lines.setdefault("plain loop" if each["side"] == "plain" else f"{each['gamma']} drafts", []).append(each)

    def paint(axes: Any) -> None:
        for label, colour, marker in zip(lines, (svg.PLAIN, svg.OURS)[-len(lines) :], "os", strict=False):
            at = [each["point"] for each in lines[label]]
            whole, outside = (
                [1e3 * each[name] for each in lines[label]]
                for name in ("seconds_per_token", "seconds_outside_per_token")
            )
            axes.plot(at, whole, f"{marker}-", color=colour, markersize=4.5, label=label)
            axes.plot(at, outside, f"{marker}:", color=colour, markersize=3, linewidth=1.4, label="outside the models")
        if axis != "gamma":
            axes.set_xscale("log", base=2)
        axes.set_xticks(points, [short(point) for point in points])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel(AXES[axis])
        axes.set_ylabel("milliseconds a token")
        axes.figure.legend(loc="outside upper left", ncols=2)

    caption = "Rounds alone, without the prompt's pass, over all tokens of all sequences. Dotted: time outside the models' passes."
    return svg.draw(f"growth_{axis}", f"Cost over {AXES[axis]}", caption, 2.9 + 0.2 * len(lines), paint)


def short(point: int) -> str:
    """8192 as 8k."""
    return f"{point // 1024}k" if point >= 1024 and point % 1024 == 0 else str(point)
