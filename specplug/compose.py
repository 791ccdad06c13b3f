"""From Hydra to the dataclasses of config.py: the choices that are code, `load()` and `check()`. No torch in here, so a Tab
press is quick.

Compose -> check -> plain dataclasses. No DictConfig leaves this module.
"""

import difflib
import re
import threading
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specplug import growth_bench
from specplug.config import (
    Adaptive,
    Answer,
    Auto,
    Bench,
    Block,
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
    Rounds,
    Sweep,
    Theory,
    Token,
    TrackerName,
    Train,
    Training,
    Tree,
    Walk,
)

CONF_MODULE = "specplug.conf"

OPTIONS: dict[str, tuple[type, ...]] = {
    "verify": (Token, Block, Walk),
    "schedule": (Fixed, Confidence, Adaptive, Tree),
    "engine": (Auto, Rounds, Lookahead, Plain),
    "recipe": (Evaluate, Bench, Sweep, Calibrate, Certify, Compare, Generate, Theory, Train, Distill, Prune),
}


def register() -> None:
    """Put the schema and the choices that are code into Hydra's store. Choices that are data lie in conf/."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, options in OPTIONS.items():
        for option in options:
            store.store(group=group, name=option.__name__.lower(), node=option)


register()
_COMPOSING = threading.Lock()  # Hydra's state is global


def load(*overrides: str) -> Config:
    """Compose the shipped configuration with overrides, as the command line does: `load("pair=tiny", "seed=1")`.

    Works inside an application that uses Hydra itself, and from several threads. Raises ConfigError.
    """
    with _COMPOSING:
        before = GlobalHydra.instance()
        theirs, before.hydra = before.hydra, None
        try:
            with hydra.initialize_config_module(CONF_MODULE, version_base="1.3"):
                composed = hydra.compose("config", list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(readable(error)) from error
        finally:
            GlobalHydra.instance().hydra = theirs
    return to_config(composed)


def to_config(composed: DictConfig) -> Config:
    """Check a composed configuration and turn it into plain dataclasses. Raises ConfigError with all problems."""
    problems = unknown_keys(composed)
    if not problems:
        problems = [f"{key}=???: has to be given; add {key}=VALUE" for key in sorted(OmegaConf.missing_keys(composed))]
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(readable(error)) from error
    assert isinstance(config, Config)
    check(config)
    return config


def unknown_keys(node: DictConfig, path: str = "") -> list[str]:
    """Keys that the schema does not have: `+key=value` opens Hydra's structs, and nothing else would notice."""
    node_type = OmegaConf.get_type(node)
    if not (isinstance(node_type, type) and is_dataclass(node_type)):
        return []
    known = [each.name for each in fields(node_type)]
    problems = []
    for key in map(str, node):
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {path}{near[0]}?" if near else f"allowed are {', '.join(known)}"
            problems.append(f"{path}{key}: unknown key; {hint}")
        elif not OmegaConf.is_missing(node, key):
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none():
                problems += unknown_keys(child, f"{path}{key}.")
    return problems


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


def unread(draft: Draft) -> list[str]:
    """Problems: values that nothing would read."""
    asked = {draft.drafter.value, draft.before.value}
    default = Draft()
    return [
        f"draft.{name}={getattr(draft, name)}: nothing reads it with draft={draft.drafter.value}; it is for"
        f" {', '.join(kind.value for kind in kinds)}"
        for name, kinds in READ_BY.items()
        if getattr(draft, name) != getattr(default, name) and not asked & {kind.value for kind in kinds}
    ]


def dataset_problems(config: Config) -> list[str]:
    """What is out of range in the data set's values, or would be ignored."""
    d = config.dataset
    problems = []

    def need(holds: bool, name: str, allowed: str) -> None:
        if not holds:
            value = getattr(d, name)
            problems.append(f"dataset.{name}={value.name if isinstance(value, Enum) else value}: {allowed}")

    need(d.few_shot >= 0, "few_shot", "must be 0 (none) or more examples")
    for name in ("few_shot_path", "few_shot_split"):
        need(getattr(d, name) is None or d.few_shot > 0, name, "nothing reads it without dataset.few_shot=N")
    need(not (d.few_shot_path and d.few_shot_split), "few_shot_split", "give it or dataset.few_shot_path, not both")
    need(
        d.few_shot_split is None or d.path is None, "few_shot_split", "a file has no splits; take dataset.few_shot_path"
    )
    need(not (d.few_shot and d.text_column), "few_shot", "plain text has no examples; leave it out")
    need(d.shuffle_buffer >= 1, "shuffle_buffer", "must be 1 or more rows")
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
    return problems


def no_fields(key: str, value: object) -> list[str]:
    if value is None or isinstance(value, dict):
        return []
    return [f"{key}={value}: give fields of a transformers configuration, as {{hidden_size: 64, num_hidden_layers: 2}}"]


def check(config: Config) -> None:
    """Raise ConfigError that lists every value out of range: the key, what was given, what is allowed, what to do."""
    problems: list[str] = []

    def need(holds: bool, key: str, value: object, allowed: str) -> None:
        if not holds:
            problems.append(f"{key}={value}: {allowed}")

    s, recipe = config.sampling, config.recipe
    schedule = config.schedule
    if isinstance(schedule, (Fixed, Confidence)):
        need(schedule.gamma >= 0, "schedule.gamma", schedule.gamma, "must be 0 (plain decoding) or more")
    if isinstance(schedule, Confidence):
        need(0 <= schedule.threshold <= 1, "schedule.threshold", schedule.threshold, "must be between 0 and 1")
    if isinstance(schedule, Adaptive):
        need(schedule.max_gamma >= 1, "schedule.max_gamma", schedule.max_gamma, "must be 1 or more")
        if schedule.frozen is not None and not Path(schedule.frozen).is_file():
            need(False, "schedule.frozen", schedule.frozen, "no such file; name the schedule.json of a run folder")
        depth = schedule.tree_depth
        need(depth is None or depth >= 1, "schedule.tree_depth", depth, "must be 1 or more, or null for chains")
    if isinstance(schedule, Tree):
        for name in ("budget", "depth"):
            need(getattr(schedule, name) >= 1, f"schedule.{name}", getattr(schedule, name), "must be 1 or more")
        branching = schedule.branching
        need(all(count >= 1 for count in branching), "schedule.branching", branching, "must be numbers of 1 or more")
        given = f"{branching} with schedule.budget={schedule.budget}, schedule.depth={schedule.depth}"
        alone = not branching or (schedule.budget, schedule.depth) == (Tree.budget, Tree.depth)
        need(alone, "schedule.branching", given, "takes the place of both; leave them out")
    if isinstance(schedule, Tree) or (isinstance(schedule, Adaptive) and schedule.tree_depth is not None):
        key = "schedule" if isinstance(schedule, Tree) else "schedule.tree_depth"
        value = "tree" if isinstance(schedule, Tree) else schedule.tree_depth
        need(
            not isinstance(config.engine, Lookahead),
            key,
            value,
            "engine=lookahead drafts no trees; take engine=auto or engine=rounds",
        )
        need(
            config.draft.drafter is not Drafter.cross_vocab,
            key,
            value,
            "draft=cross_vocab drafts no trees; take another draft or another schedule",
        )
        need(not isinstance(recipe, Calibrate), key, value, "recipe=calibrate measures chains; leave the tree out")
    need(s.temperature >= 0, "sampling.temperature", s.temperature, "must be 0 (greedy) or more")
    need(s.top_k is None or s.top_k >= 1, "sampling.top_k", s.top_k, "must be 1 or more, or null")
    for name in ("top_p", "min_p"):
        value = getattr(s, name)
        need(value is None or 0 < value <= 1, f"sampling.{name}", value, "must be above 0 and at most 1, or null")
    need(
        s.repetition_penalty is None or s.repetition_penalty > 0,
        "sampling.repetition_penalty",
        s.repetition_penalty,
        "must be above 0 (1 changes nothing), or null",
    )
    need(
        s.num_beams == 1,
        "sampling.num_beams",
        s.num_beams,
        "beam search has no speculative form here; take sampling.num_beams=1, or call transformers without specplug",
    )
    need(s.max_new_tokens >= 1, "sampling.max_new_tokens", s.max_new_tokens, "must be 1 or more")
    need(
        config.threads is None or config.threads >= 1,
        "threads",
        config.threads,
        "must be 1 or more, or null for torch's choice",
    )
    d = config.draft
    need(
        1 <= d.min_ngram <= d.max_ngram,
        "draft.min_ngram",
        f"{d.min_ngram} with draft.max_ngram={d.max_ngram}",
        "must be 1 or more and at most max_ngram",
    )
    if d.drafter is Drafter.early_exit:
        need(d.num_layers is not None, "draft.num_layers", "null", "say how many of the target's layers to run")
    if d.drafter is Drafter.plugin:
        need(d.plugin is not None, "draft.plugin", "null", "give package.module:callable, or an entry point's name")
    need(0 <= d.min_probability <= 1, "draft.min_probability", d.min_probability, "must be between 0 and 1")
    problems += dataset_problems(config)
    measures = isinstance(recipe, (Evaluate, Calibrate, Certify, Training)) or config.tracker is TrackerName.none
    need(measures, "tracker", config.tracker.name, f"nothing reads it with recipe={type(recipe).__name__.lower()}")
    said = tuple(problem.partition("=")[0] for problem in problems)
    problems += [each for each in unread(d) if each.partition("=")[0] not in said]
    if isinstance(recipe, Evaluate):
        need(
            recipe.limit is None or recipe.limit >= 1,
            "recipe.limit",
            recipe.limit,
            "must be 1 or more, or null for all",
        )
        for name in ("repeats", "batch_size"):
            need(getattr(recipe, name) >= 1, f"recipe.{name}", getattr(recipe, name), "must be 1 or more")
        need(recipe.warmup >= 0, "recipe.warmup", recipe.warmup, "must be 0 or more")
        need(recipe.trace >= 0, "recipe.trace", recipe.trace, "must be 0 (none) or more prompts")
    if isinstance(recipe, (Evaluate, Compare)):
        need(recipe.bootstrap >= 0, "recipe.bootstrap", recipe.bootstrap, "must be 0 or more")
    if isinstance(recipe, Calibrate):
        need(
            recipe.limit is None or recipe.limit >= 1,
            "recipe.limit",
            recipe.limit,
            "must be 1 or more, or null for all",
        )
        for name in ("gamma", "max_gamma", "repeats"):
            need(getattr(recipe, name) >= 1, f"recipe.{name}", getattr(recipe, name), "must be 1 or more")
    if isinstance(recipe, Certify):
        for name in ("seeds", "draws", "gamma"):
            need(getattr(recipe, name) >= 1, f"recipe.{name}", getattr(recipe, name), "must be 1 or more")
        need(
            recipe.limit is None or recipe.limit >= 1,
            "recipe.limit",
            recipe.limit,
            "must be 1 or more, or null for all",
        )
        need(recipe.tokens >= 2, "recipe.tokens", recipe.tokens, "must be 2 or more: the first meets no draft")
        need(
            0 < recipe.false_alarm < 1,
            "recipe.false_alarm",
            recipe.false_alarm,
            "must be a probability above 0, below 1",
        )
        fixed = isinstance(schedule, Adaptive) or recipe.gamma == Certify().gamma
        need(fixed, "recipe.gamma", recipe.gamma, "nothing reads it but with schedule=adaptive; take schedule.gamma")
    for role, shape in (("target", config.target.shape), ("draft", d.shape)):
        problems += no_fields(f"{role}.shape", shape)
        allowed = "random weights write no text; they are for recipe=bench, where speed alone counts"
        need(shape is None or isinstance(recipe, Bench), f"{role}.shape", "(given)", allowed)
        method = getattr(config, role).quantization.method
        plain = shape is None or method is QuantizationMethod.none
        need(
            plain,
            f"{role}/quantization",
            method.name,
            f"the random weights of {role}.shape are not quantized; leave it out",
        )
    if isinstance(recipe, Bench):
        need(recipe.limit is None or recipe.limit >= 1, "recipe.limit", recipe.limit, "must be 1 or more, or null")
        need(
            bool(recipe.gammas) and min(recipe.gammas, default=0) >= 0,
            "recipe.gammas",
            recipe.gammas,
            "must be numbers from 0 on",
        )
        for name in ("repeats", "batch_size"):
            need(getattr(recipe, name) >= 1, f"recipe.{name}", getattr(recipe, name), "must be 1 or more")
        length = recipe.prompt_tokens
        need(length is None or length >= 1, "recipe.prompt_tokens", length, "must be 1 or more, or null")
        alpha = recipe.synthetic_alpha
        need(alpha is None or 0 <= alpha <= 1, "recipe.synthetic_alpha", alpha, "must be between 0 and 1, or null")
        sampled = alpha is None or s.temperature > 0
        need(sampled, "recipe.synthetic_alpha", alpha, "is drawn where drafts are sampled; add sampling.temperature=1")
        trees = isinstance(schedule, Tree) or (isinstance(schedule, Adaptive) and schedule.tree_depth is not None)
        way_out = "keeps drafts of chains alone; leave the tree out"
        need(alpha is None or not trees, "recipe.synthetic_alpha", alpha, way_out)
        problems += growth_bench.problems(config)
    if isinstance(recipe, Compare):
        need(len(recipe.runs) >= 2, "recipe.runs", recipe.runs, "name two run folders or more: recipe.runs=[A,B]")
    if isinstance(recipe, Generate):
        printable = recipe.prompt.encode(errors="replace").decode()
        need(printable == recipe.prompt, "recipe.prompt", printable, "is no UTF-8 text; repair it")
    if isinstance(recipe, Theory):
        need(0 <= recipe.alpha <= 1, "recipe.alpha", recipe.alpha, "must be between 0 and 1")
        need(recipe.gamma >= 0, "recipe.gamma", recipe.gamma, "must be 0 or more")
        need(recipe.cost_coefficient >= 0, "recipe.cost_coefficient", recipe.cost_coefficient, "must be 0 or more")
        need(recipe.max_gamma >= 1, "recipe.max_gamma", recipe.max_gamma, "must be 1 or more")
    if isinstance(recipe, Training):
        problems += no_fields("recipe.architecture", recipe.architecture)
        for name in ("steps", "batch_size", "max_length", "save_steps", "log_steps"):
            need(getattr(recipe, name) >= 1, f"recipe.{name}", getattr(recipe, name), "must be 1 or more")
        for name in ("warmup_steps", "weight_decay", "held_out"):
            need(getattr(recipe, name) >= 0, f"recipe.{name}", getattr(recipe, name), "must be 0 or more")
        need(recipe.learning_rate > 0, "recipe.learning_rate", recipe.learning_rate, "must be above 0")
    if isinstance(recipe, Distill):
        for name in ("samples", "sample_batch_size", "sample_new_tokens"):
            need(getattr(recipe, name) >= 1, f"recipe.{name}", getattr(recipe, name), "must be 1 or more")
        need(recipe.temperature > 0, "recipe.temperature", recipe.temperature, "must be above 0")
        need(0 <= recipe.on_policy <= 1, "recipe.on_policy", recipe.on_policy, "must be between 0 and 1")
        need(
            recipe.top_k is None or recipe.top_k >= 1,
            "recipe.top_k",
            recipe.top_k,
            "must be 1 or more, or null for all",
        )
    if isinstance(recipe, Prune):
        given = f"{recipe.layers} with recipe.num_layers={recipe.num_layers}"
        need(bool(recipe.layers) != bool(recipe.num_layers), "recipe.layers", given, "give one of the two")
    if problems:
        raise ConfigError("\n".join(problems))


def readable(error: Exception) -> str:
    """What Hydra and OmegaConf have to say, without the traceback and without their lines on where they keep it."""
    parts = [str(error)]
    if error.__cause__ is not None:
        parts.append(str(error.__cause__))
    lines: list[str] = []
    for line in map(str.strip, "\n".join(parts).splitlines()):
        noise = (
            "full_key:",
            "object_type=",
            "reference_type=",
            "Check available options",
            "Set the environment",
            "Config search path",
            "provider=",
        )
        if line and not line.startswith(noise) and line not in lines:
            lines.append(line)
    text = " ".join(lines)
    return f"{text}{_who_has_it(text)}"


def _who_has_it(text: str) -> str:
    """A key that another choice of the same group has: which one."""
    found = re.search(r"Key '(\w+)' not in '(\w+)'", text)
    if found is None:
        return ""
    key, chosen = found.groups()
    for group, options in OPTIONS.items():
        if chosen in [option.__name__ for option in options]:
            has = [o.__name__.lower() for o in options if key in [each.name for each in fields(o)]]
            return "".join(f"; {group}={name} has it" for name in has)
    return ""
