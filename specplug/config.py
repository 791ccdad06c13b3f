"""The configuration as dataclasses, which are its schema. How one comes about is in compose.py.

What choices.py and recipe_config.py define is part of it, and to be had from here.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, OmegaConf

from specplug.choices import (  # noqa: F401
    Answer,
    Before,
    Criterion,
    CrossVocab,
    Drafter,
    Dtype,
    Graph,
    Kernel,
    Loss,
    Metric,
    OnError,
    Precision,
    QuantizationMethod,
    Texts,
    TrackerName,
)
from specplug.recipe_config import (  # noqa: F401
    Bench,
    Calibrate,
    Certify,
    Compare,
    Distill,
    Evaluate,
    Generate,
    Prune,
    Recipe,
    Sweep,
    Theory,
    Train,
    Training,
)


class ConfigError(ValueError):
    """The user's configuration cannot be used. The text has one line a problem: key, value, what is allowed, the fix."""


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
    shape: Any = None  # recipe=bench: fields of a transformers configuration, for random weights; name_or_path gives the tokenizer
    quantization: Quantization = field(default_factory=Quantization)


@dataclass
class Draft:
    """A draft: a model with the same fields as a target, the target's first layers, or what stands in the text so far."""

    drafter: Drafter = Drafter.model
    name_or_path: str | None = None
    gguf_file: str | None = None
    revision: str | None = None
    dtype: Dtype = Dtype.fp32
    device: str = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    shape: Any = None
    quantization: Quantization = field(default_factory=Quantization)
    min_ngram: int = 2  # lookup and suffix: shortest and longest run of tokens to look for
    max_ngram: int = 8
    min_probability: float = 0.3  # suffix: least likely draft to propose, by the counts
    warm: bool = False  # suffix: keep what earlier calls wrote
    any_target: bool = False  # model: take it also if its card says that it was made for another target
    cross_vocab: CrossVocab = CrossVocab.auto  # cross_vocab, and model where the tokenizers differ
    num_layers: int | None = None  # early_exit: layers of the target to run
    plugin: str | None = None  # an entry point of the group specplug.drafters, or package.module:callable
    options: dict[str, Any] = field(default_factory=dict)  # plugin: its keyword arguments
    before: Before = Before.nothing  # ask this first, and the drafter when it has nothing good


@dataclass
class Verify:
    pass


@dataclass
class Token(Verify):
    """Keep a draft token with probability min(1, p/q); at temperature 0 this is the argmax comparison."""


@dataclass
class Block(Verify):
    """Judge the drafts of a round together: the same law, and never fewer kept on average than by the token rule."""


@dataclass
class Walk(Verify):
    """Draw from the target and go on while the draft is what was drawn: the ids of plain decoding under the same seed."""


@dataclass
class Schedule:
    pass


@dataclass
class Fixed(Schedule):
    """The same number of draft tokens in every round; 0 is plain decoding."""

    gamma: int = 4


@dataclass
class Confidence(Schedule):
    """Up to gamma tokens, fewer where the draft model is less sure than the threshold: its highest probability, or 1 - sqrt(entropy)."""

    gamma: int = 8
    threshold: float = 0.4
    criterion: Criterion = Criterion.probability


@dataclass
class Adaptive(Schedule):
    """What gives most tokens per second, by what is measured here and lately; 0 where drafting does not pay."""

    max_gamma: int = 16
    frozen: str | None = None  # schedule.json of an earlier run: draft by its estimates, and change nothing

    tree_depth: int | None = None  # draft trees of at most this depth; what is chosen is the number of nodes


@dataclass
class Tree(Schedule):
    """A tree of drafts in every round: several for one place, each with continuations of its own."""

    budget: int = 16  # nodes, where the draft thinks they are likeliest
    depth: int = 5  # longest path
    branching: list[int] = field(default_factory=list)  # in place of both: children of each node, by depth, as [4,2,1]


@dataclass
class Engine:
    pass


@dataclass
class Auto(Engine):
    """`rounds` where it is exact, else `lookahead`, else plain `generate` with a reason."""


@dataclass
class Rounds(Engine):
    """Our loop, or an error that says why it cannot serve this call."""


@dataclass
class Lookahead(Engine):
    """transformers' own loop over a target that looks ahead: equal ids under the same seed, at the loop's cost per token."""


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
    """Rows to evaluate or to train on. Column names may go into nested columns by dots: translation.de."""

    name: str = MISSING
    path: str | None = None  # a file; read instead of the hub where both are given
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
    template: str | None = None  # {prompt} and the record's columns
    system: str | None = None
    chat: bool = True
    few_shot: int = 0  # solved examples before each prompt: of few_shot_path or few_shot_split, else the first rows
    few_shot_path: str | None = None
    few_shot_split: str | None = None
    shuffle: bool = False
    shuffle_seed: int = 0
    shuffle_buffer: int = 10000  # rows held to draw from; the set is streamed
    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    placeholder: str | None = None  # prompts that begin so were not filled in
    metric: Metric = Metric.none
    answer: Answer = Answer.full
    tests: str | None = None  # pass_at_1: a template like `template`, of what a program has to pass
    head_column: str | None = None  # pass_at_1: the beginning of the program, which the answer completes
    allow_code_execution: bool = False  # pass_at_1: run what the model wrote


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
    kernel: Kernel = Kernel.auto
    tracker: TrackerName = TrackerName.none
    graph: Graph = Graph.capture
    seed: int = 0
    threads: int | None = None
    resume: str | None = None


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its name if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def choice(value: Any) -> str:
    """The name that a choice which is code has on the command line: `fixed` of a `Fixed`."""
    return type(value).__name__.lower()


def to_dict(config: Any) -> dict[str, Any]:
    """Plain values, ready for JSON: what a run writes down, and what `resume` compares. Choices that are code get their name."""
    values: Any = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    for group in ("verify", "schedule", "engine", "recipe"):
        values[group] = {"name": choice(getattr(config, group)), **values[group]}
    return values
