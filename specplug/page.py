"""report.html and compare.html: one file each, with everything in it and nothing from elsewhere.

Texts of models and of data sets come in through `in_html` and `in_script` alone. The page's policy lets no script run but
the one of assets/report/inspector.js, by its hash, so that a text that did come through would still do nothing.
"""

import base64
import hashlib
import re
import shlex
from pathlib import Path
from typing import Any

from specplug import report, svg
from specplug.escape import in_html, in_script
from specplug.stats import number

ASSETS = Path(__file__).parent / "assets" / "report"


def of_run(summary: dict[str, Any], config: dict[str, Any], drawn: list[svg.Plot], traces: list[dict[str, Any]]) -> str:
    """The page of one evaluation."""
    told = [line for line in report.headline(summary)[1:] if not line.startswith("output: ")]  # the tiles say that
    notes = "".join(f"<p>{in_html(line[0].upper() + line[1:])}.</p>" for line in told)
    mismatches = ""
    if summary["mismatches"]:
        mismatches = (
            f'<p class="bad">Output differs from plain decoding in: {in_html(", ".join(summary["mismatches"]))}.</p>'
        )
    explained = "".join(f'<p class="soft">{in_html(line)}</p>' for line in report.explanation(summary, config))
    measured = "".join(
        f"<dt>{in_html(name)}</dt><dd>{in_html(value)}</dd>" for name, value in report.how(summary, config)
    )
    command = in_html(shlex.join(summary["environment"]["command"]))
    failed = "".join(f'<p class="bad">{in_html(line)}</p>' for line in report.error_lines(summary))
    title = report.title(config)
    sections = [
        section("result", "Result", tiles(summary) + notes + mismatches),
        section("categories", "By category", table(report.rows(summary), "Figures by category") + explained),
        section("plots", "Plots", gallery(drawn)),
        section(
            "lengths",
            "By length",
            "".join(table(rows, title, last_is_total=False) for title, rows in report.length_rows(summary).items()),
        ),
        section("failed", "Failed", failed) if summary["errors"] else "",
        (ASSETS / "inspector.html").read_text(encoding="utf-8") if traces else "",
        section(
            "how",
            "How it was measured",
            f'<dl>{measured}</dl><h3>Command</h3><pre tabindex="0"><code>{command}</code></pre>',
        ),
    ]
    lead = "Speed, exactness and task score, measured side by side. The files that this page is made of lie beside it."
    return fill(title, lead, "\n".join(sections), traces)


def of_comparison(tables: dict[str, list[list[str]]], warning: str, drawn: svg.Plot | None) -> str:
    """The page of several runs. `tables` by title, each with its header first."""
    sections = []
    if warning:
        told = in_html(warning[0].upper() + warning[1:])
        sections.append(f'<section role="note" class="bad"><p>{told}.</p></section>')
    for place, (title, rows) in enumerate(tables.items()):
        if len(rows) > 1:
            name = "runs" if place == 0 else f"table-{place}"
            sections.append(section(name, title, table(rows, title, last_is_total=False)))
        if place == 0 and drawn is not None:
            sections.append(section("plots", "Plot", gallery([drawn])))
    lead = "Each run beside plain generate of its own, measured in the same process."
    return fill(f"{len(tables['Runs']) - 1} runs side by side", lead, "\n".join(sections), [])


def tiles(summary: dict[str, Any]) -> str:
    """The three figures that are looked at first: speed, exactness, score."""
    interval = summary["speedup_interval"]
    between = "" if interval is None else f"95 % interval {interval[0]:.2f} to {interval[1]:.2f}"
    counts, scores = summary["exactness"], summary["task_score"]
    exact, detail = "not compared", "sampled: the same distribution, not the same tokens"
    if counts["not_compared"] != summary["num_samples"]:
        exact = f"{counts['identical']} of {summary['num_samples']}"
        detail = f"identical to plain decoding; ties: {counts['tie']}, mismatches: {counts['mismatch']}"
    score, of_whom = "not scored", "dataset.metric=none, or no references to compare with"
    if scores["baseline"] is not None:
        score = f"{scores['baseline']:.3f} / {scores['speculative']:.3f}"
        of_whom = (
            f"plain / ours, {(scores.get('metric') or 'mean over prompts').replace('_', ' ')}: {scores['verdict']}"
        )
    found = [
        ("speed-up over plain generate", number(summary["speedup"], 2, "x"), between, ""),
        ("output", exact, detail, "bad" if counts["mismatch"] else ""),
        ("task score", score, of_whom, ""),
    ]
    each = "".join(
        f'<div class="tile {kind}"><dt>{name}</dt><dd><b>{in_html(value)}</b> <span>{in_html(more)}</span></dd></div>'
        for name, value, more, kind in found
    )
    return f'<dl class="tiles">{each}</dl>'


def table(rows: list[list[str]], label: str, last_is_total: bool = True) -> str:
    """Header first. Wide ones are scrolled in their own box, by keyboard too."""
    header, *body = rows
    head = "".join(f'<th scope="col">{in_html(cell)}</th>' for cell in header)
    lines = []
    for k, (first, *cells) in enumerate(body):
        total = ' class="total"' if last_is_total and k == len(body) - 1 else ""
        rest = "".join(f"<td>{in_html(cell)}</td>" for cell in cells)
        lines.append(f'<tr{total}><th scope="row">{in_html(first)}</th>{rest}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{in_html(label)}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def gallery(drawn: list[svg.Plot]) -> str:
    figures = "".join(
        f'<figure id="plot-{plot.name}"><h3>{in_html(plot.title)}</h3>{svg.inline(plot)}'
        f"<figcaption>{in_html(plot.caption)}</figcaption></figure>"
        for plot in drawn
    )
    return f'<div class="gallery">{figures}</div>'


def section(name: str, title: str, content: str) -> str:
    return f'<section id="{name}" aria-labelledby="h-{name}"><h2 id="h-{name}">{in_html(title)}</h2>{content}</section>'


def fill(title: str, lead: str, body: str, traces: list[dict[str, Any]]) -> str:
    """The whole page around its sections."""
    script = (ASSETS / "inspector.js").read_text(encoding="utf-8")
    parts = {
        "title": in_html(title),
        "lead": in_html(lead),
        "style": (ASSETS / "page.css").read_text(encoding="utf-8"),
        "colours": colours(),
        "body": body,
        "traces": in_script(traces),
        "script": script,
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    template = (ASSETS / "page.html").read_text(encoding="utf-8")
    # All in one go, so that what is put in is not looked at.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def colours() -> str:
    """The plots' colours as properties of the page, light and dark. Paper is light."""
    light, dark = ("".join(f"--{role}:{pair[k]};" for role, pair in svg.COLOURS.items()) for k in (0, 1))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}"
