"""Which target a saved draft was made for, so that it is not put beside another one by mistake."""

import hashlib
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from specplug.config import ConfigError, Draft, Model

NUM_WEIGHTS = 4096
CARD = "README.md"
KEY = "specplug"  # in the card's front matter


def fingerprint(model: PreTrainedModel) -> str:
    """12 hexadecimal digits from the signs of weights spread over the embeddings and from the model's shape.

    Signs, since they survive what is done to a model on loading: half precision, a quantized copy, another device.
    """
    config = model.config.get_text_config()
    shape = (model.config.model_type, config.num_hidden_layers, config.hidden_size)
    weights = embeddings(model).flatten()
    step = max(weights.numel() // NUM_WEIGHTS, 1)
    signs = (weights[::step][:NUM_WEIGHTS] < 0).tolist()
    return hashlib.sha256(repr((shape, signs)).encode()).hexdigest()[:12]


def embeddings(model: PreTrainedModel) -> Tensor:
    """(V, hidden size)."""
    module: Any = model.get_input_embeddings()
    weight: Any = module.weight
    return weight.detach()


def stated_target(target: Model, model: PreTrainedModel) -> dict[str, Any]:
    """For the front matter of a draft's card."""
    return {KEY: {"target": target.name_or_path, "target_fingerprint": fingerprint(model)}}


def check_card(draft: Draft, path: str, target: PreTrainedModel) -> None:
    """Raise ConfigError if the draft's card says that it was made for another target. Most cards say nothing."""
    stated = _read_card(path, draft.revision)
    made_for = stated.get("target_fingerprint")
    if made_for is None or draft.any_target:
        return
    ours = fingerprint(target)
    if made_for != ours:
        raise ConfigError(
            f"draft.name_or_path={draft.name_or_path}: was made for {stated.get('target')} (fingerprint {made_for}), and the"
            f" target here is {target.name_or_path or type(target).__name__} ({ours}); name that target, or set"
            " draft.any_target=true: outputs stay exact, and fewer drafts are accepted"
        )


def _read_card(path: str, revision: str | None) -> dict[str, Any]:
    """Our part of the front matter; empty if there is none, or no card."""
    file = cached_file(
        path,
        CARD,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return {}
    parts = Path(file).read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        front_matter = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    ours = front_matter.get(KEY) if isinstance(front_matter, dict) else None
    return ours if isinstance(ours, dict) else {}
