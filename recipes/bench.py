"""Every way to decode, timed in one process and in turn, and where the time of a round goes.

specplug recipe=bench
specplug recipe=bench schedule=confidence schedule.threshold=0.6
specplug recipe=bench pair=shape_qwen1b5_0b5 recipe.synthetic_alpha=0.8 sampling.temperature=1 recipe.limit=2
specplug -m recipe=bench recipe.batch_size=1,2,4,8
specplug recipe=bench recipe.growth=context "recipe.points=[64,128,256]"

The sides: `generate` of transformers as it is, its assisted generation, on a GPU its static cache; ours with nothing drafted, with
each of `recipe.gammas`, with the adaptive schedule, and with the schedule that is chosen, if it is another one. Each batch of prompts
goes through all sides before the next one does, `recipe.repeats` times, of which the median counts. Beside the speed: a round's time by target, draft and the rest; the share of what
the memory's speed allows, and of what theory makes of alpha and the costs measured here; first calls and recording beside later calls;
host reads and launches of a round. Writes samples.jsonl, bench.json, bench.md
and plots/bench.svg; the last line of stdout is JSON. `resume=DIR` goes on with a run that was cut short.

With `recipe.growth=context|batch|gamma|vocabulary`, or a list of these, in place of that: our plain loop and one side with the last of
`recipe.gammas`, over `recipe.points`: seconds a token, time outside the models, keys and values, a plot each.

Pairs named shape_* have random weights in the shapes of well-known models, so that speed can be measured without a download.
Random models agree on nothing: with `recipe.synthetic_alpha` each draft is kept with that probability, whatever it is. Such
figures say "synthetic", and the rule exists in here alone.
"""

import dataclasses
import json
import resource
from pathlib import Path
from typing import Any

from rich.text import Text
from torch import Tensor

from specplug import bench, growth_bench, plots, svg
from specplug.config import Bench, Config, ConfigError, Drafter
from specplug.console import Bar, console, table_of
from specplug.data import load_rows
from specplug.escape import markdown_table, one_line
from specplug.measure import Sides
from specplug.models import pick_device
from specplug.pipelines import pipeline_from
from specplug.recipes.evaluate import encode
from specplug.round_costs import check_room, measure_rounds
from specplug.runs import Run, describe_environment, each_sample, environment_of, write_json
from specplug.ways import at_point, first_call, gammas_of, measured, memory, resized, synthetic, ways_of

NOTHING = "interrupted before the first was done; nothing to report"
MEDIANS = "Medians of repeats, all tokens over all seconds. Decoding leaves out the prompt's pass and the first token."
CALLS = (
    "First calls compile, and record passes that all ways use: the first to need one pays for it. Later: the median of all timed calls."
    " Host reads and launches: of rounds behind the first, in a call that was not timed; on the CPU they are calls that would wait for a"
    " device, and operations that Python asks for."
)


def run(config: Config, folder: Path) -> int:
    recipe = config.recipe
    assert isinstance(recipe, Bench)
    if config.draft.drafter is Drafter.none:
        raise ConfigError("draft=none: there is nothing to compare; name a draft, or draft=lookup")
    if recipe.growth is not None:
        with synthetic(recipe.synthetic_alpha):
            return grow(config, folder)
    sides, prompts = prepared(config)
    model, plugin = sides.model, sides.plugin
    check_room(model, plugin.drafter, gammas_of(config), "recipe.gammas or schedule.gamma")
    batches = [prompts[i : i + recipe.batch_size] for i in range(0, len(prompts), recipe.batch_size)]

    results = Run(folder, config, environment_of(model, recipe.batch_size))
    with synthetic(recipe.synthetic_alpha):
        ways = ways_of(config, sides)
        bar = Bar("bench").start(len(batches), len(results.done))
        interrupted, first_calls, counts = False, {}, {}
        try:
            plugin.record_after = 0  # the first calls compile, record and learn
            for name in list(ways):
                found = first_call(ways, name, batches[0])
                if found is not None:
                    first_calls[name] = found
            plugin.record_after = None
            for number, batch in enumerate(batches):
                if str(number) not in results.done:
                    results.append(measured(ways, batch, number, recipe.repeats) | {"id": str(number)})
                    bar.advance(number + 1)
            counts = {name: way.counted(batches[0]) for name, way in ways.items()}
        except KeyboardInterrupt:
            interrupted = True
        finally:
            bar.stop()
            results.close()
    if not results.done:
        console.print(NOTHING)
        return 130
    costs = None
    if not interrupted:
        rounds = measure_rounds(model, plugin.drafter, prompts[0], gammas_of(config), plugin.kernel, plugin.graph)
        costs = bench.Costs(rounds, plugin.drafter.costs_nothing, *memory(model, prompts[0]))
    summary = bench.summarize(samples_of(folder), costs, recipe.synthetic_alpha, recipe.batch_size, first_calls, counts)
    tables = {MEDIANS: bench.table(summary), CALLS: bench.table_of_calls(summary)}
    write(
        folder,
        summary,
        "Ways to decode",
        [(caption, rows, None) for caption, rows in tables.items()],
        plots.ways(summary),
    )
    return finished(folder, summary, len(results.done), len(batches), interrupted)


def prepared(config: Config) -> tuple[Sides, list[Tensor]]:
    """What decodes, with nothing attached, and the prompts, (1, T) each."""
    recipe = config.recipe
    assert isinstance(recipe, Bench)
    rows = load_rows(config.dataset, recipe.limit)
    pipe, plugin = pipeline_from(config)
    plugin.synchronize = True
    plugin.detach()
    if recipe.synthetic_alpha is not None:
        plugin.verify = bench.SYNTHETIC
    if config.target.shape is not None:
        pipe.model.generation_config.eos_token_id = None  # random weights end texts anywhere
    prompts = [resized(encode(pipe.tokenizer, row, config, pipe.model), recipe.prompt_tokens) for row in rows]
    return Sides(config, pipe.model, pipe.tokenizer, plugin), prompts


def grow(config: Config, folder: Path) -> int:
    """How the cost of decoding grows: our plain loop and one that drafts, point by point, see growth_bench.py."""
    recipe = config.recipe
    assert isinstance(recipe, Bench)
    points = growth_bench.points_of(recipe)
    device, dtype = pick_device(config.target.device, "target"), config.target.dtype.value
    results = Run(folder, config, describe_environment(device, dtype, recipe.batch_size))
    bar = Bar("growth").start(len(points), len(results.done))
    interrupted, left_out, loaded = False, [], Loaded(config)
    try:
        for number, (axis, point) in enumerate(points):
            name = f"{axis}={point}"
            if name not in results.done:
                found = at_point(recipe, *loaded.of(point if axis == "vocabulary" else 0), axis, point)
                if isinstance(found, str):
                    left_out.append(f"{name} is left out: {found}")
                    console.print(Text(left_out[-1]))
                else:
                    results.append({"id": name, "axis": axis, "point": point} | found)
            bar.advance(number + 1, name)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        bar.stop()
        results.close()
    if not results.done:
        console.print(NOTHING if interrupted else "no point could be measured; nothing to report")
        return 130 if interrupted else 1
    summary = growth_bench.summarize(samples_of(folder), recipe.synthetic_alpha) | {"left_out": left_out}
    parts = [
        (growth_bench.AXES[axis], growth_bench.table(axis, rows), growth_bench.plot(axis, rows))
        for axis, rows in summary["growth"].items()
    ]
    write(folder, summary, "How the cost of decoding grows", parts)
    return finished(folder, summary, len(results.done), len(points), interrupted)


class Loaded:
    """One pair of models at a time, loaded when a point needs it."""

    def __init__(self, config: Config) -> None:
        self.config, self.vocabulary = config, -1
        self.made: tuple[Sides, list[Tensor]] | None = None

    def of(self, vocabulary: int) -> tuple[Sides, list[Tensor]]:
        """Built for a vocabulary of that size; 0 is the one they have."""
        if self.made is None or self.vocabulary != vocabulary:
            self.made = None  # before the next is loaded
            self.made, self.vocabulary = prepared(with_vocabulary(self.config, vocabulary)), vocabulary
        return self.made


def with_vocabulary(config: Config, size: int) -> Config:
    """The same for models with so many tokens; 0 leaves them as they are. Nothing of transformers' is compared."""
    config = dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, compare_assisted=False))  # type: ignore[call-arg]
    for role in ("target", "draft") if size else ():
        model = getattr(config, role)
        if model.shape is not None:
            shaped = dataclasses.replace(model, shape={**model.shape, "vocab_size": size})
            config = dataclasses.replace(config, **{role: shaped})
    return config


def samples_of(folder: Path) -> list[dict[str, Any]]:
    return list({sample["id"]: sample for sample in each_sample(folder / "samples.jsonl")}.values())


def write(
    folder: Path,
    summary: dict[str, Any],
    title: str,
    parts: list[tuple[str, list[list[str]], svg.Plot | None]],
    drawn: svg.Plot | None = None,
) -> None:
    """bench.json, bench.md and plots. `parts`: caption, table, and what is drawn of it; `drawn` stands at the end."""
    summary["peak_bytes_process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    write_json(folder / "bench.json", summary)
    alpha = summary["synthetic_alpha"]
    note = "" if alpha is None else f"Synthetic: each draft was kept with probability {alpha:g}, whatever it was."
    lines = [f"# {title}", "", *([note, ""] if note else [])]
    for caption, rows, plot in parts:
        lines += [*markdown_table(rows), "", caption, ""]
        lines += [*with_plot(folder, plot), ""] if plot is not None else []
        console.print(table_of([[one_line(cell, 40) for cell in row] for row in rows]))
    lines += with_plot(folder, drawn) if drawn is not None else []
    (folder / "bench.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    if note:
        console.print(Text(note, style="bold"))
    console.print(Text(f"report: {folder}/bench.md"))


def finished(folder: Path, summary: dict[str, Any], num_done: int, total: int, interrupted: bool) -> int:
    """The last line, and the exit code."""
    if interrupted:
        console.print(f"interrupted: {num_done} of {total} done. Go on with: specplug resume={folder}")
        return 130
    print(json.dumps(summary))
    return 0


def with_plot(folder: Path, drawn: svg.Plot) -> list[str]:
    """Write it into the folder; lines of Markdown that show it."""
    return [svg.save(drawn, folder), "", drawn.caption]
