"""Loading targets and drafts: a hub name, a folder, a GGUF file, or an embedded model; dtype, device, quantization.

Knows nothing about drafting beyond whether two vocabularies fit.
"""

import dataclasses
import difflib
import logging
import os
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specplug.config import ConfigError, Draft, Model, QuantizationMethod, first_line
from specplug.sources import ASSET_PREFIX, ASSETS

log = logging.getLogger(__name__)

# Embeddings padded for the hardware: sizes are multiples of this, and differ by a few such steps at most.
PADDING_MULTIPLE = 64
PADDING_LIMIT = 0.02
# Of a transformers configuration: none of these may be below 1.
COUNTS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def load_target(config: Model) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Raises ConfigError in one line if it cannot be had."""
    return load_model(config, "target"), load_tokenizer(config, "target")


def load_model(config: Model | Draft, role: str) -> PreTrainedModel:
    """A model ready to generate, in eval mode. `role` is "target" or "draft", for messages."""
    device = pick_device(config.device, role)
    if config.shape is not None:
        return model_of_shape(config, role, device)
    path, gguf_file = locate(config, role)
    kwargs: dict[str, Any] = {
        "dtype": getattr(torch, config.dtype.value),
        "trust_remote_code": config.trust_remote_code,
    }
    if config.revision is not None:
        kwargs["revision"] = config.revision
    if config.attn_implementation is not None:
        kwargs["attn_implementation"] = config.attn_implementation
    quantization = quantization_config(config, role)
    if quantization is not None:
        kwargs |= {"quantization_config": quantization, "device_map": {"": device}}
    if gguf_file is not None:
        # Plain dense weights: always right, and the verdict on exactness then has no third party in it.
        kwargs |= {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise refused_attention(config, role, error) or ConfigError(
            f"{role}.name_or_path={config.name_or_path}: cannot be loaded: {first_line(error)}"
        ) from error
    if quantization is None:
        model = model.to(device)
    return model.eval()


def model_of_shape(config: Model | Draft, role: str, device: str) -> PreTrainedModel:
    """Random weights in the shape that is given: as quick as real ones, and without a download."""
    kwargs = {} if config.attn_implementation is None else {"attn_implementation": config.attn_implementation}
    try:
        with torch.device(device):
            model = random_model(f"{role}.shape", config.shape, dtype=getattr(torch, config.dtype.value), **kwargs)
    except (ConfigError, ImportError) as error:
        raise refused_attention(config, role, error) or error from None
    return model.eval()


def refused_attention(config: Model | Draft, role: str, error: BaseException) -> ConfigError | None:
    """If the kind of attention is why a model was not loaded: that, in one line. transformers says what it lacks."""
    kind = config.attn_implementation
    if kind is None or not (isinstance(error, ImportError) or "attn_implementation" in str(error)):
        return None
    reason = first_line(error.__cause__ or error)
    return ConfigError(f"{role}.attn_implementation={kind}: {reason} Leave it out, or take sdpa or eager.")


def random_model(key: str, fields: dict[str, Any], **kwargs: Any) -> PreTrainedModel:
    """Random weights, from the fields of a transformers configuration that `key` gave, and one pass to see that they run.

    Raises ConfigError.
    """
    kind = fields.get("model_type", "llama")
    given = {name: value for name, value in fields.items() if name != "model_type"}
    check_numbers(key, given)  # before transformers divides by them
    try:
        shape = AutoConfig.for_model(kind, **given)
        check_shape(key, shape, kind, given)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape, **kwargs).eval()
        with torch.no_grad():
            model(input_ids=torch.zeros((1, 2), dtype=torch.long, device=model.device))
    except (ConfigError, ImportError):
        raise
    except Exception as error:  # whatever a model makes of numbers that do not go together
        reason = first_line(error.__cause__ or error)
        raise ConfigError(f"{key}: {reason}; give the fields of a transformers configuration") from error
    return model.train()


def check_numbers(key: str, values: dict[str, Any]) -> None:
    """Of sizes and layers there has to be one at least, in what is given or in what it comes to."""
    for name in COUNTS:
        value = values.get(name)
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{key}: {name}={value}: must be 1 or more")


def check_shape(key: str, shape: PreTrainedConfig, kind: str, given: dict[str, Any]) -> None:
    """Raise ConfigError where a model would not run, or would not read what it is given."""
    declared = [each.name for each in dataclasses.fields(shape)]
    for name, value in given.items():
        # What is not declared stays in the configuration all the same; ids of special tokens do no harm.
        if name in vars(shape) and name not in declared and not name.endswith("_token_id"):
            near = difflib.get_close_matches(name, declared, n=1)
            raise ConfigError(
                f"{key}: {name}={value}: nothing of {kind} reads it; {f'did you mean {near[0]}?' if near else 'leave it out'}"
            )
    text = shape.get_text_config()
    check_numbers(key, {name: getattr(text, name, None) for name in COUNTS})
    heads, shared = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        told = "" if "num_key_value_heads" in given else f", which {kind} has where it is not given"
        raise ConfigError(
            f"{key}: num_attention_heads={heads} with num_key_value_heads={shared}{told}: must be a multiple of it;"
            f" give num_key_value_heads={heads}, or a number that divides it"
        )


def load_tokenizer(config: Model | Draft, role: str) -> PreTrainedTokenizerBase:
    path, gguf_file = locate(config, role)
    kwargs: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.revision is not None:
        kwargs["revision"] = config.revision
    if gguf_file is not None:
        kwargs["gguf_file"] = gguf_file
    try:
        return AutoTokenizer.from_pretrained(path, **kwargs)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(
            f"{role}.name_or_path={config.name_or_path}: has no usable tokenizer: {first_line(error)}"
        ) from error


def check_pair(
    target: PreTrainedModel, draft: PreTrainedModel, target_tokenizer: Any = None, draft_tokenizer: Any = None
) -> None:
    """Raise ConfigError unless a token id means the same to both.

    Sizes may differ by padding (151936 and 152064 for one tokenizer). Where both tokenizers are known they decide.
    """
    if draft is target:
        raise ConfigError(
            "draft is the target itself; it would cost more than it saves. Name a smaller or quantized one."
        )
    sizes = [model.config.get_text_config().vocab_size for model in (target, draft)]
    named = f"the target has {sizes[0]} tokens and the draft {sizes[1]}"
    fix = "take a draft of the same family, draft=lookup, or attach the pipeline: with both tokenizers known it is drafted as text"
    if target_tokenizer is not None and draft_tokenizer is not None:
        if target_tokenizer.get_vocab() != draft_tokenizer.get_vocab():
            raise ConfigError(
                f"draft and target have different vocabularies: {named}, and their tokenizers differ; {fix}"
            )
        return
    padded = all(size % PADDING_MULTIPLE == 0 for size in sizes) and max(sizes) - min(sizes) <= PADDING_LIMIT * max(
        sizes
    )
    if sizes[0] != sizes[1] and not padded:
        raise ConfigError(f"draft and target have different vocabularies: {named}; {fix}")


def context_length(model: PreTrainedModel) -> int | None:
    """Positions that a model has for prompt and answer together; None where its configuration names no limit."""
    length: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return length


def share_embeddings(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Hold embeddings and head once where the draft's are the target's, bit by bit: a quantized copy's, a pruned model's.

    For drafts that were loaded here; nobody else holds them. Both models read them, and neither is trained meanwhile.
    """
    for of in (PreTrainedModel.get_input_embeddings, PreTrainedModel.get_output_embeddings):
        theirs: Any = getattr(of(target), "weight", None)
        ours: Any = getattr(of(draft), "weight", None)
        if (
            isinstance(theirs, torch.nn.Parameter)
            and type(ours) is type(theirs)  # a quantized head is of another kind
            and (theirs.shape, theirs.dtype, theirs.device) == (ours.shape, ours.dtype, ours.device)
            and torch.equal(theirs, ours)
        ):
            module: Any = of(draft)
            module.weight = theirs


def locate(config: Model | Draft, role: str) -> tuple[str, str | None]:
    """What to hand to from_pretrained: a name or folder, and the name of a GGUF file in it."""
    name = config.name_or_path or ""
    if name.startswith(ASSET_PREFIX):
        path = ASSETS / name.removeprefix(ASSET_PREFIX)
        if not path.is_dir():
            known = ", ".join(
                ASSET_PREFIX + str(p.parent.relative_to(ASSETS)) for p in sorted(ASSETS.glob("*/*/config.json"))
            )
            raise ConfigError(f"{role}.name_or_path={name}: not an embedded model; there are {known}")
        return str(path), None
    if name.endswith(".gguf"):
        if not os.path.isfile(name):
            raise ConfigError(f"{role}.name_or_path={name}: no such file; give the path of a .gguf file")
        return os.path.dirname(os.path.abspath(name)), os.path.basename(name)
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_path and not os.path.isdir(os.path.expanduser(name)):
        raise ConfigError(
            f"{role}.name_or_path={name}: no such folder; give a folder, a hub name (org/name) or a .gguf file"
        )
    return os.path.expanduser(name), config.gguf_file


def pick_device(device: str, role: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"{role}.device={device}: {first_line(error)}; take auto, cpu or cuda:0") from error
    return device


def quantization_config(config: Model | Draft, role: str) -> BitsAndBytesConfig | None:
    method = config.quantization.method
    if method is QuantizationMethod.none:
        return None
    if config.gguf_file is not None or (config.name_or_path or "").endswith(".gguf"):
        raise ConfigError(
            f"{role}/quantization={method.name}: a GGUF file is quantized already; take quantization=none"
        )
    if method is QuantizationMethod.int8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=method.value, bnb_4bit_compute_dtype=getattr(torch, config.dtype.value)
    )
