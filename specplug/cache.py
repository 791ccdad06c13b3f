"""The key-value cache of transformers: its name, whether it can be rolled back, rolling it back, room to write into.

transformers 5.24 renamed the argument of `forward` and the field of its outputs from `past_key_values` to `cache`; both
are served here and nowhere else.
"""

from collections.abc import Mapping
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache, __version__
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

NAME = "cache" if Version(__version__) >= Version("5.24.0.dev0") else "past_key_values"
CROPPABLE = (DynamicLayer, DynamicSlidingWindowLayer)
ROOM = 64  # positions at least that a layer which is out of room gets


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
    if getattr(cache, "offloading", False):
        return "its cache is offloaded, and only one that stays on the device can be rolled back here"
    for layer in cache.layers:
        if type(layer) not in CROPPABLE:
            return f"its cache has layers of type {type(layer).__name__}, which cannot be rolled back here"
    return None


class RoomyLayer(DynamicLayer):
    """A full layer with room behind what it holds. New positions are written there, where transformers' layer copies all of the
    text at each pass; to take some back, the views `keys` and `values`, (B, H, T, D), are made shorter.

    Room is added by chunks that grow with the text, so a short text does not pay for a long maximum.
    """

    keys: Any
    values: Any

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.replaced, self.keys, self.values = layer, layer.keys, layer.values
        self.device, self.is_initialized = layer.keys.device, True
        self._rooms: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        old = self.keys.shape[-2]
        self.lengthen(key_states.shape[-2])
        self.keys[..., old:, :] = key_states
        self.values[..., old:, :] = value_states
        return self.keys, self.values

    def lengthen(self, width: int) -> None:
        """Have so many more positions, in which anything may stand."""
        held, length = (self.keys, self.values), self.keys.shape[-2]
        if not self._has_room(length + width):
            room = length + width + max(ROOM, length // 4)
            self._rooms = tuple(each.new_empty((*each.shape[:2], room, each.shape[3])) for each in held)
            for room_of, each in zip(self._rooms, held, strict=True):
                room_of[:, :, :length] = each
        self.keys, self.values = (each[:, :, : length + width] for each in self._rooms)

    def _has_room(self, length: int) -> bool:
        """Also false where somebody has put other tensors in the place of ours."""
        return (
            bool(self._rooms)
            and length <= self._rooms[0].shape[2]
            and self.keys.data_ptr() == self._rooms[0].data_ptr()
            and self.values.data_ptr() == self._rooms[1].data_ptr()
        )

    def keep(self, width: int, places: list[int]) -> None:
        """See `keep` below: those that stay are moved to the front of the last `width` positions."""
        first = self.keys.shape[-2] - width
        index = (first + torch.tensor(places, dtype=torch.long)).to(self.keys.device)
        with torch.inference_mode():  # where a draft's keys and values were made
            for each in (self.keys, self.values):
                each[:, :, first : first + len(places)] = each.index_select(2, index)
        self.keys, self.values = (each[:, :, : first + len(places)] for each in (self.keys, self.values))


def prepare_for_crop(cache: DynamicCache, roomy: bool = False) -> None:
    """To be called once, after the prompt: sliding-window layers keep what a later `crop` may need. `roomy`: full layers get
    room to write into."""
    cache.activate_past_recording()
    if roomy:
        layers: list[Any] = cache.layers
        cache.layers = [
            RoomyLayer(each) if type(each) is DynamicLayer and each.is_initialized else each for each in layers
        ]


def crop(cache: DynamicCache, tokens_to_remove: int) -> None:
    """Take back the last positions. Also to be called with 0: sliding-window layers then drop what they can."""
    cache.crop(-tokens_to_remove)


def keep(cache: DynamicCache, width: int, places: list[int]) -> None:
    """Of the last `width` positions keep these, in this order, and take back the others: of a tree, the path that was kept.

    For layers that hold the whole text; see `tree_pass.why_not_tree`.
    """
    if places == list(range(len(places))):
        crop(cache, width - len(places))
        return
    layers: list[Any] = cache.layers
    for layer in layers:
        if isinstance(layer, RoomyLayer):
            layer.keep(width, places)
        elif layer.is_initialized:
            first = layer.keys.shape[-2] - width
            index = torch.cat([torch.arange(first), first + torch.tensor(places)]).to(layer.keys.device)
            layer.keys, layer.values = layer.keys.index_select(-2, index), layer.values.index_select(-2, index)


def finish(cache: DynamicCache) -> None:
    """Undo `prepare_for_crop`, so that a cache handed back behaves as plain decoding would have left it."""
    for place, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = False
        elif isinstance(layer, RoomyLayer):
            plain = layer.replaced
            plain.keys, plain.values = layer.keys, layer.values
            cache.layers[place] = plain


def align(cache: DynamicCache, remove: Tensor, length: int) -> None:
    """Roll back each sequence of a batch by its own number of positions, and align them to the right again.

    Args:
        remove: (B,) last positions to take back, per row.
        length: positions that the cache holds afterwards. Where a row has fewer, what stands on its left is to be masked,
            as the padding of a prompt is.
    """
    layers: list[Any] = cache.layers
    removed = remove.tolist()
    for layer in layers:
        if not layer.is_initialized:  # shares another layer's keys and values
            continue
        sliding = isinstance(layer, DynamicSlidingWindowLayer)
        kept = min(length, layer.sliding_window - 1) if sliding else length
        layer.keys, layer.values = _aligned(layer.keys, removed, kept), _aligned(layer.values, removed, kept)
        if sliding:
            layer.cumulative_length = length


def _aligned(states: Tensor, removed: list[int], kept: int) -> Tensor:
    """(B, H, T, D) -> (B, H, kept, D): of each row the last positions before those removed; zeros where it has fewer."""
    held = states.shape[-2]
    if min(removed) == max(removed) <= held - kept:  # nothing has to be moved
        return states[:, :, held - removed[0] - kept : held - removed[0]]
    rows = []
    for row, less in zip(states, removed, strict=True):
        start = held - less - kept
        have = row[:, max(start, 0) : held - less]
        rows.append(have if start >= 0 else torch.nn.functional.pad(have, (0, 0, -start, 0)))
    return torch.stack(rows)


def select(cache: DynamicCache, rows: list[int]) -> None:
    """Keep only these sequences of the batch."""
    layers: list[Any] = cache.layers
    for layer in layers:
        if layer.is_initialized:
            index = torch.tensor(rows, device=layer.keys.device)
            layer.keys, layer.values = layer.keys[index], layer.values[index]
