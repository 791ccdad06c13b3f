"""Evaluations that were run before, side by side.

specplug recipe=compare "recipe.runs=[runs/2026-11-29/12-00-00,runs/2026-11-29/12-30-00]"

Reads the run folders, changes nothing in them, and writes compare.json, compare.md, compare.html and plots/speedup.svg into
its own. Prints the table, and the content of compare.json as the last line of stdout. Runs with another target, data set,
sampling, machine or other prompts are shown all the same, under a warning.
"""

import json
from pathlib import Path

from rich.text import Text

from specplug import compare, page, plots, svg
from specplug.config import Compare, Config, ConfigError
from specplug.console import console, table_of
from specplug.escape import in_markdown, markdown_table, one_line
from specplug.runs import write_json


def run(config: Config, folder: Path) -> int:
    recipe = config.recipe
    assert isinstance(recipe, Compare)
    if config.resume is not None:
        raise ConfigError(f"resume={config.resume}: recipe=compare has nothing to go on with; leave resume out")
    runs = compare.read_runs(recipe.runs, recipe.bootstrap)
    reasons = compare.why_not_comparable(runs)
    warning = compare.warning(reasons)
    result = {
        "comparable": not reasons,
        "reasons": reasons,
        "differences": compare.differences(runs),
        "runs": {label: run.summary for label, run in runs.items()},
        "folder": str(folder),
    }
    tables = {
        "Runs": compare.rows(runs),
        "Speed-up by category": compare.category_rows(runs),
        "What differs": compare.difference_rows(runs),
    }
    drawn = plots.speedup({}, [(label, run.summary) for label, run in runs.items()])
    folder.mkdir(parents=True, exist_ok=True)
    image = None if drawn is None else svg.save(drawn, folder)
    write_json(folder / "compare.json", result)
    (folder / "compare.md").write_text(markdown(tables, warning, image), encoding="utf-8")
    (folder / "compare.html").write_text(page.of_comparison(tables, warning, drawn), encoding="utf-8")

    for rows in tables.values():
        if len(rows) > 1:
            console.print(table_of([[one_line(cell, 60) for cell in row] for row in rows]))
    if warning:
        console.print(Text(one_line(warning), style="bold yellow"))
    console.print(Text(f"report: {folder}/compare.html and compare.md"))
    print(json.dumps(result, ensure_ascii=False))
    return 0


def markdown(tables: dict[str, list[list[str]]], warning: str, image: str | None) -> str:
    lines = [f"# {len(tables['Runs']) - 1} runs side by side", ""]
    if warning:
        lines += [f"**Warning:** {in_markdown(warning)}.", ""]
    for title, rows in tables.items():
        if len(rows) > 1:
            lines += [f"## {title}", "", *markdown_table(rows), ""]
        if title == "Runs" and image is not None:
            lines += [image, ""]
    return "\n".join(lines)
