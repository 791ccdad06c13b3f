"""The key-value cache of transformers: its name, whether it can be rolled back, rolling it back.

transformers 5.24 renamed the argument of `forward` and the field of its outputs from `past_key_values` to `cache`; both
are served here and nowhere else.
"""

from collections.abc import Mapping
from typing import Any

from packaging.version import Version
from transformers import DynamicCache, __version__
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

NAME = "cache" if Version(__version__) >= Version("5.24.0.dev0") else "past_key_values"
CROPPABLE = (DynamicLayer, DynamicSlidingWindowLayer)


def get_cache(outputs_or_kwargs: Mapping[str, Any]) -> Any:
    return outputs_or_kwargs.get(NAME)


def new_draft_cache(config: Any) -> DynamicCache:
    """An empty cache for several passes in a row that may all be taken back.

    Before 5.24 a sliding-window layer could not record over more than one pass; a full layer with the window in the mask
    gives the same at the cost of memory.
    """
    return DynamicCache(config=config) if NAME == "cache" else DynamicCache()


def why_not_croppable(cache: Any) -> str | None:
    """None if the last positions of this cache can be taken back exactly, else the reason."""
    if cache is None:
        return "the call uses no key-value cache (use_cache=False)"
    if type(cache) is not DynamicCache:
        return f"its cache is a {type(cache).__name__}, and only DynamicCache can be rolled back here"
    for layer in cache.layers:
        if type(layer) not in CROPPABLE:
            return f"its cache has layers of type {type(layer).__name__}, which cannot be rolled back here"
    return None


def prepare_for_crop(cache: DynamicCache) -> None:
    """To be called once, after the prompt: sliding-window layers keep what a later `crop` may need."""
    cache.activate_past_recording()


def crop(cache: DynamicCache, tokens_to_remove: int) -> None:
    """Take back the last positions. Also to be called with 0: sliding-window layers then drop what they can."""
    cache.crop(-tokens_to_remove)


def finish(cache: DynamicCache) -> None:
    """Undo `prepare_for_crop`, so that a cache handed back behaves as plain decoding would have left it."""
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = False
