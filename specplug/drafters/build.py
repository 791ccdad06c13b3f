"""A drafter from whatever names one: a model, a name, a configuration, a plugin of another package."""

import importlib
import logging
from importlib.metadata import entry_points
from typing import Any

from transformers import PreTrainedModel

from specplug.config import Before, ConfigError, Draft, Dtype, QuantizationMethod, first_line
from specplug.config import Drafter as DrafterKind
from specplug.drafters import Drafter
from specplug.drafters.chain import ChainDrafter
from specplug.drafters.cross_vocab import CrossVocabDrafter
from specplug.drafters.early_exit import EarlyExitDrafter
from specplug.drafters.lookup import LookupDrafter
from specplug.drafters.model import ModelDrafter
from specplug.drafters.suffix import SuffixDrafter
from specplug.fingerprint import check_card
from specplug.models import check_pair, load_model, load_tokenizer, locate, share_embeddings

log = logging.getLogger(__name__)


def make_drafter(draft: Any, model: PreTrainedModel, tokenizer: Any) -> Drafter:
    """A drafter from whatever names one. Raises ValueError for anything else, and for the target itself."""
    if draft is None or (isinstance(draft, str) and draft in ("lookup", "suffix")):
        return SuffixDrafter() if draft == "suffix" else LookupDrafter()
    if draft is model:
        raise ValueError(
            "draft is the target itself; it would cost more than it saves. Name a smaller or quantized one."
        )
    if isinstance(draft, str):
        # A draft that is only named gets the target's device, and its dtype where that is an ordinary one.
        dtype = next((each for each in Dtype if each.value == str(model.dtype).removeprefix("torch.")), Dtype.fp32)
        draft = Draft(name_or_path=draft, dtype=dtype, device=str(model.device))
    if isinstance(draft, Draft):
        return build_drafter(draft, model, tokenizer)
    if isinstance(draft, PreTrainedModel):
        return ModelDrafter(draft)
    if isinstance(draft, (list, tuple)):
        return ChainDrafter([make_drafter(each, model, tokenizer) for each in draft])
    if hasattr(draft, "start"):
        return draft
    raise ValueError(
        f"draft={draft!r}: give a model, the name or folder of one, 'lookup', 'suffix', a list of these, a Drafter or a draft config"
    )


def build_drafter(config: Draft, target: PreTrainedModel, target_tokenizer: Any = None) -> Drafter:
    """The drafter that a draft config names, checked against the target. Raises ConfigError if the two do not fit."""
    method = config.quantization.method
    loads = (DrafterKind.model, DrafterKind.cross_vocab)
    if method is not QuantizationMethod.none and config.drafter not in loads:
        raise ConfigError(
            f"draft/quantization={method.name}: draft={config.drafter.value} loads no weights of its own; leave it out"
        )
    try:
        drafter = _own_drafter(config, target, target_tokenizer)
        if config.before is Before.nothing:
            return drafter
        return ChainDrafter([_text_drafter(config, config.before.value), drafter])
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"draft: {error}") from error


def _own_drafter(config: Draft, target: PreTrainedModel, target_tokenizer: Any) -> Drafter:
    if config.drafter in (DrafterKind.lookup, DrafterKind.suffix):
        return _text_drafter(config, config.drafter.value)
    if config.drafter is DrafterKind.early_exit:
        return EarlyExitDrafter(target, config.num_layers or 0)
    if config.drafter is DrafterKind.plugin:
        return load_plugin(config, target)
    if config.shape is not None:
        model = load_model(config, "draft")
        check_pair(target, model)
        return ModelDrafter(model)
    if config.name_or_path is None:
        raise ConfigError(
            "draft.name_or_path is not given; name a model or folder, or take draft=lookup, which needs none"
        )
    model = load_model(config, "draft")
    check_card(config, locate(config, "draft")[0], target)
    tokenizer = load_tokenizer(config, "draft") if target_tokenizer is not None else None
    differ = tokenizer is not None and target_tokenizer.get_vocab() != tokenizer.get_vocab()
    if config.drafter is DrafterKind.cross_vocab or differ:
        return _cross_vocab(config, model, tokenizer, target_tokenizer)
    check_pair(target, model, target_tokenizer, tokenizer)
    share_embeddings(target, model)
    return ModelDrafter(model)


def _cross_vocab(config: Draft, model: PreTrainedModel, tokenizer: Any, target_tokenizer: Any) -> Drafter:
    if tokenizer is None:
        raise ConfigError(
            "draft=cross_vocab: reads and writes text, so it needs the target's tokenizer; attach the pipeline, or make a"
            " CrossVocabDrafter(draft, draft_tokenizer, target_tokenizer)"
        )
    drafter = CrossVocabDrafter(model, tokenizer, target_tokenizer, config.cross_vocab.value)
    log.info(
        "draft and target have different tokenizers; of the target's %d tokens the draft has %d",
        len(target_tokenizer),
        drafter.translation.num_shared,
    )
    return drafter


def _text_drafter(config: Draft, kind: str) -> Drafter:
    if kind == "lookup":
        return LookupDrafter(config.min_ngram, config.max_ngram)
    return SuffixDrafter(config.min_ngram, config.max_ngram, config.min_probability, config.warm)


def load_plugin(config: Draft, target: PreTrainedModel) -> Drafter:
    """A drafter of another package: an entry point of the group `specplug.drafters`, or `package.module:callable`.

    It is called with `target=` and the options of the config. Raises ConfigError if it is not there, or makes no drafter.
    """
    name = config.plugin
    found = {each.name: each for each in entry_points(group="specplug.drafters")}
    if name in found:
        make = found[name].load()
    elif name is not None and ":" in name:
        module, _, attribute = name.partition(":")
        try:
            make = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"draft.plugin={name}: {first_line(error)}") from error
    else:
        known = ", ".join(sorted(found)) or "none is installed"
        raise ConfigError(f"draft.plugin={name}: give package.module:callable, or an entry point ({known})")
    drafter: Drafter = make(target=target, **config.options)
    if not hasattr(drafter, "start"):
        raise ConfigError(
            f"draft.plugin={name}: made a {type(drafter).__name__}, which has no start(); see docs/extending.md"
        )
    return drafter
