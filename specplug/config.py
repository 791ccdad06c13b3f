"""The configuration: dataclasses that are the schema, `load()` and `check()`. No torch in here, so a Tab press is quick.

Compose -> check -> plain dataclasses. No DictConfig leaves this module.
"""

import difflib
import threading
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

CONF_MODULE = "specplug.conf"


class ConfigError(ValueError):
    """The user's configuration cannot be used. The text has one line a problem: key, value, what is allowed, the fix."""


class Dtype(Enum):
    fp32 = "float32"
    fp16 = "float16"
    bf16 = "bfloat16"


class QuantizationMethod(Enum):
    none = "none"
    nf4 = "nf4"
    fp4 = "fp4"
    int8 = "int8"


class Drafter(Enum):
    none = "none"
    model = "model"
    lookup = "lookup"


class Answer(Enum):
    full = "full"
    last_line = "last_line"


class Precision(Enum):
    fp32 = "no"
    fp16 = "fp16"
    bf16 = "bf16"


@dataclass
class Quantization:
    method: QuantizationMethod = QuantizationMethod.none


@dataclass
class Model:
    """A target: a hub name, a folder, or a folder or repository with a GGUF file."""

    name_or_path: str = MISSING
    gguf_file: str | None = None
    revision: str | None = None
    dtype: Dtype = Dtype.fp32
    device: str = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    quantization: Quantization = field(default_factory=Quantization)


@dataclass
class Draft:
    """A draft: a model with the same fields as a target, or a lookup in the text so far."""

    drafter: Drafter = Drafter.model
    name_or_path: str | None = None
    gguf_file: str | None = None
    revision: str | None = None
    dtype: Dtype = Dtype.fp32
    device: str = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    quantization: Quantization = field(default_factory=Quantization)
    min_ngram: int = 2
    max_ngram: int = 8


@dataclass
class Verify:
    pass


@dataclass
class Token(Verify):
    """Keep a draft token with probability min(1, p/q); at temperature 0 this is the argmax comparison."""


@dataclass
class Schedule:
    pass


@dataclass
class Fixed(Schedule):
    """The same number of draft tokens in every round; 0 is plain decoding."""

    gamma: int = 4


@dataclass
class Engine:
    pass


@dataclass
class Auto(Engine):
    """`rounds` where it is exact, plain `generate` with a reason where it is not."""


@dataclass
class Rounds(Engine):
    """Our loop, or an error that says why it cannot serve this call."""


@dataclass
class Plain(Engine):
    """transformers' own loop, no speculation."""


@dataclass
class Sampling:
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    num_beams: int = 1
    max_new_tokens: int = 128


@dataclass
class Dataset:
    name: str = MISSING
    path: str | None = None
    hub: str | None = None
    subset: str | None = None
    split: str = "test"
    revision: str | None = None
    corpus: bool = False
    corpus_size: int = 0
    corpus_seed: int = 0
    id_column: str | None = None
    prompt_column: str = "prompt"
    reference_column: str | None = None
    category_column: str | None = None
    text_column: str | None = None
    categories: list[str] = field(default_factory=list)
    template: str | None = None
    system: str | None = None
    chat: bool = True
    answer: Answer = Answer.full
    scored: bool = False


@dataclass
class Recipe:
    pass


@dataclass
class Evaluate(Recipe):
    limit: int | None = None
    compare_assisted: bool = True
    warmup: int = 1
    bootstrap: int = 2000


@dataclass
class Generate(Recipe):
    prompt: str = MISSING


@dataclass
class Theory(Recipe):
    alpha: float = 0.8
    gamma: int = 4
    cost_coefficient: float = 0.05
    max_gamma: int = 16


@dataclass
class Training(Recipe):
    """What training a target and distilling a draft have in common."""

    output: str | None = None
    architecture: Any = None  # fields of a transformers configuration; Any, since Hydra closes dicts that are typed
    init: str | None = None
    steps: int = 1000
    batch_size: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    max_length: int = 512
    precision: Precision = Precision.fp32
    save_steps: int = 100
    log_steps: int = 20
    held_out: int = 100
    save_dtype: Dtype = Dtype.fp32


@dataclass
class Train(Training):
    tokenizer: str | None = None
    vocab_size: int = 1000
    loss_on_prompt: bool = False


@dataclass
class Distill(Training):
    samples: int = 2000
    sample_batch_size: int = 32
    temperature: float = 1.0
    sample_new_tokens: int = 128


@dataclass
class Config:
    """The root. Each field is a group or a value of the command line."""

    target: Model = field(default_factory=Model)
    draft: Draft = field(default_factory=Draft)
    verify: Verify = MISSING
    schedule: Schedule = MISSING
    engine: Engine = MISSING
    sampling: Sampling = field(default_factory=Sampling)
    dataset: Dataset = field(default_factory=Dataset)
    recipe: Recipe = MISSING
    seed: int = 0
    threads: int | None = None
    resume: str | None = None


OPTIONS: dict[str, tuple[type, ...]] = {
    "verify": (Token,),
    "schedule": (Fixed,),
    "engine": (Auto, Rounds, Plain),
    "recipe": (Evaluate, Generate, Theory, Train, Distill),
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


def check(config: Config) -> None:
    """Raise ConfigError that lists every value out of range: the key, what was given, what is allowed, what to do."""
    problems: list[str] = []

    def need(holds: bool, key: str, value: object, allowed: str) -> None:
        if not holds:
            problems.append(f"{key}={value}: {allowed}")

    s, recipe = config.sampling, config.recipe
    if isinstance(config.schedule, Fixed):
        need(config.schedule.gamma >= 0, "schedule.gamma", config.schedule.gamma, "must be 0 (plain decoding) or more")
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
    if isinstance(recipe, Evaluate):
        need(
            recipe.limit is None or recipe.limit >= 1,
            "recipe.limit",
            recipe.limit,
            "must be 1 or more, or null for all",
        )
        need(recipe.warmup >= 0, "recipe.warmup", recipe.warmup, "must be 0 or more")
        need(recipe.bootstrap >= 0, "recipe.bootstrap", recipe.bootstrap, "must be 0 or more")
    if isinstance(recipe, Theory):
        need(0 <= recipe.alpha <= 1, "recipe.alpha", recipe.alpha, "must be between 0 and 1")
        need(recipe.gamma >= 0, "recipe.gamma", recipe.gamma, "must be 0 or more")
        need(recipe.cost_coefficient >= 0, "recipe.cost_coefficient", recipe.cost_coefficient, "must be 0 or more")
        need(recipe.max_gamma >= 1, "recipe.max_gamma", recipe.max_gamma, "must be 1 or more")
    if isinstance(recipe, Training):
        for name in ("steps", "batch_size", "max_length", "save_steps", "log_steps"):
            need(getattr(recipe, name) >= 1, f"recipe.{name}", getattr(recipe, name), "must be 1 or more")
        for name in ("warmup_steps", "weight_decay", "held_out"):
            need(getattr(recipe, name) >= 0, f"recipe.{name}", getattr(recipe, name), "must be 0 or more")
        need(recipe.learning_rate > 0, "recipe.learning_rate", recipe.learning_rate, "must be above 0")
    if isinstance(recipe, Distill):
        for name in ("samples", "sample_batch_size", "sample_new_tokens"):
            need(getattr(recipe, name) >= 1, f"recipe.{name}", getattr(recipe, name), "must be 1 or more")
        need(recipe.temperature > 0, "recipe.temperature", recipe.temperature, "must be above 0")
    if problems:
        raise ConfigError("\n".join(problems))


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its name if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
    return " ".join(lines)


def to_dict(config: Any) -> dict[str, Any]:
    """Plain values, ready for JSON: what a run writes down, and what `resume` compares."""
    return OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)  # type: ignore[return-value]
