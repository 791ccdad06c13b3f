"""Measuring one prompt on several sides (plain, transformers' assisted, ours), and the verdict on exactness.

Token ids are counted, never re-tokenised text. Knows nothing about files.
"""

import logging
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor
from transformers.generation.streamers import BaseStreamer

from specplug.config import Config, Walk, first_line
from specplug.data import Row, pad_of, until_end
from specplug.drafters.chain import ChainDrafter
from specplug.drafters.cross_vocab import CrossVocabDrafter
from specplug.drafters.lookup import LookupDrafter
from specplug.drafters.model import ModelDrafter
from specplug.drafters.suffix import SuffixDrafter
from specplug.drafters.translate import common_prefix
from specplug.metrics.scoring import Scorer, references
from specplug.pipelines import generate_arguments
from specplug.plugin import SpeculativeProcessor
from specplug.round_costs import synchronize
from specplug.stats import Call
from specplug.trace import Trace, describe

log = logging.getLogger(__name__)

PROMPT_LOOKUP_TOKENS = 10  # of transformers' own prompt lookup, the value of its documentation

# A divergence is a tie where the two tokens' logits differ by at most this many roundings of the largest logit. fp32 sums
# are rounded at every step; half precision is rounded once a layer, its sums are fp32.
TIE_ROUNDINGS = {torch.float32: 64, torch.float16: 4, torch.bfloat16: 4}


class FirstToken(BaseStreamer):
    """Notes when the first new token is there. The prompt comes first; every side gets the same streamer."""

    def __init__(self) -> None:
        self.puts, self.at = 0, 0.0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


@dataclass
class Timed:
    ids: list[int]  # the new tokens
    seconds: float  # of the whole call; of a batch an equal share
    seconds_first: float | None  # until the first new token; not known of a batch
    stats: Call | None = None  # of our side; of a batch those of all rows, with the first


def timed_generate(model: Any, ids: Tensor, seed: int, **arguments: Any) -> Timed:
    """One `generate` call on (1, T) ids from a fixed state of the random stream."""
    torch.manual_seed(seed)
    first = FirstToken()
    synchronize(model)
    started = time.perf_counter()
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=first, **arguments)
    synchronize(model)
    seconds = time.perf_counter() - started
    return Timed(output[0, ids.shape[1] :].tolist(), seconds, first.at - started)


def timed_batch(model: Any, prompts: list[Tensor], pad: int, seed: int, **arguments: Any) -> list[Timed]:
    """One call on several (1, T) prompts, padded on the left. Without a streamer, which would have to see one token of every
    sequence at a time."""
    width = max(ids.shape[1] for ids in prompts)
    ids = torch.cat([functional.pad(each, (width - each.shape[1], 0), value=pad) for each in prompts])  # (B, T)
    mask = torch.stack([torch.arange(width) >= width - each.shape[1] for each in prompts]).long().to(ids.device)
    torch.manual_seed(seed)
    synchronize(model)
    started = time.perf_counter()
    output = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=pad, **arguments)
    synchronize(model)
    share = (time.perf_counter() - started) / len(prompts)
    eos = model.generation_config.eos_token_id
    return [Timed(until_end(row[width:].tolist(), eos), share, None) for row in output]


@dataclass
class Verdict:
    kind: str  # identical, tie or mismatch
    position: int | None = None  # first new token that differs
    gap: float | None = None  # of the target's logits for the two tokens there
    tolerance: float | None = None


def compare(
    model: PreTrainedModel, prompt: Tensor, plain: list[int], ours: list[int], processors: Any = None
) -> Verdict:
    """Equal ids are identical. Else the first difference is looked at: can rounding explain it?

    Args:
        prompt: (1, T). plain, ours: new tokens of the two sides.
        processors: the logits processors of the call, if any.
    """
    if plain == ours:
        return Verdict("identical")
    position = common_prefix(plain, ours)
    if position == min(len(plain), len(ours)):  # one is the other's beginning: no choice of tokens explains that
        return Verdict("mismatch", position)
    prefix = torch.cat([prompt, prompt.new_tensor([plain[:position]])], dim=1)
    with torch.no_grad():
        logits = model(input_ids=prefix).logits[:, -1].float()  # (1, V)
    scores = (logits if processors is None else processors(prefix, logits.clone()))[0]
    gap = abs(float(scores[plain[position]] - scores[ours[position]]))
    dtype = model.dtype if model.dtype in TIE_ROUNDINGS else torch.float32
    tolerance = TIE_ROUNDINGS[dtype] * torch.finfo(dtype).eps * float(logits.abs().max())
    return Verdict("tie" if gap <= tolerance else "mismatch", position, gap, tolerance)


def member_counts(drafter: Any) -> dict[str, dict[str, int]]:
    """What each member of a chain proposed so far, by its place and name; empty for other drafters."""
    if not isinstance(drafter, ChainDrafter):
        return {}
    pairs = zip(drafter.members, drafter.counts, strict=True)
    return {f"{place} {member.name}": dict(counts) for place, (member, counts) in enumerate(pairs, start=1)}


def processors_of(model: Any, arguments: dict[str, Any]) -> LogitsProcessorList:
    """What a greedy call has of the configuration's processors."""
    penalty = arguments.get("repetition_penalty", model.generation_config.repetition_penalty)
    return LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)] if penalty not in (None, 1.0) else [])


SEVERITY = ("identical", "tie", "mismatch")


class Sides:
    """The three ways to decode prompts."""

    def __init__(self, config: Config, model: Any, tokenizer: Any, plugin: SpeculativeProcessor) -> None:
        self.config, self.model, self.tokenizer, self.plugin = config, model, tokenizer, plugin
        self.arguments, self.scorer = generate_arguments(config), Scorer(config.dataset)
        recipe: Any = config.recipe
        self.repeats = recipe.repeats
        self.pad = pad_of(tokenizer)
        self.assisted: dict[str, Any] | None = None
        if recipe.compare_assisted and recipe.batch_size > 1:
            log.warning("transformers' assisted generation is left out, it takes one sequence: recipe.batch_size=1")
        elif recipe.compare_assisted and isinstance(plugin.drafter, ModelDrafter):
            self.assisted = {"assistant_model": plugin.drafter.model}
            if isinstance(plugin.drafter, CrossVocabDrafter):
                self.assisted |= {"tokenizer": tokenizer, "assistant_tokenizer": plugin.drafter.tokenizer}
        elif recipe.compare_assisted and isinstance(plugin.drafter, (LookupDrafter, SuffixDrafter)):
            self.assisted = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
        self.processors = processors_of(model, self.arguments)

    def take_turns(self, prompts: list[Tensor], seed: int) -> dict[str, list[Timed] | None]:
        """Each side once, on (1, T) prompts that are decoded together."""
        self.plugin.detach(release=False)
        plain = self.timed(prompts, seed)
        assisted = self.measure_assisted(prompts, seed)
        self.plugin.attach(self.model)
        ours = self.timed(prompts, seed)
        assert self.plugin.last is not None
        for timed in ours:
            timed.stats = self.plugin.last if timed is ours[0] else Call(engine=self.plugin.last.engine)
        return {"plain": plain, "assisted": assisted, "speculative": ours}

    def timed(self, prompts: list[Tensor], seed: int, **more: Any) -> list[Timed]:
        if len(prompts) == 1:
            return [timed_generate(self.model, prompts[0], seed, **self.arguments, **more)]
        return timed_batch(self.model, prompts, self.pad, seed, **self.arguments, **more)

    def measure_assisted(self, prompts: list[Tensor], seed: int) -> list[Timed] | None:
        if self.assisted is None:
            return None
        try:
            return self.timed(prompts, seed, **self.assisted)
        except (ValueError, RuntimeError, AttributeError) as error:  # theirs has limits of its own: say so, go on
            log.warning("transformers' assisted generation is left out, it fails here: %s", first_line(error))
            self.assisted = None
            return None

    def samples(self, rows: list[Row], prompts: list[Tensor], seed: int) -> list[dict[str, Any]]:
        """Everything that is kept of prompts that are decoded together, ready for JSON."""
        before = member_counts(self.plugin.drafter)
        runs = [self.take_turns(prompts, seed) for _ in range(self.repeats)]
        after = member_counts(self.plugin.drafter)
        records = []
        for k, (row, ids) in enumerate(zip(rows, prompts, strict=True)):
            sides: dict[str, list[Timed]] = {}
            for name in ("plain", "assisted", "speculative"):
                made = [each[name] for each in runs]
                sides[name] = [each[k] for each in made if each is not None] if None not in made else []
            record = self.record(row, ids, sides) | {"seed": seed}
            if before and k == 0:  # of the batch, and of all repeats
                record["speculative"]["members"] = {
                    name: {key: (counts[key] - before[name].get(key, 0)) // self.repeats for key in counts}
                    for name, counts in after.items()
                }
            records.append(record)
        return records

    def record(self, row: Row, ids: Tensor, sides: dict[str, list[Timed]]) -> dict[str, Any]:
        """One prompt: of each side the repeat with the median time, and the verdict on all of them."""
        verdict = self.verdict(ids, sides)
        chosen = {
            name: sorted(each, key=lambda run: run.seconds)[(len(each) - 1) // 2]
            for name, each in sides.items()
            if each
        }
        texts = {name: self.tokenizer.decode(side.ids, skip_special_tokens=True) for name, side in chosen.items()}
        score = None
        if self.scorer.scores(row):
            found = {
                "baseline": self.scorer(texts["plain"], row),
                "speculative": self.scorer(texts["speculative"], row),
            }
            score = {name: each.pop("score") for name, each in found.items()}
            score |= {"details": found} if found["baseline"] else {}
        record: dict[str, Any] = {"id": row.id, "category": row.category, "prompt_tokens": ids.shape[1]}
        for name, runs in sides.items():
            side = chosen.get(name)
            record[name] = side and {
                "new_tokens": len(side.ids),
                "seconds": side.seconds,
                "seconds_first": side.seconds_first,
                "token_ids": side.ids,
                "text": texts[name],
            }
            if side and self.repeats > 1:
                record[name]["seconds_of_repeats"] = [run.seconds for run in runs]
        stats = chosen["speculative"].stats
        assert stats is not None
        ours = {"stats": stats.to_dict(), "engine": stats.engine, "speculative_decoding": stats.speculative_decoding()}
        record["speculative"] |= ours
        return record | {"exactness": asdict(verdict), "references": references(row), "score": score}

    def verdict(self, ids: Tensor, sides: dict[str, list[Timed]]) -> Verdict:
        """On every repeat: greedy ones have to have the same ids, of both sides, and the worst that is found counts."""
        plain = sides["plain"][0].ids
        others = [run.ids for name in ("speculative", "plain") for run in sides[name]]
        if not self.arguments["do_sample"]:
            found = [compare(self.model, ids, plain, each, self.processors) for each in others]
            return max(found, key=lambda verdict: SEVERITY.index(verdict.kind))
        if isinstance(self.config.verify, Walk) and all(each == plain for each in others):
            return Verdict("identical")
        # Under walk, rounding may part even those that were drawn by the same numbers, at the edge of a race.
        return Verdict("not_compared")

    def trace(self, row: Row, ids: Tensor, seed: int, text: str) -> dict[str, Any]:
        """What became of every draft, in a call that is not timed. `text`: what our timed call wrote."""
        self.plugin.detach(release=False)
        trace = self.plugin.trace = Trace()
        self.plugin.attach(self.model)
        try:
            output = timed_generate(self.model, ids, seed, **self.arguments)
        finally:
            self.plugin.trace = None
            self.plugin.detach(release=False)
        trace.finish(output.ids)
        assert self.plugin.last is not None
        record = {"id": row.id, "category": row.category, "prompt": row.prompt, "engine": self.plugin.last.engine}
        told = describe(trace, self.tokenizer)
        same = self.tokenizer.decode(output.ids, skip_special_tokens=True) == text
        return record | {"same_text": same, "stats": self.plugin.last.to_dict()} | told
