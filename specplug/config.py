"""The configuration as dataclasses, which are its schema. How one comes about is in compose.py."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING, OmegaConf


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
    suffix = "suffix"
    cross_vocab = "cross_vocab"
    early_exit = "early_exit"
    plugin = "plugin"


class CrossVocab(Enum):
    """How a draft with another tokenizer drafts: auto is by intersection when sampling, by string when greedy."""

    auto = "auto"
    intersection = "intersection"
    string = "string"


class Before(Enum):
    """What may be asked before the drafter itself, in a chain."""

    nothing = "nothing"
    lookup = "lookup"
    suffix = "suffix"


class Metric(Enum):
    """How an answer is scored, see specplug/metrics."""

    none = "none"
    exact_match = "exact_match"
    numeric = "numeric"
    multiple_choice = "multiple_choice"
    f1 = "f1"
    bleu = "bleu"
    chrf = "chrf"
    rouge = "rouge"
    pass_at_1 = "pass_at_1"


class Answer(Enum):
    """What of an answer and of its reference is compared."""

    full = "full"
    last_line = "last_line"


class OnError(Enum):
    """What a sample that fails does to the run: end it, or be written down."""

    stop = "stop"
    record = "record"


class Precision(Enum):
    fp32 = "no"
    fp16 = "fp16"
    bf16 = "bf16"


class Loss(Enum):
    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"
    jsd = "jsd"
    tv = "tv"


class Kernel(Enum):
    """What multiplies in linear layers while a call is decoded."""

    auto = "auto"
    torch = "torch"
    numba = "numba"


class TrackerName(Enum):
    """Where numbers go besides the run folder."""

    none = "none"
    trackio = "trackio"
    wandb = "wandb"
    tensorboard = "tensorboard"


class Criterion(Enum):
    """How sure a draft model is: its highest probability, or 1 - sqrt(entropy in nats)."""

    probability = "probability"
    entropy = "entropy"


class Graph(Enum):
    """Whether passes that come up again and again are recorded and replayed."""

    capture = "capture"
    compile = "compile"
    off = "off"


class Texts(Enum):
    """What a draft is distilled on."""

    target = "target"
    reference = "reference"


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
class Recipe:
    pass


@dataclass
class Evaluate(Recipe):
    limit: int | None = None
    compare_assisted: bool = True
    warmup: int = 1
    bootstrap: int = 2000
    repeats: int = 1  # times each side is run on a prompt; the median counts
    batch_size: int = 1  # prompts decoded together
    on_error: OnError = OnError.record
    trace: int = 3  # prompts of which every draft's fate is written down, in calls of their own behind the timed ones


@dataclass
class Sweep(Evaluate):
    """An evaluation that is one point of a curve: specplug -m recipe=sweep schedule=fixed schedule.gamma=1,2,4"""


@dataclass
class Compare(Recipe):
    """Run folders of evaluations, side by side."""

    runs: list[str] = field(default_factory=list)
    bootstrap: int = 2000


@dataclass
class Calibrate(Recipe):
    """Measure alpha and costs for a pair and a data set, and say what gamma theory would take."""

    limit: int | None = 12
    gamma: int = 8  # drafts a round while alpha is measured
    max_gamma: int = 16
    repeats: int = 15  # of each timed pass


@dataclass
class Certify(Recipe):
    """Exactness alone, and a page that says so."""

    limit: int | None = 8
    seeds: int = 8  # sampled answers to each prompt with verify=walk, beside plain ones under the same seed
    draws: int = 200  # short sampled texts for each prompt, whose law is compared with the target's
    tokens: int = 4  # of each of those
    gamma: int = 4  # drafts a round in place of schedule=adaptive, which may stop drafting
    false_alarm: float = 1e-6  # how often the comparison of laws fails where nothing is wrong


@dataclass
class Bench(Recipe):
    """Every way to decode, timed in turn, and where a round's time goes."""

    limit: int | None = 8
    gammas: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    repeats: int = 3  # of each way on each batch of prompts; the median counts
    batch_size: int = 1  # prompts decoded together
    prompt_tokens: int | None = None  # cut or repeat prompts to so many tokens
    compare_assisted: bool = True
    synthetic_alpha: float | None = None  # keep each draft with this probability, whatever it is
    growth: Any = (
        None  # in place of the ways, how cost grows with context, batch, gamma or vocabulary; a list is taken too
    )
    points: list[int] = field(
        default_factory=list
    )  # growth: where it is measured, in place of those of growth_bench.py


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
    loss_on_prompt: bool = False
    save_dtype: Dtype = Dtype.fp32


@dataclass
class Train(Training):
    tokenizer: str | None = None
    vocab_size: int = 1000


@dataclass
class Distill(Training):
    loss: Loss = Loss.forward_kl
    texts: Texts = Texts.target  # the target's own answers to the prompts, or the references of the data set
    on_policy: float = 0.0  # share of the batches whose answers the draft itself writes
    top_k: int | None = None  # keep the target's likeliest tokens on disk, so that it runs once; null: all, each time
    freeze_embeddings: bool = False  # leave embeddings and head as they are
    samples: int = 2000
    sample_batch_size: int = 32
    temperature: float = 1.0
    sample_new_tokens: int = 128


@dataclass
class Prune(Recipe):
    """Which of the target's layers a draft begins with: those named, or so many, evenly spread from first to last."""

    layers: list[int] = field(default_factory=list)
    num_layers: int | None = None
    output: str | None = None
    save_dtype: Dtype = Dtype.fp32


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


def to_dict(config: Any) -> dict[str, Any]:
    """Plain values, ready for JSON: what a run writes down, and what `resume` compares. Choices that are code get their name."""
    values: Any = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    for group in ("verify", "schedule", "engine", "recipe"):
        values[group] = {"name": type(getattr(config, group)).__name__.lower(), **values[group]}
    return values
