"""What is wrong with a composed configuration: values out of range, and values that nothing would read. All of it at once, one line
each: the key, what was given, what is allowed, what to do. No torch in here.

What a single recipe alone can say about its growth is in growth_bench.py.
"""

import math
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from specplug import growth_bench
from specplug.config import (
    Adaptive,
    Answer,
    Bench,
    Calibrate,
    Certify,
    Compare,
    Confidence,
    Config,
    ConfigError,
    Dataset,
    Distill,
    Draft,
    Drafter,
    Evaluate,
    Fixed,
    Generate,
    Lookahead,
    Metric,
    Plain,
    Prune,
    QuantizationMethod,
    Theory,
    TrackerName,
    Training,
    Tree,
    choice,
)

LARGEST_SEED = 2**32 - 1  # that numpy takes
MOST_THREADS = 1024  # with far more of them, torch crashes the process
LOADED = (Drafter.model, Drafter.cross_vocab)
# Fields of a draft that only some kinds of drafter read; set for another, they would be ignored in silence.
READ_BY: dict[str, tuple[Drafter, ...]] = {
    **dict.fromkeys(("name_or_path", "gguf_file", "revision", "attn_implementation", "trust_remote_code"), LOADED),
    **dict.fromkeys(("any_target", "cross_vocab"), LOADED),
    **dict.fromkeys(("min_ngram", "max_ngram"), (Drafter.lookup, Drafter.suffix)),
    **dict.fromkeys(("min_probability", "warm"), (Drafter.suffix,)),
    "num_layers": (Drafter.early_exit,),
    "shape": (Drafter.model,),
    **dict.fromkeys(("plugin", "options"), (Drafter.plugin,)),
}


class Problems(list[str]):
    """What is wrong with one group of the configuration, a line each. `values`: the group's dataclass."""

    def __init__(self, group: str, values: object) -> None:
        super().__init__()
        self.group, self.values = group, values

    def need(self, holds: bool, name: str, allowed: str) -> None:
        """A line on this field, unless what it needs holds."""
        if not holds:
            value = getattr(self.values, name)
            self.add(name, value.name if isinstance(value, Enum) else value, allowed)

    def at_least(self, least: int, *names: str) -> None:
        for name in names:
            self.need(getattr(self.values, name) >= least, name, f"must be {least} or more")

    def add(self, name: str, value: object, allowed: str) -> None:
        self.append(f"{self.group}.{name}={value}: {allowed}")


def check(config: Config) -> None:
    """Raise ConfigError that lists every problem."""
    found = of_schedule(config) + of_sampling(config)
    if config.threads is not None and not 1 <= config.threads <= MOST_THREADS:
        found.append(f"threads={config.threads}: must be 1 or more, up to {MOST_THREADS}, or null for torch's choice")
    if not 0 <= config.seed <= LARGEST_SEED:
        found.append(f"seed={config.seed}: must be between 0 and {LARGEST_SEED}")
    found += of_draft(config.draft) + of_dataset(config)
    measures = isinstance(config.recipe, (Evaluate, Calibrate, Certify, Training))
    if config.tracker is not TrackerName.none and not measures:
        found.append(f"tracker={config.tracker.name}: nothing reads it with recipe={choice(config.recipe)}")
    found += of_shapes(config) + of_recipe(config)
    said = {problem.partition("=")[0] for problem in found}
    found += [each for each in not_finite("", config) if each.partition("=")[0] not in said]
    if found:
        raise ConfigError("\n".join(found))


def not_finite(path: str, values: Any) -> list[str]:
    """Numbers that would be no JSON in the files of a run, and that no figure can be made of."""
    if isinstance(values, float) and not math.isfinite(values):
        return [f"{path}={values}: must be a finite number"]
    if not is_dataclass(values):
        return []
    return [
        problem
        for each in fields(values)
        for problem in not_finite(f"{path}.{each.name}".lstrip("."), getattr(values, each.name))
    ]


def of_schedule(config: Config) -> list[str]:
    schedule = config.schedule
    found = Problems("schedule", schedule)
    if isinstance(schedule, (Fixed, Confidence)):
        found.need(schedule.gamma >= 0, "gamma", "must be 0 (plain decoding) or more")
    if isinstance(schedule, Confidence):
        found.need(0 <= schedule.threshold <= 1, "threshold", "must be between 0 and 1")
    if isinstance(schedule, Adaptive):
        found.at_least(1, "max_gamma")
        there = schedule.frozen is None or Path(schedule.frozen).is_file()
        found.need(there, "frozen", "no such file; name the schedule.json of a run folder")
        depth = schedule.tree_depth
        found.need(depth is None or depth >= 1, "tree_depth", "must be 1 or more, or null for chains")
    if isinstance(schedule, Tree):
        found.at_least(1, "budget", "depth")
        branching = schedule.branching
        found.need(all(count >= 1 for count in branching), "branching", "must be numbers of 1 or more")
        if branching and (schedule.budget, schedule.depth) != (Tree.budget, Tree.depth):
            given = f"{branching} with schedule.budget={schedule.budget}, schedule.depth={schedule.depth}"
            found.add("branching", given, "takes the place of both; leave them out")
    if drafts_trees(config):
        given = "schedule=tree" if isinstance(schedule, Tree) else f"schedule.tree_depth={schedule.tree_depth}"  # type: ignore[attr-defined]
        if isinstance(config.engine, Lookahead):
            found.append(f"{given}: engine=lookahead drafts no trees; take engine=auto or engine=rounds")
        if config.draft.drafter is Drafter.cross_vocab:
            found.append(f"{given}: draft=cross_vocab drafts no trees; take another draft or another schedule")
    return found + unread_schedule(config)


def unread_schedule(config: Config) -> list[str]:
    """What nothing would read of the schedule, where the recipe says how many tokens are drafted."""
    schedule, recipe = config.schedule, config.recipe
    adaptive = isinstance(schedule, Adaptive)
    if isinstance(recipe, Calibrate) or (isinstance(recipe, Certify) and adaptive):
        why = f"recipe={choice(recipe)}, which drafts recipe.gamma tokens a round; leave it out"
    elif isinstance(recipe, Bench) and recipe.growth is not None:
        why = "recipe.growth, where recipe.gammas or recipe.points say how many; leave it out"
    else:
        return []
    if not adaptive:
        return [f"schedule={choice(schedule)}: nothing reads it with {why}"]
    changed = {name: value for name, value in vars(schedule).items() if value != getattr(Adaptive, name)}
    return [f"schedule.{name}={value}: nothing reads it with {why}" for name, value in changed.items()]


def drafts_trees(config: Config) -> bool:
    schedule = config.schedule
    return isinstance(schedule, Tree) or (isinstance(schedule, Adaptive) and schedule.tree_depth is not None)


def of_sampling(config: Config) -> list[str]:
    s = config.sampling
    found = Problems("sampling", s)
    found.need(s.temperature >= 0, "temperature", "must be 0 (greedy) or more")
    found.need(s.top_k is None or s.top_k >= 1, "top_k", "must be 1 or more, or null")
    for name in ("top_p", "min_p"):
        value = getattr(s, name)
        found.need(value is None or 0 < value <= 1, name, "must be above 0 and at most 1, or null")
    penalty = s.repetition_penalty
    allowed = "must be above 0 (1 changes nothing), or null"
    found.need(penalty is None or penalty > 0, "repetition_penalty", allowed)
    way_out = "take sampling.num_beams=1, or call transformers without specplug"
    found.need(s.num_beams == 1, "num_beams", f"beam search has no speculative form here; {way_out}")
    found.at_least(1, "max_new_tokens")
    return found


def of_draft(draft: Draft) -> list[str]:
    found = Problems("draft", draft)
    if not 1 <= draft.min_ngram <= draft.max_ngram:
        given = f"{draft.min_ngram} with draft.max_ngram={draft.max_ngram}"
        found.add("min_ngram", given, "must be 1 or more and at most max_ngram")
    if draft.drafter is Drafter.early_exit and draft.num_layers is None:
        found.add("num_layers", "null", "say how many of the target's layers to run")
    if draft.drafter is Drafter.plugin and draft.plugin is None:
        found.add("plugin", "null", "give package.module:callable, or an entry point's name")
    found.need(0 <= draft.min_probability <= 1, "min_probability", "must be between 0 and 1")
    said = [problem.partition("=")[0] for problem in found]
    found += [each for each in unread(draft) if each.partition("=")[0] not in said]
    return found


def unread(draft: Draft) -> list[str]:
    """Values that nothing would read."""
    asked = {draft.drafter.value, draft.before.value}
    default = Draft()
    return [
        f"draft.{name}={getattr(draft, name)}: nothing reads it with draft={draft.drafter.value}; it is for"
        f" {', '.join(kind.value for kind in kinds)}"
        for name, kinds in READ_BY.items()
        if getattr(draft, name) != getattr(default, name) and not asked & {kind.value for kind in kinds}
    ]


def of_dataset(config: Config) -> list[str]:
    d = config.dataset
    found = Problems("dataset", d)
    need = found.need
    need(d.few_shot >= 0, "few_shot", "must be 0 (none) or more examples")
    for name in ("few_shot_path", "few_shot_split"):
        need(getattr(d, name) is None or d.few_shot > 0, name, "nothing reads it without dataset.few_shot=N")
    need(not (d.few_shot_path and d.few_shot_split), "few_shot_split", "give it or dataset.few_shot_path, not both")
    need(
        d.few_shot_split is None or d.path is None, "few_shot_split", "a file has no splits; take dataset.few_shot_path"
    )
    need(not (d.few_shot and d.text_column), "few_shot", "plain text has no examples; leave it out")
    need(d.shuffle_buffer >= 1, "shuffle_buffer", "must be 1 or more rows")
    in_range = not d.shuffle or 0 <= d.shuffle_seed <= LARGEST_SEED
    need(in_range, "shuffle_seed", f"must be between 0 and {LARGEST_SEED}")
    for name in ("shuffle_seed", "shuffle_buffer"):
        same = getattr(d, name) == getattr(Dataset(), name)
        need(same or d.shuffle, name, "nothing reads it without dataset.shuffle=true")
    for name in ("min_prompt_tokens", "max_prompt_tokens"):
        value = getattr(d, name)
        need(value is None or value >= 1, name, "must be 1 or more, or null")
        if isinstance(config.recipe, Training):
            need(value is None, name, "nothing reads it while training, where recipe.max_length cuts")
    need(
        d.metric is not Metric.pass_at_1 or d.tests is not None,
        "metric",
        "needs dataset.tests, a template of what to pass",
    )
    if isinstance(config.recipe, Evaluate) and d.metric is not Metric.none:
        refused = d.metric is Metric.pass_at_1 and not d.allow_code_execution
        way_out = "runs programs that the model wrote; allow it with dataset.allow_code_execution=true, or take none"
        need(not refused, "metric", way_out)
        needs_reference = d.metric is not Metric.pass_at_1 and not d.corpus
        need(not needs_reference or d.reference_column is not None, "metric", "needs dataset.reference_column=NAME")
    runs_code = d.metric is Metric.pass_at_1
    need(
        runs_code or not d.allow_code_execution,
        "allow_code_execution",
        "nothing reads it without dataset.metric=pass_at_1",
    )
    need(not runs_code or d.answer is Answer.full, "answer", "nothing reads it with dataset.metric=pass_at_1")
    if d.min_prompt_tokens and d.max_prompt_tokens:
        need(d.min_prompt_tokens <= d.max_prompt_tokens, "min_prompt_tokens", "must be at most max_prompt_tokens")
    return found


def of_shapes(config: Config) -> list[str]:
    """Random weights in shapes that are given."""
    found = []
    for role in ("target", "draft"):
        model = getattr(config, role)
        if model.shape is None:
            continue
        found += no_fields(f"{role}.shape", model.shape)
        if not isinstance(config.recipe, Bench):
            allowed = "random weights write no text; they are for recipe=bench, where speed alone counts"
            found.append(f"{role}.shape=(given): {allowed}")
        method = model.quantization.method
        if method is not QuantizationMethod.none:
            allowed = f"the random weights of {role}.shape are not quantized; leave it out"
            found.append(f"{role}/quantization={method.name}: {allowed}")
    return found


def no_fields(key: str, value: object) -> list[str]:
    if value is None or isinstance(value, dict):
        return []
    return [f"{key}={value}: give fields of a transformers configuration, as {{hidden_size: 64, num_hidden_layers: 2}}"]


def of_recipe(config: Config) -> list[str]:
    recipe = config.recipe
    found = Problems("recipe", recipe)
    if isinstance(recipe, (Evaluate, Calibrate, Certify, Bench)):
        found.need(recipe.limit is None or recipe.limit >= 1, "limit", "must be 1 or more, or null for all")
    if isinstance(recipe, Evaluate):
        found.at_least(1, "repeats", "batch_size")
        found.at_least(0, "warmup")
        found.need(recipe.trace >= 0, "trace", "must be 0 (none) or more prompts")
    if isinstance(recipe, (Evaluate, Compare)):
        found.at_least(0, "bootstrap")
    if isinstance(recipe, Calibrate):
        found.at_least(1, "gamma", "max_gamma", "repeats")
    if isinstance(recipe, Certify):
        found.at_least(1, "seeds", "draws", "gamma")
        found.need(recipe.tokens >= 2, "tokens", "must be 2 or more: the first meets no draft")
        found.need(0 < recipe.false_alarm < 1, "false_alarm", "must be a probability above 0, below 1")
        read = isinstance(config.schedule, Adaptive) or recipe.gamma == Certify.gamma
        found.need(read, "gamma", "nothing reads it but with schedule=adaptive; take schedule.gamma")
    if isinstance(recipe, Bench):
        found += of_bench(config, recipe)
    if isinstance(recipe, Compare):
        found.need(len(recipe.runs) >= 2, "runs", "name two run folders or more: recipe.runs=[A,B]")
    if isinstance(recipe, Generate):
        printable = recipe.prompt.encode(errors="replace").decode()
        if printable != recipe.prompt:
            found.add("prompt", printable, "is no UTF-8 text; repair it")
    if isinstance(recipe, Theory):
        found.need(0 <= recipe.alpha <= 1, "alpha", "must be between 0 and 1")
        found.at_least(0, "gamma", "cost_coefficient")
        found.at_least(1, "max_gamma")
    if isinstance(recipe, Training):
        found += no_fields("recipe.architecture", recipe.architecture)
        found.at_least(1, "steps", "batch_size", "max_length", "save_steps", "log_steps")
        found.at_least(0, "warmup_steps", "weight_decay", "held_out")
        found.need(recipe.learning_rate > 0, "learning_rate", "must be above 0")
    if isinstance(recipe, Distill):
        found.at_least(1, "samples", "sample_batch_size", "sample_new_tokens")
        found.need(recipe.temperature > 0, "temperature", "must be above 0")
        found.need(0 <= recipe.on_policy <= 1, "on_policy", "must be between 0 and 1")
        found.need(recipe.top_k is None or recipe.top_k >= 1, "top_k", "must be 1 or more, or null for all")
    if isinstance(recipe, Prune) and bool(recipe.layers) == bool(recipe.num_layers):
        found.add("layers", f"{recipe.layers} with recipe.num_layers={recipe.num_layers}", "give one of the two")
    return found


def of_bench(config: Config, recipe: Bench) -> list[str]:
    found = Problems("recipe", recipe)
    counted = bool(recipe.gammas) and min(recipe.gammas) >= 0
    found.need(counted, "gammas", "must be numbers from 0 on")
    found.at_least(1, "repeats", "batch_size")
    length, alpha = recipe.prompt_tokens, recipe.synthetic_alpha
    found.need(length is None or length >= 1, "prompt_tokens", "must be 1 or more, or null")
    if alpha is not None:
        found.need(0 <= alpha <= 1, "synthetic_alpha", "must be between 0 and 1, or null")
        way_out = "is drawn where drafts are sampled; add sampling.temperature=1"
        found.need(config.sampling.temperature > 0, "synthetic_alpha", way_out)
        found.need(not drafts_trees(config), "synthetic_alpha", "keeps drafts of chains alone; leave the tree out")
        rounds_alone = "is drawn by engine=rounds alone, which engine=auto takes"
        found.need(not isinstance(config.engine, Lookahead), "synthetic_alpha", rounds_alone)
    if isinstance(config.engine, Plain):
        found.append("engine=plain: every way of ours would be plain decoding; leave it out")
    return found + growth_bench.problems(config)
