"""Attention of a few positions without copies of the keys and values, in place of torch's while a call is decoded.

Most models share each key and value head among several query heads. For one position transformers packs those query heads into
one product, the older ones only where there is no mask; for several positions with a mask, which is what every round has, it writes out
keys and values once for each query head instead, all of the text at each layer of each pass. Packed as well, several positions read the
text once, and cost about what one costs. Results differ from transformers' by rounding, as its own do between one position and several.

Served: attention modules of transformers with sdpa, on any device. What they are given otherwise goes to transformers' function.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specplug.attention import own_sdpa
from specplug.capture import MAX_WIDTH
from specplug.swapping import entered, modules_of

NAME = "specplug_packed"


def packed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> Any:
    """What transformers calls with queries (B, H, W, D), keys and values (B, H / groups, T, D), and a mask (B or 1, 1, W, T).

    Names are those of transformers' functions, since some models give the mask by name.
    """
    groups: Any = getattr(module, "num_key_value_groups", 1)
    width, mask = query.shape[2], attention_mask
    if (
        mask is None
        or width > MAX_WIDTH
        or mask.shape[1] != 1
        or given.get("dropout")
        or given.get("position_bias") is not None
        or given.get("softcap") is not None
        or given.get("output_attentions")
    ):
        return sdpa_attention_forward(module, query, key, value, mask, **given)
    num_rows, num_heads, _, size = query.shape
    query = query.reshape(num_rows, num_heads // groups, groups * width, size)
    mask = mask if width == 1 else mask.repeat(1, 1, groups, 1)
    if mask.dtype == torch.bool and mask.device.type == "cpu":
        # As attention does by itself, there at each layer; here a recording does it once for all of them.
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    found = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=given.get("scaling"))
    found = found.reshape(num_rows, num_heads, width, value.shape[-1])
    return found.transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def swapped(kernel: str, *models: Any) -> Iterator[None]:
    """Within it, the attention of `models` is packed where it is served, unless `kernel` is "torch"."""
    served = kernel != "torch" and own_sdpa()
    modules = [each for model in models for each in modules_of(model) if _serves(each)] if served else []
    copies: dict[int, Any] = {}  # by config, which the modules of a model share
    with entered(modules, functools.partial(_enter, copies), _leave):
        yield


# Modules of models that several threads decode with at once: how many of them are inside, and the configs that they had.
_INSIDE: dict[nn.Module, tuple[int, Any]] = {}


def _enter(copies: dict[int, Any], module: Any) -> None:
    count, config = _INSIDE.get(module, (0, module.config))
    if not count:
        if id(config) not in copies:
            AttentionInterface.register(NAME, packed)
            copies[id(config)] = copy.copy(config)
            copies[id(config)]._attn_implementation_internal = NAME
        module.config = copies[id(config)]
    _INSIDE[module] = count + 1, config


def _leave(module: Any) -> None:
    count, config = _INSIDE[module]
    if count > 1:
        _INSIDE[module] = count - 1, config
        return
    del _INSIDE[module]
    if module.config._attn_implementation == NAME:
        module.config = config


def _serves(module: Any) -> bool:
    """An attention module that asks its config for the function. Also one that does not share keys and values among queries: a recording
    then makes its mask once for all layers."""
    groups = vars(module).get("num_key_value_groups", 0)
    if not isinstance(groups, int) or groups < 1 or not type(module).__module__.startswith("transformers."):
        return False
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return implementation in ("sdpa", NAME) and not module.training
