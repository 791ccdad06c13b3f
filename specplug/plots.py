"""The plots of a report, a benchmark and a sweep. Each function takes what it shows and returns a `Plot`, or None where there is
nothing to show. How one is drawn is in svg.py.
"""

from typing import Any

from specplug.escape import one_line
from specplug.svg import (
    ASSISTED,
    CARD,
    INK,
    LINE,
    OTHER,
    OURS,
    PLAIN,
    SOFT,
    Plot,
    draw,
    height_of,
    name_rows,
    whole_numbers,
)

MOST_ROWS = 40
MOST_PROMPTS = 200  # of a long run, evenly spread
SIDES = {"plain": (PLAIN, "-"), "assisted": (ASSISTED, "--"), "speculative": (OURS, "-.")}
LABELS = {"plain": "plain", "assisted": "assisted", "speculative": "ours"}
Row = tuple[str, dict[str, Any]]


def categories(summary: dict[str, Any]) -> list[Row]:
    """All, then each category if there are several; with a note in the caption if they are cut."""
    parts = list(summary["categories"].items())
    return [("all", summary), *(parts[:MOST_ROWS] if len(parts) > 1 else [])]


def _cut(summary: dict[str, Any]) -> str:
    more = len(summary["categories"]) - MOST_ROWS
    return f" The last {more} categories are left out here." if more > 0 else ""


def speedup(summary: dict[str, Any], rows: list[Row] | None = None) -> Plot | None:
    shown = [row for row in rows or categories(summary) if row[1]["speedup"] is not None]
    if not shown:
        return None

    def paint(axes: Any) -> None:
        for k, (_, part) in enumerate(shown):
            low, high = part["speedup_interval"] or (part["speedup"], part["speedup"])
            axes.plot([low, high], [k, k], color=OURS, linewidth=2, solid_capstyle="butt")
            axes.plot([part["speedup"]], [k], "o", color=OURS, markersize=7 if k == 0 and rows is None else 5.5)
        axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (2, 2)))
        name_rows(axes, [name for name, _ in shown])
        axes.set_xlim(left=min(0, axes.get_xlim()[0]))
        axes.set_xlabel("tokens per second, times those of plain generate", loc="right")

    caption = (
        "All tokens over all seconds. Lines: 95 % bootstrap intervals over prompts. Dotted: as fast as plain generate."
    )
    caption += "" if rows is not None else _cut(summary)
    return draw(
        "speedup", "Speed-up" + ("" if rows is not None else " by category"), caption, height_of(len(shown)), paint
    )


def ways(summary: dict[str, Any]) -> Plot:
    """The ways of a benchmark, by tokens per second."""
    shown = [(name, way) for name, way in summary["ways"].items() if way["tokens_per_second"] is not None]

    def paint(axes: Any) -> None:
        for k, (name, way) in enumerate(shown):
            colour = PLAIN if name == "transformers" else ASSISTED if name.startswith("transformers") else OURS
            axes.barh(k, way["tokens_per_second"], color=colour, height=0.6)
            axes.annotate(
                f" {way['tokens_per_second']:.0f}", (way["tokens_per_second"], k), va="center", fontsize=8, color=SOFT
            )
        name_rows(axes, [name for name, _ in shown], 30)
        axes.set_xlabel("tokens per second, prompts included", loc="right")

    alpha = summary["synthetic_alpha"]
    caption = f"All tokens over all seconds, {summary['batch_size']} prompts at a time."
    caption += "" if alpha is None else f" Synthetic: drafts are kept with probability {alpha:g}."
    return draw("bench", "Ways to decode", caption, height_of(len(shown)), paint)


def predicted(summary: dict[str, Any]) -> Plot | None:
    shown = [row for row in categories(summary) if row[1]["speedup"] is not None and row[1]["predicted_speedup"]]
    if not shown:
        return None

    def paint(axes: Any) -> None:
        series = (
            ("speedup", "measured", "o", OURS, OURS),
            ("predicted_speedup_with_width", "predicted, with the cost of the wider pass", "D", OTHER, "none"),
            ("predicted_speedup", "predicted by the formula alone", "s", ASSISTED, "none"),
        )
        for k, (_, part) in enumerate(shown):
            values = [part[key] for key, *_ in series]
            axes.plot([min(values), max(values)], [k, k], color=LINE, linewidth=1.5, zorder=1)
        for key, label, marker, edge, face in series:
            values = [part[key] for _, part in shown]
            axes.plot(
                values, range(len(shown)), marker, label=label, markeredgecolor=edge, markerfacecolor=face,
                markersize=6, markeredgewidth=1.5, clip_on=False,
            )  # fmt: skip
        name_rows(axes, [name for name, _ in shown])
        axes.set_xlim(left=min(0, axes.get_xlim()[0]))
        axes.set_xlabel("speed-up over plain generate", loc="right")
        axes.figure.legend(loc="outside upper left")

    caption = (
        "From the acceptance and the costs that were measured. The distance to the prediction with the wider pass is the prompt's"
        " pass, drafts behind the end of a text, and time outside the models." + _cut(summary)
    )
    return draw("predicted", "Measured beside predicted", caption, height_of(len(shown)) + 0.55, paint)


def acceptance(summary: dict[str, Any]) -> Plot | None:
    shares = summary["acceptance_by_position"]
    if not shares:
        return None

    def paint(axes: Any) -> None:
        positions = range(1, len(shares) + 1)
        axes.plot(positions, shares, "o-", color=OURS, linewidth=1.8, markersize=5)
        whole_numbers(axes.xaxis)
        axes.set_xlim(0.5, len(shares) + 0.5)
        axes.set_ylim(0, 1.04)
        axes.set_xlabel("position of the draft in its round")
        axes.set_ylabel("share that was kept")

    caption = "Of the rounds that made a draft at this position, the share that kept it and all before it."
    return draw("acceptance", "Acceptance by position", caption, 2.7, paint)


def tokens(summary: dict[str, Any]) -> Plot | None:
    counts = summary["acceptance_histogram"]
    if not counts:
        return None

    def paint(axes: Any) -> None:
        axes.bar(range(1, len(counts) + 1), counts, width=0.72, color=OURS)
        whole_numbers(axes.xaxis)
        whole_numbers(axes.yaxis)
        axes.set_xlim(0.4, max(len(counts), 4) + 0.6)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("tokens from one target pass")
        axes.set_ylabel("rounds")

    caption = "The drafts that were kept and the one token behind them; plain decoding has one token a pass."
    return draw("tokens", "Tokens a round", caption, 2.7, paint)


def time(summary: dict[str, Any]) -> Plot | None:
    shown = [row for row in categories(summary) if row[1]["seconds_per_round"]]
    if not shown:
        return None
    parts = (
        ("target", "target's forward", PLAIN),
        ("draft", "draft's forward", ASSISTED),
        ("other", "other", OTHER),
    )

    def paint(axes: Any) -> None:
        left = [0.0] * len(shown)
        for key, label, colour in parts:
            widths = [1000 * max(part["seconds_per_round"][key], 0) for _, part in shown]
            axes.barh(range(len(shown)), widths, 0.62, left, color=colour, edgecolor=CARD, linewidth=0.8, label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        longest = max(left)
        for k, (_, part) in enumerate(shown):
            share = part["overhead"]
            axes.text(left[k] + 0.015 * longest, k, f"{100 * share:.0f} % other", va="center", fontsize=8.5, color=SOFT)
        name_rows(axes, [name for name, _ in shown])
        axes.set_xlim(0, 1.24 * longest)
        axes.set_xlabel("milliseconds a round", loc="right")
        axes.figure.legend(loc="outside upper left", ncols=3, columnspacing=1.2, handlelength=1.2)

    caption = (
        "Forward passes of the two models and the rest, means over all rounds after the prompt's pass, in the order of the legend."
        + _cut(summary)
    )
    return draw("time", "Where a round's time goes", caption, height_of(len(shown)) + 0.3, paint)


def latency(samples: list[dict[str, Any]]) -> Plot | None:
    if not samples:
        return None

    def paint(axes: Any) -> None:
        for side, (colour, line) in SIDES.items():
            seconds = sorted(sample[side]["seconds"] for sample in samples if sample.get(side))
            if len(seconds) == len(samples):
                share = [100 * (k + 1) / len(seconds) for k in range(len(seconds))]
                axes.step(
                    [seconds[0], *seconds], [0, *share], where="post", color=colour, linestyle=line, linewidth=1.8,
                    label=LABELS[side],
                )  # fmt: skip
        axes.set_xlim(left=0)
        axes.set_ylim(0, 104)
        axes.set_xlabel("seconds for a whole call, prompt included")
        axes.set_ylabel("% of prompts done by then")
        axes.figure.legend(loc="outside upper left", ncols=3, handlelength=3)

    return draw(
        "latency", "Time a prompt takes", "Cumulative distribution over prompts; further left is faster.", 2.9, paint
    )


def gamma_by_prompt(samples: list[dict[str, Any]]) -> Plot | None:
    step = max(-(-len(samples) // MOST_PROMPTS), 1)
    drafted = [sample["speculative"]["stats"]["drafted"] for sample in samples[::step]]
    if not any(drafted):
        return None

    def paint(axes: Any) -> None:
        for k, counts in zip(range(1, len(samples) + 1, step), drafted, strict=True):
            made = {int(gamma): rounds for gamma, rounds in counts.items()}
            if not made:
                continue
            axes.plot([k, k], [min(made), max(made)], color=SOFT, linewidth=1.2, solid_capstyle="butt", zorder=1)
            average = sum(gamma * rounds for gamma, rounds in made.items()) / sum(made.values())
            axes.plot([k], [average], "o", color=OURS, markersize=4.5, label="mean" if k == 1 else None)
        whole_numbers(axes.xaxis)
        whole_numbers(axes.yaxis)
        axes.grid(visible=False, axis="x")
        axes.set_xlim(0.4, len(drafted) + 0.6)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("prompt, in the order of the run")
        axes.set_ylabel("drafts a round")

    caption = "Points: means over a prompt's rounds. Lines: from the fewest to the most in a round."
    caption += f" Every {step}th prompt." if step > 1 else ""
    return draw("gamma", "Drafts a round, prompt by prompt", caption, 2.7, paint)


MARKERS = ["o", "s", "D", "^", "v", "P", "X", "*"]


def gamma_by_round(traces: list[dict[str, Any]]) -> Plot | None:
    made = [(len(each["drafts"]), each["reason"] or "not known") for trace in traces for each in trace["rounds"][1:]]
    if not made:
        return None
    ends, end = [], 0
    for trace in traces:
        end += len(trace["rounds"]) - 1
        ends.append(end)

    def paint(axes: Any) -> None:
        colours = [OURS, ASSISTED, OTHER, PLAIN]
        for k, reason in enumerate(dict.fromkeys(reason for _, reason in made)):
            at = [(i, count) for i, (count, why) in enumerate(made, start=1) if why == reason]
            x, y = zip(*at, strict=True)
            marker, colour = MARKERS[k % len(MARKERS)], colours[k % len(colours)]
            axes.plot(x, y, marker, color=colour, markersize=4.5, label=one_line(reason, 42))
        for each in ends[:-1]:
            axes.axvline(each + 0.5, color=SOFT, linewidth=0.8, linestyle=(0, (2, 2)))
        whole_numbers(axes.xaxis)
        whole_numbers(axes.yaxis)
        axes.set_xlim(0.4, len(made) + 0.6)
        axes.set_ylim(bottom=min(-0.5, -0.04 * max(count for count, _ in made)))
        axes.set_xlabel("round of the traced prompts, one after the other")
        axes.set_ylabel("drafts in the round")
        axes.figure.legend(loc="outside upper left", handletextpad=0.2)

    caption = "With the schedule's reason. Dotted: where the next prompt begins. Traced behind the timed calls."
    height = 2.7 + 0.17 * len({reason for _, reason in made})
    return draw("gamma_by_round", "Drafts a round, round by round", caption, height, paint)


def curves(points: list[dict[str, Any]]) -> Plot | None:
    """Speed-up over drafts a round, one line for each draft and temperature. Points as in recipes/sweep.py."""
    lines: dict[str, list[dict[str, Any]]] = {}
    temperatures = {each["temperature"] for each in points}
    for each in points:
        if each["speedup"] is not None:
            label = each["draft"] if len(temperatures) == 1 else f"{each['draft']}, T {each['temperature']:g}"
            lines.setdefault(label, []).append(each)
    if not lines:
        return None

    def paint(axes: Any) -> None:
        colours = [OURS, ASSISTED, OTHER, PLAIN]
        for k, (label, line) in enumerate(lines.items()):
            colour, marker = colours[k % len(colours)], MARKERS[k % len(MARKERS)]
            x = [each["mean_gamma"] or 0 for each in line]
            axes.plot(
                x,
                [each["speedup"] for each in line],
                marker + "-",
                color=colour,
                markersize=4.5,
                label=one_line(label, 42),
            )
            known = [(at, each["predicted"]) for at, each in zip(x, line, strict=True) if each["predicted"] is not None]
            axes.plot(*zip(*known, strict=True) if known else ([], []), ":", color=colour, linewidth=1.4)
        axes.axhline(1, color=SOFT, linewidth=0.9)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.set_xlabel("drafts a round, mean")
        axes.set_ylabel("times plain decoding")
        axes.figure.legend(loc="outside upper left")

    caption = "Lines: measured, prompts left out. Dotted: predicted from alpha and the measured costs. Level line: plain decoding."
    return draw("sweep", "Speed-up over gamma", caption, 2.7 + 0.17 * len(lines), paint)


def of_run(summary: dict[str, Any], samples: list[dict[str, Any]], traces: list[dict[str, Any]]) -> list[Plot]:
    """Every plot that this run has something for, in the order of the report."""
    found = [
        speedup(summary),
        predicted(summary),
        acceptance(summary),
        tokens(summary),
        time(summary),
        latency(samples),
        gamma_by_prompt(samples),
        gamma_by_round(traces),
    ]
    return [plot for plot in found if plot is not None]
