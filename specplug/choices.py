"""The values that single fields of the configuration may have, where these are a few names."""

from enum import Enum


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
