"""A draft that begins as some layers of its target, with the target's embeddings and head."""

import copy

from transformers import PreTrainedModel

from specplug.drafters.early_exit import layer_stack, num_stacked, with_layers


def spread(model: PreTrainedModel, num_layers: int) -> list[int]:
    """So many layers, evenly from the first to the last. Raises ValueError if there are not so many."""
    total = num_stacked(model)
    if not 1 <= num_layers < total:
        raise ValueError(f"num_layers={num_layers}: {type(model).__name__} has {total} layers; give 1 to {total - 1}")
    return sorted({round(number * (total - 1) / max(num_layers - 1, 1)) for number in range(num_layers)})


def keep_layers(model: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """A model of its own with these layers of `model`, counted from 0 and in this order. Raises ValueError."""
    total = num_stacked(model)
    if not layers or any(not 0 <= number < total for number in layers) or len(set(layers)) < len(layers):
        raise ValueError(
            f"layers={layers}: give different numbers from 0 to {total - 1}, {type(model).__name__} has {total}"
        )
    owner, name = layer_stack(model)
    path = next(path for path, module in model.named_modules() if module is owner)
    draft = copy.deepcopy(with_layers(model, layers))
    for position, layer in enumerate(getattr(draft.get_submodule(path), name)):
        for module in layer.modules():  # by this number a layer finds its part of the cache
            if hasattr(module, "layer_idx"):
                module.layer_idx = position
    return draft
