"""Every way to decode, timed in one process and in turn, and where the time of a round goes.

specplug recipe=bench
specplug recipe=bench pair=shape_qwen1b5_0b5 recipe.synthetic_alpha=0.8 sampling.temperature=1 recipe.limit=2
specplug -m recipe=bench recipe.batch_size=1,2,4,8

The sides: `generate` of transformers as it is, its assisted generation, on a GPU its static cache; ours with nothing drafted, with
each of `recipe.gammas`, and with the adaptive schedule. Each batch of prompts goes through all sides before the next one does,
`recipe.repeats` times, of which the median counts. Beside the speed: a round's time by target, draft and the rest; the share of what
the memory's speed allows, and of what theory makes of alpha and the costs measured here; first calls and recording beside later calls;
host reads and launches of a round. Writes samples.jsonl, bench.json, bench.md
and plots/bench.svg; the last line of stdout is JSON. `resume=DIR` goes on with a run that was cut short.

Pairs named shape_* have random weights in the shapes of well-known models, so that speed can be measured without a download.
Random models agree on nothing: with `recipe.synthetic_alpha` each draft is kept with that probability, whatever it is. Such
figures say "synthetic", and the rule exists in here alone.
"""

import contextlib
import functools
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.text import Text
from torch import Tensor

from specplug import bench, plots, verify
from specplug.cache import get_cache
from specplug.config import Bench, Config, ConfigError, Drafter
from specplug.console import Bar, console, table_of
from specplug.data import load_rows
from specplug.escape import in_markdown, one_line
from specplug.launches import Counts, count
from specplug.measure import Sides, measure_passes, synchronize, timed_batch
from specplug.pipelines import pipeline_from
from specplug.recipes.evaluate import encode
from specplug.runs import Run, describe_environment, each_sample, write_json
from specplug.schedule import AdaptiveSchedule, FixedSchedule, Schedule

COPIED = 1 << 28  # bytes; more than any cache holds
COUNTED_TOKENS = 48  # of the call whose host reads and launches are counted; all rounds are much the same
NEVER = 1 << 30  # passes before one is recorded
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
    rows = load_rows(config.dataset, recipe.limit)
    pipe, plugin = pipeline_from(config)
    plugin.synchronize = True
    model, drafter = pipe.model, plugin.drafter
    plugin.detach()
    if config.target.shape is not None:
        model.generation_config.eos_token_id = None  # random weights end texts anywhere
    prompts = [resized(encode(pipe.tokenizer, row, config, model), recipe.prompt_tokens) for row in rows]
    batches = [prompts[i : i + recipe.batch_size] for i in range(0, len(prompts), recipe.batch_size)]

    results = Run(
        folder,
        config,
        describe_environment(str(model.device), str(model.dtype).removeprefix("torch."), recipe.batch_size),
    )
    sides = Sides(config, model, pipe.tokenizer, plugin)
    with synthetic(recipe.synthetic_alpha):
        if recipe.synthetic_alpha is not None:
            plugin.verify = bench.SYNTHETIC
        ways = ways_of(config, sides)
        bar = Bar("bench").start(len(batches), len(results.done))
        interrupted, first_calls, counts = False, {}, {}
        try:
            plugin.record_after = 0  # the first calls compile, record and learn
            for name, way in ways.items():
                first_calls[name] = way(batches[0], 0)
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
        console.print("interrupted before the first prompt was done; nothing to report")
        return 130
    costs = None
    if not interrupted:
        widths = sorted({1, *(gamma + 1 for gamma in recipe.gammas)})
        passes, plain_step, draft_step = measure_passes(
            model, drafter, prompts[0], widths, max(recipe.gammas), plugin.kernel, plugin.graph
        )
        costs = bench.Costs(passes, plain_step, draft_step, drafter.costs_nothing, *memory(model, prompts[0]))
    samples = list({sample["id"]: sample for sample in each_sample(folder / "samples.jsonl")}.values())
    summary = bench.summarize(samples, costs, recipe.synthetic_alpha, recipe.batch_size, first_calls, counts)
    summary["peak_bytes_process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    write(folder, summary)
    if interrupted:
        console.print(f"interrupted: {len(results.done)} of {len(batches)} done. Go on with: specplug resume={folder}")
        return 130
    print(json.dumps(summary))
    return 0


class Way(NamedTuple):
    """One way to decode: called with prompts and a seed, it gives what one call on them made, ready for JSON."""

    sides: Sides
    schedule: Schedule | None  # of ours; None is transformers'
    more: dict[str, Any]

    def __call__(self, prompts: list[Tensor], seed: int) -> dict[str, Any]:
        return call(self.sides, prompts, seed, self.schedule, self.more)

    def counted(self, prompts: list[Tensor]) -> Counts | None:
        """Host reads and launches of ours, in a call that is not timed, by the recordings that are there."""
        sides, plugin = self.sides, self.sides.plugin
        if self.schedule is None:
            return None
        arguments = sides.arguments | {"max_new_tokens": min(sides.arguments["max_new_tokens"], COUNTED_TOKENS)}
        plugin.schedule, plugin.record_after, plugin.synchronize = self.schedule, NEVER, False
        plugin.attach(sides.model)
        try:
            decode = functools.partial(timed_batch, sides.model, prompts, sides.pad, 0, **arguments)
            return count(decode, self.schedule, sides.model.device.type)
        finally:
            plugin.detach()
            plugin.record_after, plugin.synchronize = None, True


def ways_of(config: Config, sides: Sides) -> dict[str, Way]:
    """Each way by its name; every one with a plugin of its own counts, over the same drafter."""
    recipe = config.recipe
    assert isinstance(recipe, Bench)
    plugin, model = sides.plugin, sides.model
    ways = {bench.PLAIN: Way(sides, None, {})}
    if (
        sides.assisted is not None and recipe.synthetic_alpha is None
    ):  # theirs would accept what random weights agree on
        ways[bench.ASSISTED] = Way(sides, None, sides.assisted)
    if model.device.type == "cuda" and recipe.batch_size == 1:  # generate compiles where it finds one
        ways[bench.STATIC] = Way(sides, None, {"cache_implementation": "static"})
    for gamma in sorted({0, *recipe.gammas}):
        ways[f"gamma {gamma}"] = Way(sides, FixedSchedule(gamma), {})
    learning = plugin.schedule if isinstance(plugin.schedule, AdaptiveSchedule) else AdaptiveSchedule()
    return ways | {bench.ADAPTIVE: Way(sides, learning, {})}


def call(
    sides: Sides, prompts: list[Tensor], seed: int, schedule: Schedule | None, more: dict[str, Any]
) -> dict[str, Any]:
    """One call. `schedule`: of ours; None for transformers'."""
    model, plugin = sides.model, sides.plugin
    if schedule is not None:
        plugin.schedule = schedule
        plugin.attach(model)
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    try:
        made = sides.timed(prompts, seed, **more)
    finally:
        plugin.detach()
    synchronize(model)
    return {
        "new_tokens": sum(len(each.ids) for each in made),
        "seconds": sum(each.seconds for each in made),
        "seconds_first": made[0].seconds_first,
        "stats": plugin.last.to_dict() if schedule is not None and plugin.last is not None else None,
        "peak_bytes": torch.cuda.max_memory_allocated(model.device) if model.device.type == "cuda" else None,
        "ids": [each.ids for each in made],
    }


def measured(ways: dict[str, Way], prompts: list[Tensor], seed: int, repeats: int) -> dict[str, Any]:
    """All ways in turn, and again; of each the repeat with the median time, and whether its ids are those of plain decoding."""
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            made[name].append(way(prompts, seed))
    chosen = {name: sorted(each, key=lambda one: one["seconds"])[(repeats - 1) // 2] for name, each in made.items()}
    plain = chosen[bench.PLAIN]["ids"]
    return {
        "prompt_tokens": [ids.shape[1] for ids in prompts],
        "ways": {
            name: {key: value for key, value in each.items() if key != "ids"} | {"same_ids": each["ids"] == plain}
            for name, each in chosen.items()
        },
    }


@contextlib.contextmanager
def synthetic(alpha: float | None) -> Iterator[None]:
    """Within it there is a rule that keeps drafts with a probability that was asked for."""
    if alpha is not None:
        verify.RULES[bench.SYNTHETIC] = functools.partial(bench.verify_synthetic, alpha)
    try:
        yield
    finally:
        verify.RULES.pop(bench.SYNTHETIC, None)


def resized(ids: Tensor, length: int | None) -> Tensor:
    """(1, T) ids cut, or repeated, to so many."""
    if length is None:
        return ids
    return ids.repeat(1, -(-length // ids.shape[1]))[:, -length:]


def memory(model: Any, ids: Tensor) -> tuple[int, float]:
    """Bytes that a pass behind `ids` has to read, and bytes that this device's memory moves in a second."""
    embeddings = model.get_input_embeddings().weight
    tied = embeddings is model.get_output_embeddings().weight
    weights = sum(each.numel() * each.element_size() for each in model.parameters() if tied or each is not embeddings)
    with torch.no_grad():
        cache = get_cache(model(input_ids=ids, use_cache=True))
    held = sum(each.numel() * each.element_size() for layer in cache.layers for each in (layer.keys, layer.values))
    source = torch.ones(COPIED // 4, device=model.device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        synchronize(model)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(model)
        seconds.append(time.perf_counter() - started)
    return weights + held, 2 * COPIED / min(seconds)


def write(folder: Path, summary: dict[str, Any]) -> None:
    write_json(folder / "bench.json", summary)
    alpha = summary["synthetic_alpha"]
    note = "" if alpha is None else f"Synthetic: each draft was kept with probability {alpha:g}, whatever it was."
    lines = ["# Ways to decode", "", *([note, ""] if note else [])]
    tables = {
        "Medians of repeats, all tokens over all seconds. Decoding leaves out the prompt's pass and the first token.": bench.table(
            summary
        ),
        CALLS: bench.table_of_calls(summary),
    }
    for caption, rows in tables.items():
        lines += [*in_rows(rows), "", caption, ""]
        console.print(table_of([[one_line(cell, 40) for cell in row] for row in rows]))
    lines += with_plot(folder, plots.ways(summary))
    (folder / "bench.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if note:
        console.print(Text(note, style="bold"))
    console.print(Text(f"report: {folder}/bench.md"))


def in_rows(rows: list[list[str]]) -> list[str]:
    """A table in Markdown, header first."""
    cells = [[in_markdown(cell) for cell in row] for row in rows]
    cells.insert(1, ["---"] * len(rows[0]))
    return ["| " + " | ".join(row) + " |" for row in cells]


def with_plot(folder: Path, drawn: plots.Plot) -> list[str]:
    """Write it into the folder; lines of Markdown that show it."""
    (folder / "plots").mkdir(exist_ok=True)
    (folder / "plots" / f"{drawn.name}.svg").write_text(plots.standalone(drawn), encoding="utf-8")
    return [f"![{drawn.title}](plots/{drawn.name}.svg)", "", drawn.caption]
