"""The target's own first layers draft: its embeddings, layers 1 to N, its last norm and its head.

LayerSkip (arXiv 2404.16710) trains targets for this; any other can be tried. The modules are shared with the target, so no
weight is loaded twice, and the target and its config are left as they are. For one sequence so are the keys and values: the
first layers of the target's cache hold what the draft would compute for the text, and get back what they held after each
proposal. In a batch, and for trees, the draft keeps a cache of its own, and is a model like any other to `drafters/model.py`.
"""

import copy
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specplug.cache import NAME, RoomyLayer
from specplug.drafters import Proposal, Request, Session
from specplug.drafters.model import ModelDrafter, ModelSession


class EarlyExitDrafter(ModelDrafter):
    """Args: the target, and how many of its layers to run."""

    name = "early_exit"

    def __init__(self, target: PreTrainedModel, num_layers: int) -> None:
        super().__init__(first_layers(target, num_layers))
        self.num_layers = num_layers

    def start(self, request: Request) -> Session:
        # Other kinds of cache may write in place, or move what they hold; before 5.24 a sliding window took back one pass only.
        if (
            not request.tree
            and type(request.cache) is DynamicCache
            and (NAME == "cache" or all(type(layer) is DynamicLayer for layer in request.cache.layers))
        ):
            return EarlyExitSession(self, request, self.num_layers)
        return super().start(request)


class EarlyExitSession(ModelSession):
    def __init__(self, drafter: ModelDrafter, request: Request, num_layers: int) -> None:
        super().__init__(drafter, request)
        self.num_layers = num_layers
        self.borrows: bool | None = None  # the target's keys and values; decided by the first text

    def propose(self, ids: Tensor, gamma: int) -> Proposal:
        num_cached = ids.shape[1] - 1
        if self.borrows is None:  # not where the cache begins with padding
            self.borrows = self.request.cache.get_seq_length() == num_cached
        if not self.borrows:
            return super().propose(ids, gamma)
        layers = self.request.cache.layers[: self.num_layers]
        self.cache = copy.copy(self.request.cache)
        self.num_cached = num_cached
        roomy = [layer for layer in layers if isinstance(layer, RoomyLayer)]
        if roomy:
            roomy[0].rooms.make_room(ids.shape[1] + gamma)  # so that nothing has to move while it is lent
        if len(roomy) == len(layers):
            self.cache.layers = list(roomy[0].rooms.first(len(layers)).layers)
            return super().propose(ids, gamma)
        self.cache.layers = layers
        held = [dict(vars(layer)) for layer in layers]
        try:
            return super().propose(ids, gamma)
        finally:  # a layer makes new tensors, or writes behind what it held, which is as it was
            for layer, state in zip(layers, held, strict=True):
                vars(layer).clear()
                vars(layer).update(state)

    def observe(self, num_accepted: int) -> None:
        if not self.borrows:
            super().observe(num_accepted)


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
        kept = nn.ModuleList([stack[number] for number in layers])
        kept.training = stack.training  # a new list is in training, and what is in training is not captured
        short._modules[name] = kept
    return short
