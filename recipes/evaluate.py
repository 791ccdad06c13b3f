"""Speed, exactness and task score of a draft/target pair on a data set, measured side by side.

specplug                                                       the embedded pair on the embedded data set
specplug pair=lookup target=custom target.name_or_path=MODEL.gguf dataset=spec_bench dataset.path=question.jsonl

Per prompt, in turn: plain `generate`, transformers' own assisted generation with the same pair, and ours. Writes
samples.jsonl, trace.jsonl, summary.json, report.md and report.html into the run folder and prints the summary as the last line of stdout. Exit
code 1 if an output differs from plain decoding by more than rounding explains; 130 after Ctrl-C, with what is done kept.
"""

import json
import logging
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from specplug import measure
from specplug.config import Config, ConfigError, Drafter, Evaluate
from specplug.console import Bar, console, table_of
from specplug.data import History, Row, load_rows, prompt_ids
from specplug.drafters.model import ModelDrafter
from specplug.escape import one_line
from specplug.kernel import swapped
from specplug.pipelines import pipeline_from
from specplug.report import headline, rows, so_far, write_reports
from specplug.runs import Run, append_line, describe_environment, drop_partial_line, read_samples, write_json
from specplug.schedule import AdaptiveSchedule

log = logging.getLogger(__name__)


def run(config: Config, folder: Path) -> int:
    recipe = config.recipe
    assert isinstance(recipe, Evaluate)
    if config.draft.drafter is Drafter.none:
        raise ConfigError("draft=none: evaluate compares a draft with plain decoding; name a draft, or draft=lookup")
    samples = load_rows(config.dataset, recipe.limit, all_turns=True)
    pipe, plugin = pipeline_from(config)
    plugin.synchronize = True
    model, tokenizer = pipe.model, pipe.tokenizer
    first = [encode(tokenizer, row, config, model) for row in samples if row.follows is None]

    environment = describe_environment(str(model.device), str(model.dtype).removeprefix("torch."))
    with swapped(plugin.kernel, model) as own_kernel:
        environment["kernel"] = "numba" if own_kernel and torch.get_num_threads() == 1 else "torch"
    environment["bytes_target"] = model.get_memory_footprint()
    drafter = plugin.drafter
    environment["bytes_draft"] = bytes_beside(drafter, model)
    results = Run(folder, config, environment)
    sides = measure.Sides(config, model, tokenizer, plugin)
    for ids in first[: recipe.warmup]:
        sides.take_turns(ids, config.seed)
    shape = plugin.schedule.tree
    gamma = max(plugin.stats.drafted, default=1) if shape is None else shape.size
    costs = measure.measure_costs(model, drafter, first[0], gamma, plugin.kernel)
    write_json(
        folder / "costs.json",
        asdict(costs) | {"cost_coefficient": costs.cost_coefficient, "width_cost": costs.width_cost},
    )

    bar = Bar("evaluate").start(len(samples), sum(row.id in results.done for row in samples))
    interrupted = False
    try:
        for number, row in enumerate(samples):
            if row.id not in results.done:
                try:
                    ids = encode(tokenizer, row, config, model, conversation(row, samples, results.done))
                except (ConfigError, KeyError) as error:  # first turns were looked at before
                    log.warning("%s: left out, the conversation has become too long: %s", row.id, error)
                    continue
                results.append(sides.sample(row, ids, config.seed + number))
                bar.advance(number + 1, *so_far(list(results.done.values())))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        bar.stop()
        results.close()
        if isinstance(plugin.schedule, AdaptiveSchedule) and not plugin.schedule.frozen:
            plugin.schedule.save(folder / "schedule.json")
    if not results.done:
        console.print("interrupted before the first sample was done; nothing to report")
        return 130
    try:
        if not interrupted:
            write_traces(sides, samples, results, config)
    except KeyboardInterrupt:
        interrupted = True
    summary = write_reports(folder)
    show(summary)
    if interrupted:
        console.print(f"interrupted: {len(results.done)} of {len(samples)} done. Go on with: specplug resume={folder}")
        return 130
    print(json.dumps(summary, ensure_ascii=False))
    if summary["mismatches"]:
        differing = one_line(", ".join(summary["mismatches"]))
        console.print(Text(f"output differs from plain decoding in: {differing}", style="bold red"))
        return 1
    return 0


def write_traces(sides: measure.Sides, samples: list[Row], results: Run, config: Config) -> None:
    """trace.jsonl for the first prompts of each category in turn. Last of all, since what it does must not be timed."""
    assert isinstance(config.recipe, Evaluate)
    file = results.folder / "trace.jsonl"
    drop_partial_line(file)
    traced = {trace["id"] for trace in read_samples(file)}
    chosen = one_of_each([row.category for row in samples])[: config.recipe.trace]
    missing = [number for number in chosen if samples[number].id not in traced]
    bar = Bar("trace").start(len(missing))
    try:
        for done, number in enumerate(missing, start=1):
            row = samples[number]
            text = results.done[row.id]["speculative"]["text"]
            ids = encode(sides.tokenizer, row, config, sides.model, conversation(row, samples, results.done))
            append_line(file, sides.trace(row, ids, config.seed + number, text))
            bar.advance(done)
    finally:
        bar.stop()


def one_of_each(categories: list[str]) -> list[int]:
    """Indices in such an order that the first of every category come first, then the second of every one, and so on."""
    before: Counter[str] = Counter()
    place = []
    for category in categories:
        place.append(before[category])
        before[category] += 1
    return sorted(range(len(categories)), key=place.__getitem__)


def bytes_beside(drafter: Any, target: Any) -> int:
    """Weights that the drafts need and the target does not have already: an early exit shares all of them."""
    shared = {weights.data_ptr() for weights in target.parameters()}
    models = [each.model for each in getattr(drafter, "members", [drafter]) if isinstance(each, ModelDrafter)]
    own = {w.data_ptr(): w.numel() * w.element_size() for model in models for w in model.parameters()}
    return sum(size for address, size in own.items() if address not in shared)


def conversation(row: Row, rows: list[Row], done: dict[str, Any]) -> History:
    """The turns before this one, each with the answer that plain decoding gave."""
    by_id = {each.id: each for each in rows}
    turns: History = []
    while row.follows is not None:
        row = by_id[row.follows]
        turns.insert(0, (row.prompt, done[row.id]["plain"]["text"]))
    return turns


def encode(tokenizer: Any, row: Row, config: Config, model: Any, history: History | None = None) -> torch.Tensor:
    """(1, T) ids. Raises ConfigError if prompt and answer do not fit into the target's context."""
    ids = prompt_ids(tokenizer, row, config.dataset, history)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    new = config.sampling.max_new_tokens
    if longest is not None and len(ids) + new > longest:
        raise ConfigError(
            f"dataset={config.dataset.name}: prompt {row.id} has {len(ids)} tokens, with sampling.max_new_tokens={new} that"
            f" is more than the target's context of {longest}; lower max_new_tokens, or leave the prompt out"
        )
    return torch.tensor([ids], device=model.device)


def show(summary: dict[str, Any]) -> None:
    console.print(table_of([[one_line(cell, 40) for cell in row] for row in rows(summary)]))
    for line in headline(summary):
        console.print(line)
    console.print(Text(f"report: {summary['folder']}/report.html and report.md"))
