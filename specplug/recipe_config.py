"""The configuration of the recipes, each a dataclass with what it alone reads."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from specplug.choices import Dtype, Loss, OnError, Precision, Texts


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
    # In place of the ways, how cost grows with context, batch, gamma or vocabulary; a list is taken too. `points`: where that is
    # measured, if not where growth_bench.py says.
    growth: Any = None
    points: list[int] = field(default_factory=list)


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
