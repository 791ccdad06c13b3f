"""The target's own first layers draft: its embeddings, layers 1 to N, its last norm and its head.

LayerSkip (arXiv 2404.16710) trains targets for this; any other can be tried. The modules are shared with the target, so no
weight is loaded twice, and the target and its config are left as they are. The draft keeps a cache of its own, and is a
model like any other to `drafters/model.py`.
"""

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specplug.drafters.model import ModelDrafter


class EarlyExitDrafter(ModelDrafter):
    """Args: the target, and how many of its layers to run."""

    name = "early_exit"

    def __init__(self, target: PreTrainedModel, num_layers: int) -> None:
        super().__init__(first_layers(target, num_layers))


def first_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A model that shares everything with `model` but ends after so many layers.

    Raises ValueError if the model has no single stack of layers, or not so many.
    """
    total = num_stacked(model)
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or not 1 <= num_layers < total:
        raise ValueError(
            f"num_layers={num_layers!r}: {type(model).__name__} has {total} layers; an early exit takes 1 to {total - 1}"
        )
    return with_layers(model, list(range(num_layers)))


def with_layers(model: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """A model that shares everything with `model` but has only these of its layers, counted from 0."""
    owner, name = layer_stack(model)
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[number] for number in layers]
    return _shortened(model, owner, name, layers, config)  # type: ignore[return-value]


def num_stacked(model: PreTrainedModel) -> int:
    return len(getattr(*layer_stack(model)))


def layer_stack(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """The module that holds the list of all layers, and the list's name there."""
    total = model.config.get_text_config().num_hidden_layers
    found = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == total and total > 1
    ]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has no single stack of {total} layers to take some from; choose another kind of draft"
        )
    return found[0]


def _shortened(module: nn.Module, owner: nn.Module, name: str, layers: list[int], config: Any) -> nn.Module:
    """`module` with the modules on the way to the stack copied, and all others shared."""
    if owner not in list(module.modules()):
        return module
    short = copy.copy(module)
    short.__dict__["_modules"] = {
        key: child if child is None else _shortened(child, owner, name, layers, config)
        for key, child in module._modules.items()
    }
    if isinstance(short, PreTrainedModel):
        short.config = config
    if module is owner:
        stack = getattr(module, name)
        short._modules[name] = nn.ModuleList([stack[number] for number in layers])
    return short
