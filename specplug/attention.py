"""Whether the attention of a model can be trusted with a pass over several positions: does it keep each from those behind it?

transformers makes masks for the kinds of attention that it knows, and none for others: paged attention, which continuous batching
gives masks of its own, and functions that were registered without one. A token alone needs no mask, so plain decoding may well be right
with those; a token and the drafts behind it are not. Models that may look ahead by their configuration, as an encoder that generates does,
are tried out on a few tokens.
"""

import inspect
import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specplug.cache import NAME
from specplug.config import first_line

# What models of transformers import to mask what is out of a window, or in another chunk.
WINDOWED = ("create_sliding_window_causal_mask", "create_chunked_causal_mask", "create_masks_for_generate")
_FOUND: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, str | None]] = weakref.WeakKeyDictionary()


def why_not_attention(model: Any) -> str | None:
    """None if passes over drafts are masked, else the reason why they are not."""
    kind = getattr(model.config.get_text_config(), "_attn_implementation", None)
    if kind is None or kind in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
        return _why_not_window(model) or _why_not_causal(model)
    return (
        f"transformers makes no masks for its attention, {kind}, so that drafts would be seen by what stands before them; load it with"
        " attn_implementation=sdpa, or register a mask function under that name too"
    )


def own_sdpa() -> bool:
    """Whether sdpa is transformers' function: callers may register another under that name."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def takes_positions(model: Any) -> bool:
    """Whether its forward is told where tokens stand; else it counts from the start of its cache, padding included."""
    return "position_ids" in inspect.signature(type(model).forward).parameters


def _why_not_window(model: Any) -> str | None:
    """None if several positions are kept from what is out of the window of the first, as one is by the cache alone."""
    name = type(model).__module__
    if not name.startswith("transformers.") or not getattr(model.config.get_text_config(), "sliding_window", None):
        return None  # masks of other models are not known
    layers = DynamicCache(config=model.config).layers
    if any(each in vars(sys.modules[name]) for each in WINDOWED) or not any(
        type(layer) is DynamicSlidingWindowLayer for layer in layers
    ):
        return None
    return f"{type(model).__name__} has a window in its cache and none in its masks, so that drafts would see beyond it"


def _why_not_causal(model: Any) -> str | None:
    """None if each position is computed of what is before it alone; tried out where that is not plain."""
    text = model.config.get_text_config()
    encodes = getattr(text, "is_decoder", None) is False and not any(
        getattr(each, "is_causal", False) for each in model.modules()
    )
    signs = (
        encodes,
        getattr(text, "is_causal", True) is False,
        bool(getattr(text, "use_bidirectional_attention", None)),
        not takes_positions(model),
    )
    if not any(signs):
        return None
    found = _FOUND.get(model)
    if found is None or found[0] != signs:
        found = _FOUND[model] = signs, _tried_out(model, text.vocab_size)
    return found[1]


def _tried_out(model: Any, vocab_size: int) -> str | None:
    """Score three tokens behind three others at once, and one by one: that may change them by no more than rounding does, which is a
    small share of what each differs from the others by."""
    ids = torch.tensor([[number % vocab_size for number in (11, 5, 17, 7, 13, 3)]], device=model.device)
    try:
        with torch.no_grad():
            at_once, one_by_one = _logits(model, ids, 3), _logits(model, ids, 1)
    except Exception as error:
        return f"a pass of {type(model).__name__} over several tokens fails: {first_line(error)}"
    share = 0.01 if model.dtype == torch.float32 else 0.1
    differ = (at_once - one_by_one).norm(dim=-1)
    if bool((differ <= share * (one_by_one - one_by_one.roll(1, 0)).norm(dim=-1)).all()):  # not for nan
        return None
    return (
        f"{type(model).__name__} computes a token otherwise with others behind it, so that drafts would be seen by what stands before"
        " them; if it was trained to look back alone, its configuration says otherwise (is_decoder, is_causal)"
    )


def _logits(model: Any, ids: Tensor, width: int) -> Tensor:
    """(3, V) of the last three of six tokens, so many at a time."""
    cache = DynamicCache(config=model.config)
    given = {"use_cache": True, "return_dict": True, NAME: cache}
    model(input_ids=ids[:, :3], **given)
    found = [model(input_ids=ids[:, at : at + width], **given).logits[0, -width:] for at in range(3, 6, width)]
    return torch.cat(found).float()
