"""Speed, exactness and task score of a draft/target pair on a data set, measured side by side.

specplug                                                       the embedded pair on the embedded data set
specplug pair=lookup target=custom target.name_or_path=MODEL.gguf dataset=spec_bench dataset.path=question.jsonl

Per prompt, in turn: plain `generate`, transformers' own assisted generation with the same pair, and ours. Writes
samples.jsonl, summary.json and report.md into the run folder and prints the summary as the last line of stdout. Exit
code 1 if an output differs from plain decoding by more than rounding explains; 130 after Ctrl-C, with what is done kept.
"""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from specplug import measure
from specplug.config import Config, ConfigError, Drafter, Evaluate
from specplug.console import Bar, console
from specplug.data import Row, load_rows, prompt_ids
from specplug.drafters.model import ModelDrafter
from specplug.measure import Timed
from specplug.metrics.exact_match import exact_match
from specplug.pipelines import generate_arguments, pipeline_from
from specplug.plugin import SpeculativeProcessor
from specplug.report import headline, rows, write_reports
from specplug.runs import Run, describe_environment, write_json
from specplug.stats import Stats

log = logging.getLogger(__name__)


def run(config: Config, folder: Path) -> int:
    recipe = config.recipe
    assert isinstance(recipe, Evaluate)
    if config.draft.drafter is Drafter.none:
        raise ConfigError("draft=none: evaluate compares a draft with plain decoding; name a draft, or draft=lookup")
    samples = load_rows(config.dataset, recipe.limit)
    pipe, plugin = pipeline_from(config)
    plugin.synchronize = True
    model, tokenizer = pipe.model, pipe.tokenizer
    prompts = [encode(tokenizer, row, config, model) for row in samples]

    environment = describe_environment(str(model.device), str(model.dtype).removeprefix("torch."))
    environment["bytes_target"] = model.get_memory_footprint()
    drafter = plugin.drafter
    environment["bytes_draft"] = drafter.model.get_memory_footprint() if isinstance(drafter, ModelDrafter) else 0
    results = Run(folder, config, environment)
    gamma = plugin.schedule.next_gamma()
    sides = Sides(config, model, tokenizer, plugin)
    for ids in prompts[: recipe.warmup]:
        sides.take_turns(ids, config.seed)
    costs = measure.measure_costs(model, drafter, prompts[0], gamma)
    write_json(
        folder / "costs.json",
        asdict(costs) | {"cost_coefficient": costs.cost_coefficient, "width_cost": costs.width_cost},
    )

    bar = Bar("evaluate").start(len(samples), sum(row.id in results.done for row in samples))
    interrupted = False
    try:
        for number, (row, ids) in enumerate(zip(samples, prompts, strict=True)):
            if row.id not in results.done:
                results.append(sides.sample(row, ids, config.seed + number))
                bar.advance(number + 1, sides.progress())
    except KeyboardInterrupt:
        interrupted = True
    finally:
        bar.stop()
        results.close()
    if not results.done:
        console.print("interrupted before the first sample was done; nothing to report")
        return 130
    summary = write_reports(folder)
    show(summary)
    if interrupted:
        console.print(f"interrupted: {len(results.done)} of {len(samples)} done. Go on with: specplug resume={folder}")
        return 130
    print(json.dumps(summary, ensure_ascii=False))
    if summary["mismatches"]:
        console.print(f"output differs from plain decoding in: {', '.join(summary['mismatches'])}", style="bold red")
        return 1
    return 0


def encode(tokenizer: Any, row: Row, config: Config, model: Any) -> torch.Tensor:
    """(1, T) ids. Raises ConfigError if prompt and answer do not fit into the target's context."""
    ids = prompt_ids(tokenizer, row, config.dataset)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    new = config.sampling.max_new_tokens
    if longest is not None and len(ids) + new > longest:
        raise ConfigError(
            f"dataset={config.dataset.name}: prompt {row.id} has {len(ids)} tokens, with sampling.max_new_tokens={new} that"
            f" is more than the target's context of {longest}; lower max_new_tokens, or leave the prompt out"
        )
    return torch.tensor([ids], device=model.device)


class Sides:
    """The three ways to decode one prompt."""

    def __init__(self, config: Config, model: Any, tokenizer: Any, plugin: SpeculativeProcessor) -> None:
        self.config, self.model, self.tokenizer, self.plugin = config, model, tokenizer, plugin
        self.arguments = generate_arguments(config)
        self.assisted: dict[str, Any] | None = None
        if config.recipe.compare_assisted and isinstance(plugin.drafter, ModelDrafter):  # type: ignore[attr-defined]
            self.assisted = {"assistant_model": plugin.drafter.model}
        penalty = self.arguments.get("repetition_penalty", model.generation_config.repetition_penalty)
        processors = [RepetitionPenaltyLogitsProcessor(penalty)] if penalty not in (None, 1.0) else []
        self.processors = LogitsProcessorList(processors)  # what a greedy call has of the configuration's processors
        self.total, self.tokens, self.seconds = Stats(), 0, 0.0

    def take_turns(self, ids: torch.Tensor, seed: int) -> dict[str, Timed | None]:
        self.plugin.detach()
        plain = measure.timed_generate(self.model, ids, seed, **self.arguments)
        assisted = self.measure_assisted(ids, seed)
        self.plugin.attach(self.model)
        ours = measure.timed_generate(self.model, ids, seed, **self.arguments)
        return {"plain": plain, "assisted": assisted, "speculative": ours}

    def measure_assisted(self, ids: torch.Tensor, seed: int) -> Timed | None:
        if self.assisted is None:
            return None
        try:
            return measure.timed_generate(self.model, ids, seed, **self.arguments, **self.assisted)
        except (ValueError, RuntimeError, AttributeError) as error:  # theirs has limits of its own: say so, go on
            log.warning("transformers' assisted generation is left out, it fails here: %s", str(error).splitlines()[0])
            self.assisted = None
            return None

    def sample(self, row: Row, ids: torch.Tensor, seed: int) -> dict[str, Any]:
        """Everything that is kept of one prompt, ready for JSON."""
        measured = self.take_turns(ids, seed)
        plain, ours = measured["plain"], measured["speculative"]
        assert plain is not None and ours is not None and self.plugin.last is not None
        verdict = measure.Verdict("not_compared")
        if not self.arguments["do_sample"]:
            verdict = measure.compare(self.model, ids, plain.ids, ours.ids, self.processors)
        texts = {
            name: self.tokenizer.decode(side.ids, skip_special_tokens=True) for name, side in measured.items() if side
        }
        score = None
        if self.config.dataset.scored and row.reference is not None:
            part = self.config.dataset.answer
            score = {
                "baseline": exact_match(texts["plain"], row.reference, part),
                "speculative": exact_match(texts["speculative"], row.reference, part),
            }
        record: dict[str, Any] = {"id": row.id, "category": row.category, "seed": seed, "prompt_tokens": ids.shape[1]}
        for name, side in measured.items():
            record[name] = side and {
                "new_tokens": len(side.ids),
                "seconds": side.seconds,
                "seconds_first": side.seconds_first,
                "token_ids": side.ids,
                "text": texts[name],
            }
        record["speculative"]["stats"] = self.plugin.last.to_dict()
        record["speculative"]["engine"] = self.plugin.last.engine
        self.total += self.plugin.last
        self.tokens, self.seconds = self.tokens + len(ours.ids), self.seconds + ours.seconds
        return record | {"exactness": asdict(verdict), "reference": row.reference, "score": score}

    def progress(self) -> str:
        length = self.total.mean_acceptance_length
        return f"{self.tokens / self.seconds:.0f} tok/s, {length or 1:.2f} tokens per target pass"


def show(summary: dict[str, Any]) -> None:
    from rich.table import Table

    header, *body = rows(summary)
    table = Table(*header)
    for row in body:
        table.add_row(*row, style="bold" if row[0] == "all" else None)
    console.print(table)
    for line in headline(summary):
        console.print(line)
    console.print(f"report: {summary['folder']}/report.md")
