"""Evaluations over a grid, and the curves through them: speed-up over gamma, measured beside predicted.

specplug -m recipe=sweep schedule=fixed schedule.gamma=0,1,2,4,8,16
specplug -m recipe=sweep schedule=fixed schedule.gamma=2,4,8 draft=tiny,lookup,suffix sampling.temperature=0,0.7

Each job is a recipe=evaluate in a folder of its own. After each, sweep.md, sweep.json and sweep.svg in the folder above are
written anew from all jobs that are done. Cut short, the same command with hydra.sweep.dir=DIR goes on: what is measured
is kept. One job alone, without -m, is a curve of one point.
"""

import json
from pathlib import Path
from typing import Any

from rich.text import Text

from specplug import plots, svg
from specplug.config import Config, Sweep
from specplug.console import console, table_of
from specplug.escape import markdown_table, one_line
from specplug.recipes import evaluate
from specplug.runs import write_json
from specplug.stats import number

HEADER = ["draft", "temperature", "gamma", "drafts a round", "speed-up", "predicted", "alpha", "output"]


def run(config: Config, folder: Path) -> int:
    assert isinstance(config.recipe, Sweep)
    if config.resume is None and (folder / "config.json").is_file():
        config.resume = str(folder)  # the same sweep again: this job is finished, or done already
    code = evaluate.run(config, folder)
    above = folder.parent if (folder.parent / "multirun.yaml").is_file() else folder
    points = read_points(above)
    if points:
        write(above, points)
    return code


def read_points(folder: Path) -> list[dict[str, Any]]:
    """What each finished job below `folder`, or in it, says, in the order of draft, temperature and gamma."""
    points = []
    for file in [*folder.glob("*/summary.json"), *folder.glob("summary.json")]:
        try:
            summary, config = (json.loads(each.read_text()) for each in (file, file.parent / "config.json"))
        except (OSError, ValueError):  # being written, or no run of ours
            continue
        if config["recipe"]["name"] == "sweep":
            points.append(point(summary, config))
    return sorted(points, key=lambda each: (each["draft"], each["temperature"], each["mean_gamma"]))


def point(summary: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    draft, schedule = config["draft"], config["schedule"]
    label = draft["name_or_path"] if draft["drafter"] in ("model", "cross_vocab") else draft["drafter"]
    if draft["quantization"]["method"] != "none":
        label += f" {draft['quantization']['method']}"
    if draft["num_layers"] is not None:
        label += f" {draft['num_layers']} layers"
    return {
        "draft": label,
        "temperature": config["sampling"]["temperature"],
        "schedule": schedule["name"],
        "gamma": schedule.get("gamma", schedule["name"]),
        "mean_gamma": summary["mean_gamma"],
        "speedup": summary["speedup_decode"],
        "predicted": summary["predicted_speedup_with_width"],
        "alpha": summary["alpha"],
        "mismatches": len(summary["mismatches"]),
        "num_samples": summary["num_samples"],
    }


def write(folder: Path, points: list[dict[str, Any]]) -> None:
    rows = [HEADER, *(cells(each) for each in points)]
    drawn = plots.curves(points)
    write_json(folder / "sweep.json", {"points": points})
    lines = [
        "# Speed-up over gamma",
        "",
        "Speed-up in decoding, the prompt's pass left out.",
        "",
        *markdown_table(rows),
    ]
    if drawn is not None:
        (folder / "sweep.svg").write_text(svg.standalone(drawn), encoding="utf-8")
        lines += ["", f"![{drawn.title}](sweep.svg)", "", drawn.caption]
    (folder / "sweep.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print(table_of([[one_line(cell, 40) for cell in row] for row in rows]))
    console.print(Text(f"curves: {folder}/sweep.md and sweep.svg"))


def cells(each: dict[str, Any]) -> list[str]:
    wrong = each["mismatches"]
    return [
        each["draft"],
        f"{each['temperature']:g}",
        str(each["gamma"]),
        number(each["mean_gamma"], 2),
        number(each["speedup"], 2, "x"),
        number(each["predicted"], 2, "x"),
        number(each["alpha"], 3),
        f"{wrong} of {each['num_samples']} differ" if wrong else "as plain" if each["temperature"] == 0 else "sampled",
    ]
