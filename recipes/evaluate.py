"""Speed, exactness and task score of a draft/target pair on a data set, measured side by side.

specplug                                                       the embedded pair on the embedded data set
specplug pair=lookup target=custom target.name_or_path=MODEL.gguf dataset=spec_bench dataset.path=question.jsonl

Per prompt, in turn: plain `generate`, transformers' own assisted generation with the same pair, and ours. Writes
samples.jsonl, trace.jsonl, summary.json, report.md and report.html into the run folder and prints the summary as the last line of stdout. Exit
code 1 if an output differs from plain decoding by more than rounding explains, or if every prompt failed; 130 after Ctrl-C, with
what is done kept. Rows are streamed: neither they nor what is measured on them is held in memory.
"""

import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from specplug import measure, tracker
from specplug.config import Config, ConfigError, Drafter, Evaluate, Metric, OnError, first_line
from specplug.console import Bar, console, table_of
from specplug.data import History, Row, conversations, prompt_ids
from specplug.escape import one_line
from specplug.kernel import swapped
from specplug.metrics.scoring import Scorer
from specplug.models import context_length
from specplug.pipelines import length_filter, pipeline_from
from specplug.plugin import SpeculativeProcessor, models_of
from specplug.report import SoFar, headline, rows, write_reports
from specplug.round_costs import measure_rounds
from specplug.runs import Run, append_line, drop_partial_line, each_sample, environment_of, write_json
from specplug.schedule import AdaptiveSchedule
from specplug.tracker import Tracker

log = logging.getLogger(__name__)

COSTS_OF = 8  # drafts a round that costs are measured for where a schedule chooses, at least


def run(config: Config, folder: Path) -> int:
    recipe = config.recipe
    assert isinstance(recipe, Evaluate)
    if config.draft.drafter is Drafter.none:
        raise ConfigError("draft=none: evaluate compares a draft with plain decoding; name a draft, or draft=lookup")
    tracker.check_installed(config)
    total = look_over(config)
    pipe, plugin = pipeline_from(config)
    plugin.synchronize = True
    model, tokenizer = pipe.model, pipe.tokenizer
    first = first_prompts(config, tokenizer, model, max(recipe.warmup, 1))

    with swapped(plugin.kernel, model) as own_kernel:
        kernel = "numba" if own_kernel else "torch"
    environment = environment_of(model, recipe.batch_size) | {
        "kernel": kernel,
        "bytes_target": model.get_memory_footprint(),
        "bytes_draft": bytes_beside(plugin.drafter, model),
    }
    results = Run(folder, config, environment)
    sides = measure.Sides(config, model, tokenizer, plugin)
    for ids in first[: recipe.warmup]:
        sides.take_turns([ids], config.seed)
    write_json(folder / "costs.json", costs_of(plugin, model, first[0]))

    bar = Bar("evaluate").start(total, len(results.done))
    tracking = tracker.start(config, folder)
    evaluation = Evaluation(config, sides, results, bar, tracking)
    interrupted = False
    try:
        evaluation.run()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        bar.stop()
        results.close()
        if isinstance(plugin.schedule, AdaptiveSchedule) and not plugin.schedule.frozen:
            plugin.schedule.save(folder / "schedule.json")
    if interrupted and not results.done:
        tracking.finish()
        console.print("interrupted before the first sample was done; nothing to report")
        return 130
    try:
        if not interrupted:
            evaluation.write_traces()
    except KeyboardInterrupt:
        interrupted = True
    summary = write_reports(folder)
    tracking.log(len(results.done), {"summary": summary})
    tracking.finish()
    return finished(summary, len(results.done), total, interrupted, folder)


def finished(summary: dict[str, Any], num_done: int, total: int | None, interrupted: bool, folder: Path) -> int:
    """Print the result; returns the exit code."""
    show(summary)
    if interrupted:
        of = "" if total is None else f" of {total}"
        console.print(f"interrupted: {num_done}{of} done. Go on with: specplug resume={folder}")
        return 130
    print(json.dumps(summary, ensure_ascii=False))
    if not num_done:
        console.print(Text(f"every prompt failed, the first: {summary['errors'][0]['reason']}", style="bold red"))
        return 1
    if summary["mismatches"]:
        differing = one_line(", ".join(summary["mismatches"]))
        console.print(Text(f"output differs from plain decoding in: {differing}", style="bold red"))
        return 1
    return 0


def source(config: Config) -> Iterator[list[Row]]:
    """Conversations, from the beginning; a run goes over them more than once and keeps none."""
    assert isinstance(config.recipe, Evaluate)
    return conversations(config.dataset, config.recipe.limit, tokenizer=length_filter(config))


def look_over(config: Config) -> int | None:
    """How many prompts there are, after a look at each, so that what is wrong with one is said before anything runs. Of a hub,
    whose rows would be loaded twice, only the first is looked at, and nobody knows how many there are. Raises ConfigError."""
    scorer, known = Scorer(config.dataset), config.dataset.path is not None or config.dataset.corpus
    count, scored = 0, 0
    for turns in source(config) if known else itertools.islice(source(config), 1):
        count += len(turns)
        scored += sum(map(scorer.scores, turns))
    if known and config.dataset.metric is not Metric.none and not scored:
        raise ConfigError(
            f"dataset.metric={config.dataset.metric.name}: no row has a reference; name its column with"
            " dataset.reference_column, or take dataset.metric=none"
        )
    return count if known else None


def first_prompts(config: Config, tokenizer: Any, model: Any, count: int) -> list[torch.Tensor]:
    """The first that fit, (1, T) each. Raises the ConfigError of the very first if none does."""
    prompts: list[torch.Tensor] = []
    problem: ConfigError | None = None
    for turns in source(config):
        try:
            prompts.append(encode(tokenizer, turns[0], config, model))
        except ConfigError as error:
            problem = problem or error
        if len(prompts) == count:
            break
    if not prompts:
        assert problem is not None
        raise problem
    return prompts


class Evaluation:
    """Goes through the rows and keeps what has to be kept of them: ids, and the few that are going to be traced."""

    def __init__(self, config: Config, sides: measure.Sides, results: Run, bar: Bar, tracking: Tracker) -> None:
        assert isinstance(config.recipe, Evaluate)
        self.config, self.recipe, self.sides, self.results, self.bar = config, config.recipe, sides, results, bar
        self.tracking, self.so_far = tracking, SoFar()
        for sample in each_sample(results.samples_file):
            if "error" not in sample:
                self.so_far.add(sample)
        self.to_trace: list[tuple[int, list[Row]]] = []  # number of a row, and its conversation up to it

    def run(self) -> None:
        group: list[list[Row]] = []  # conversations whose last turns are decoded together
        number = place = 0  # of the group's first row, of the next row
        seen: Counter[str] = Counter()
        for turns in source(self.config):
            for k, row in enumerate(turns):
                # A later turn needs the answers to those before it, so they are not decoded with it.
                if len(group) == self.recipe.batch_size or any(row.follows == other[-1].id for other in group):
                    self.measure(group, number)
                    number, group = place, []
                group.append(turns[: k + 1])
                seen[row.category] += 1
                if seen[row.category] <= self.recipe.trace:
                    self.to_trace.append((place, turns[: k + 1]))
                place += 1
        self.measure(group, number)

    def measure(self, group: list[list[Row]], number: int) -> None:
        """Rows that are decoded together, each at the end of its conversation so far. `number` of the first sets the seed."""
        if all(turns[-1].id in self.results.done for turns in group):
            return
        rows, prompts = [], []
        for turns in group:
            try:
                prompts.append(self.prompt(turns))
                rows.append(turns[-1])
            except KeyError:
                self.failed([turns[-1]], ConfigError("the turn before it failed"))
            except ConfigError as error:
                self.failed([turns[-1]], error)
        if not rows:
            return
        try:
            records = self.sides.samples(rows, prompts, self.config.seed + number)
        except Exception as error:  # whatever it is, the other prompts may be fine
            self.failed(rows, error)
            return
        for record in records:
            if record["id"] not in self.results.done:
                self.results.append(record)
                self.so_far.add(record)
        self.bar.advance(len(self.results.done), *self.so_far.told())
        self.tracking.log(len(self.results.done), self.so_far.numbers())

    def prompt(self, turns: list[Row]) -> torch.Tensor:
        """(1, T) ids of the last turn behind those before it, each with the answer that plain decoding gave."""
        history: History = [(turn.prompt, self.results.read(turn.id)["plain"]["text"]) for turn in turns[:-1]]
        return encode(self.sides.tokenizer, turns[-1], self.config, self.sides.model, history)

    def failed(self, rows: list[Row], error: Exception) -> None:
        """Write down that these failed, or end the run, as the recipe says."""
        reason = first_line(error)
        if not isinstance(error, ConfigError):
            reason = f"{type(error).__name__}: {reason}"
        names = ", ".join(row.id for row in rows)
        if self.recipe.on_error is OnError.stop:
            raise ConfigError(f"{names}: {reason}; recipe.on_error=record leaves such prompts out") from error
        log.warning("%s: left out: %s", names, reason)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what a pass that ran out of memory left
        for row in rows:
            self.results.append({"id": row.id, "category": row.category, "error": reason})

    def write_traces(self) -> None:
        """trace.jsonl for the first prompts of each category in turn. Last of all, since what it does must not be timed."""
        file = self.results.folder / "trace.jsonl"
        drop_partial_line(file)
        traced = {trace["id"] for trace in each_sample(file)}
        kept = [each for each in self.to_trace if each[1][-1].id in self.results.done]
        chosen = [kept[k] for k in one_of_each([turns[-1].category for _, turns in kept])[: self.recipe.trace]]
        missing = [each for each in chosen if each[1][-1].id not in traced]
        bar = Bar("trace").start(len(missing))
        try:
            for done, (number, turns) in enumerate(missing, start=1):
                text = self.results.read(turns[-1].id)["speculative"]["text"]
                ids = self.prompt(turns)
                append_line(file, self.sides.trace(turns[-1], ids, self.config.seed + number, text))
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


def costs_of(plugin: SpeculativeProcessor, model: Any, ids: torch.Tensor) -> dict[str, float]:
    """What the passes of a round cost behind this prompt, with as many drafts as were made in the warm-up."""
    shape = plugin.schedule.tree
    gamma = max(plugin.stats.drafted, default=1) if shape is None else shape.size
    if isinstance(plugin.schedule, AdaptiveSchedule):  # which may have drafted nothing yet
        gamma = max(gamma, min(COSTS_OF, plugin.schedule.max_gamma))
    return measure_rounds(model, plugin.drafter, ids, [gamma], plugin.kernel, plugin.graph).to_dict(gamma)


def bytes_beside(drafter: Any, target: Any) -> int:
    """Weights that the drafts need and the target does not have already: an early exit shares all of them."""
    shared = {weights.data_ptr() for weights in target.parameters()}
    own = {w.data_ptr(): w.numel() * w.element_size() for model in models_of(drafter) for w in model.parameters()}
    return sum(size for address, size in own.items() if address not in shared)


def encode(tokenizer: Any, row: Row, config: Config, model: Any, history: History | None = None) -> torch.Tensor:
    """(1, T) ids. Raises ConfigError if prompt and answer do not fit into the target's context."""
    ids = prompt_ids(tokenizer, row, config.dataset, history)
    longest = context_length(model)
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
