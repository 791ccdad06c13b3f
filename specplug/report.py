"""summary.json, report.md, report.html and the plots, always rebuilt from the files of a run folder, and its figures in words.

The figures come from summary.py.
"""

import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from specplug import plots, scores, svg
from specplug.escape import code_block, in_markdown, markdown_table
from specplug.rates import SIDES, Sample, tokens_and_seconds
from specplug.runs import write_json
from specplug.stats import Stats, number, ratio
from specplug.summary import read_run

LISTED_ERRORS = 20  # in report.md and report.html; summary.json has all


def write_reports(folder: Path) -> dict[str, Any]:
    """Read the files of a run; write summary.json, plots/, report.md and report.html."""
    from specplug import page  # which asks this module for words

    run = read_run(folder)
    summary = run.summary
    write_json(folder / "summary.json", summary)
    drawn = plots.of_run(summary, run.samples, run.traces)
    images = [svg.save(plot, folder) for plot in drawn]
    (folder / "report.md").write_text(markdown(summary, run.config, images), encoding="utf-8")
    (folder / "report.html").write_text(page.of_run(summary, run.config, drawn, run.traces), encoding="utf-8")
    return summary


def spread(interval: list[float] | None) -> str:
    return "" if interval is None else f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})"


def verdict(summary: dict[str, Any]) -> str:
    counts = summary["exactness"]
    if not summary["num_samples"]:
        return "none"
    if counts["not_compared"] == summary["num_samples"]:
        return "sampled, so not compared token by token"
    parts = [f"{counts[kind]} {kind}" for kind in ("identical", "tie", "mismatch")]
    if counts["not_compared"]:  # sampled under verify=walk: equal ids show themselves, others are not looked into
        parts = [f"{counts['identical']} sampled answers identical"]
    return f"{', '.join(parts)} of {summary['num_samples']}"


def rows(summary: dict[str, Any]) -> list[list[str]]:
    """The table per category, with a last row for all; the header first. tok/s of the three sides, then ratios."""
    header = [
        "category", "n", "plain", "assisted", "ours", "speed-up", "vs assisted", "alpha", "tokens / pass",
        "identical",
    ]  # fmt: skip
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
    if summary["task_score"]["baseline"] is not None:
        lines.append(scores.line(summary["task_score"]))
    measured = summary["width_cost_gamma"]
    over = "" if measured is None else f" over {measured + 1} position{'s' * (measured > 0)}"
    lines.append(
        f"alpha {number(summary['alpha'], 3)}, {number(summary['mean_acceptance_length'])} tokens per target pass, "
        f"a draft step costs {number(summary['cost_coefficient'], 3)} of a plain step of the target, "
        f"a target pass{over} {number(summary['width_cost'])}"
    )
    drafted = {int(gamma): rounds for gamma, rounds in summary["drafted_histogram"].items()}
    if len(drafted) > 1 and summary["num_rounds"]:
        often = max(drafted, key=drafted.__getitem__)
        in_trees = sum(depth * rounds for depth, rounds in drafted.items()) < summary["num_draft_tokens"]
        lines.append(
            f"drafts a round: {number(summary['mean_gamma'], 1)} in the mean, most often {often}{' deep' * in_trees}, "
            f"none in {100 * drafted.get(0, 0) / summary['num_rounds']:.0f} % of the rounds"
        )
    for name, counts in summary["members"].items():
        lines.append(
            f"{name}: {counts['proposals']} proposals, {counts['drafts']} drafts, {counts['kept']} of them kept"
        )
    lines.append(
        f"predicted {number(summary['predicted_speedup'])}x by the formula, "
        f"{number(summary['predicted_speedup_with_width'])}x with the cost of the wider pass; "
        f"time outside both models' forward passes: {number(100 * (summary['overhead'] or 0), 1)} % of a round"
    )
    if summary["replayed"] is not None:  # else nothing could be, or the run was made before they were counted
        took = f"; recording them took {number(summary['seconds_capture'])} s" * (summary["seconds_capture"] >= 0.005)
        lines.append(f"{number(summary['replayed'], 1, ' %', scale=100)} of the passes were replays{took}")
    for reason, passes in summary["not_replayed"].items():
        lines.append(f"not replayed, {passes} passes of {reason}")
    if summary["errors"]:
        failed = len(summary["errors"])
        lines.append(f"failed: {failed} of {failed + summary['num_samples']} prompts, which are not in these figures")
    return lines


def length_rows(summary: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Tables by length of prompt and of answer, header first."""
    tables = {}
    for name, title in (("prompt_tokens", "tokens of the prompt"), ("new_tokens", "new tokens")):
        table = [[title, "n", "plain", "ours", "speed-up", "tokens / pass"]]
        for each in summary["lengths"][name]:
            speeds = [number(each["tokens_per_second"][side], 0) for side in ("plain", "speculative")]
            last = [number(each["speedup"], 2, "x"), number(each["mean_acceptance_length"])]
            table.append([f"{each['from']} to {each['to']}", str(each["num_samples"]), *speeds, *last])
        if len(table) > 1:
            tables[title] = table
    return tables


def error_lines(summary: dict[str, Any]) -> list[str]:
    listed = [f"{each['id']}: {each['reason']}" for each in summary["errors"][:LISTED_ERRORS]]
    more = len(summary["errors"]) - len(listed)
    return [*listed, f"and {more} more, in summary.json"] if more else listed


class SoFar:
    """While a run goes on: sums over the samples that are done."""

    def __init__(self) -> None:
        self.stats, self.exactness, self.count = Stats(), Counter[str](), 0
        self.sums: dict[tuple[str, bool], list[float]] = {
            (side, d): [0, 0.0, 0] for side in SIDES for d in (False, True)
        }

    def add(self, sample: Sample) -> None:
        self.count += 1
        self.stats += Stats.from_dict(sample["speculative"]["stats"])
        self.exactness[sample["exactness"]["kind"]] += 1
        for (side, decode), sums in self.sums.items():
            pair = tokens_and_seconds(sample, side, decode)
            if pair is not None:
                sums[:] = [sums[0] + pair[0], sums[1] + pair[1], sums[2] + 1]

    def rate(self, side: str, decode: bool = False) -> float | None:
        tokens, seconds, known = self.sums[side, decode]
        return tokens / seconds if seconds > 0 and known == self.count else None

    def numbers(self) -> dict[str, Any]:
        """For a tracker, under the names of summary.json."""
        return {
            "tokens_per_second": {side: self.rate(side) for side in SIDES},
            "speedup": ratio(self.rate("speculative"), self.rate("plain")),
            "alpha": self.stats.alpha,
            "mean_acceptance_length": self.stats.mean_acceptance_length,
            "mean_gamma": self.stats.mean_gamma,
            "exactness": dict(self.exactness),
        }

    def told(self) -> tuple[str, list[list[str]]]:
        """One line, and a table of the sides with its header first."""
        table = [["", "tokens / s", "decoding alone", "speed-up"]]
        for side, name in zip(SIDES, ("plain", "assisted", "ours"), strict=True):
            times = None if side == "plain" else ratio(self.rate(side), self.rate("plain"))
            decoding = number(self.rate(side, decode=True), 0)
            table.append([name, number(self.rate(side), 0), decoding, number(times, 2, "x")])
        verdicts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in self.exactness.items())
        length = number(self.stats.mean_acceptance_length)
        return f"{table[-1][1]} tok/s, {table[-1][3]} plain, {length} tokens per target pass, {verdicts}", table


def title(config: dict[str, Any]) -> str:
    draft = config["draft"]
    drafted_by = draft["name_or_path"] if draft["drafter"] == "model" else draft["drafter"]
    return f"{config['target']['name_or_path']} with {drafted_by} on {config['dataset']['name']}"


def how(summary: dict[str, Any], config: dict[str, Any]) -> list[tuple[str, str]]:
    """What the figures depend on: name and value."""
    environment = summary["environment"]
    sampling = ", ".join(f"{k} {v}" for k, v in config["sampling"].items() if v is not None)
    schedule = ", ".join(f"{k} {v}" for k, v in config["schedule"].items() if k != "name" and v is not None)
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items() if v is not None)
    megabytes = [f"{side} {environment.get(f'bytes_{side}', 0) / 1e6:.1f} MB" for side in ("target", "draft")]
    return [
        (
            "device",
            f"{environment['device']}, {environment['dtype']}, batch {environment['batch_size']}, {environment['threads']} torch threads",
        ),
        ("sampling", f"{sampling}; seed {config['seed']}"),
        ("schedule", f"{config['schedule']['name']} ({schedule}); accept rule: {config['verify']['name']}"),
        ("versions", f"{versions}; Python {environment['python']}; commit {environment['commit']}"),
        ("memory", f"weights of the {', of the '.join(megabytes)}"),
    ]


def repeated(recipe: dict[str, Any]) -> str:
    said = ""
    if recipe.get("repeats", 1) > 1:
        said += f" Each was run {recipe['repeats']} times; the median counts."
    if recipe.get("batch_size", 1) > 1:
        said += f" {recipe['batch_size']} prompts were decoded together, and each counts an equal share of the time."
    return said


def explanation(summary: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """What the table's figures are."""
    return [
        "Tokens per second of plain generate, of transformers' assisted generation and of ours: all new tokens over all"
        " seconds of the calls, prompt included. The sides were run in turn on each prompt, in one process, after"
        f" {config['recipe']['warmup']} of warm-up that are left out.{repeated(config['recipe'])}",
        f"Decoding alone, from the second token on: {number(summary['speedup_decode'])}x plain. Median of the ratios per"
        f" prompt: {number(summary['speedup_median'])}x.",
    ]


def markdown(summary: dict[str, Any], config: dict[str, Any], images: list[str]) -> str:
    """`images`: links to the plots."""
    histogram = [f"| {k} | {count} |" for k, count in enumerate(summary["acceptance_histogram"])]
    positions = [f"| {k + 1} | {share:.3f} |" for k, share in enumerate(summary["acceptance_by_position"])]
    mismatches = (
        [f"Mismatch in: {', '.join(map(in_markdown, summary['mismatches']))}.", ""] if summary["mismatches"] else []
    )
    return "\n".join(
        [
            f"# {in_markdown(title(config))}",
            "",
            *(f"- {line}" for line in headline(summary)),
            "",
            *mismatches,
            *markdown_table(rows(summary)),
            "",
            *explanation(summary, config),
            "",
            *images,
            "",
            *(line for lines in length_rows(summary).values() for line in [*markdown_table(lines), ""]),
            *(
                ["## Failed", "", *(f"- {in_markdown(line)}" for line in error_lines(summary)), ""]
                if summary["errors"]
                else []
            ),
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
            *(f"- {name}: {in_markdown(value)}" for name, value in how(summary, config)),
            "- command:",
            "",
            code_block(shlex.join(summary["environment"]["command"])),
            "",
        ]
    )
