"""The key-value cache of transformers: its name, whether it can be rolled back, rolling it back, room to write into.

transformers 5.24 renamed the argument of `forward` and the field of its outputs from `past_key_values` to `cache`; both
are served here and nowhere else.
"""

import copy
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


class Rooms:
    """Where the keys and values of several layers stand, with room behind them: of equal shape in one tensor, (N, B, H, S, D), so that
    a pass that is replayed takes few inputs.

    Room is added by chunks that grow with the text, so a short text does not pay for a long maximum.
    """

    def __init__(self) -> None:
        self.layers: list[RoomyLayer] = []
        self.tensors: list[Tensor] = []
        # Of each tensor, what its parts are: 2 * i are the keys of layer i, 2 * i + 1 its values.
        self.places: list[list[int]] = []

    def add(self, layer: Any) -> "RoomyLayer":
        self.layers.append(RoomyLayer(layer, self))
        return self.layers[-1]

    def lengthen(self, width: int) -> list[Tensor]:
        """Have so many more positions in all layers, in which anything may stand: what they hold then, (N, B, H, T, D) each."""
        length = self.layers[0].get_seq_length() + width
        self.make_room(length)
        for layer in self.layers:
            layer.length = length
        return self.held(length)

    def held(self, length: int) -> list[Tensor]:
        return [each[:, :, :, :length] for each in self.tensors]

    def make_room(self, length: int) -> None:
        strangers = any(layer.given is not None for layer in self.layers)  # tensors that somebody else put there
        if self.tensors and not strangers and length <= self.tensors[0].shape[3]:
            return
        length = max(length, *(layer.get_seq_length() for layer in self.layers))
        room = length + max(ROOM, length // 4)
        held = [each for layer in self.layers for each in (layer.keys, layer.values)]
        self.places, self.tensors = alike(held), []
        buffers: dict[int, Tensor] = {}
        for places in self.places:
            like = held[places[0]]
            tensor = like.new_empty((len(places), *like.shape[:2], room, like.shape[3]))
            for number, place in enumerate(places):
                buffers[place] = tensor[number]
                buffers[place][:, :, : held[place].shape[2]] = held[place]
            self.tensors.append(tensor)
        for number, layer in enumerate(self.layers):
            layer.move(buffers[2 * number], buffers[2 * number + 1])

    def first(self, num_layers: int) -> "Rooms":
        """The first layers, in the same place, with lengths of their own."""
        some = Rooms()
        for layer in self.layers[:num_layers]:
            some.layers.append(layer.lent(some))
        places = [[place for place in each if place < 2 * num_layers] for each in self.places]
        some.places = [each for each in places if each]
        some.tensors = [tensor[: len(each)] for tensor, each in zip(self.tensors, places, strict=True) if each]
        return some

    def layers_of(self, tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Keys and values by layer, (B, H, T, D), out of tensors shaped as ours."""
        return by_layer(tensors, self.places)


def alike(held: list[Tensor]) -> list[list[int]]:
    """Places of those, (B, H, T, D), that differ in T at most."""
    found: dict[Any, list[int]] = {}
    for place, each in enumerate(held):
        found.setdefault((each.shape[:2], each.shape[3:], each.dtype, each.device), []).append(place)
    return list(found.values())


def by_layer(tensors: list[Tensor], places: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer, out of tensors that hold the parts of these places: keys, values, keys, ..."""
    parts = {
        place: part
        for tensor, each in zip(tensors, places, strict=True)
        for place, part in zip(each, tensor.unbind(0), strict=True)
    }
    return [(parts[place], parts[place + 1]) for place in range(0, len(parts), 2)]


class RoomyLayer(DynamicLayer):
    """A full layer with room behind what it holds. New positions are written there, where transformers' layer copies all of the
    text at each pass; to take some back, its length is made shorter."""

    def __init__(self, layer: Any, rooms: Rooms) -> None:
        self.given: tuple[Tensor, Tensor] | None = None
        self.length = 0
        super().__init__()
        self.replaced, self.rooms = layer, rooms
        self.given = layer.keys, layer.values
        self.device, self.is_initialized = layer.keys.device, True

    @property
    def keys(self) -> Any:
        """(B, H, T, D)"""
        return self._room_keys[:, :, : self.length] if self.given is None else self.given[0]

    @keys.setter
    def keys(self, keys: Any) -> None:
        if keys is not None:
            self.given = keys, self.values

    @property
    def values(self) -> Any:
        """(B, H, T, D)"""
        return self._room_values[:, :, : self.length] if self.given is None else self.given[1]

    @values.setter
    def values(self, values: Any) -> None:
        if values is not None:
            self.given = self.keys, values

    def move(self, keys: Tensor, values: Tensor) -> None:
        """Stand in these buffers from now on, (B, H, S, D), which hold what was held."""
        self.length = self.get_seq_length()
        self._room_keys, self._room_values, self.given = keys, values, None

    def lent(self, rooms: Rooms) -> "RoomyLayer":
        """Another layer in the same buffers, which must be there."""
        other = RoomyLayer(self, rooms)
        other.length, other.given = self.length, None
        other._room_keys, other._room_values = self._room_keys, self._room_values
        return other

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        old = self.get_seq_length()
        new = old + key_states.shape[-2]
        self.rooms.make_room(new)
        self._room_keys[:, :, old:new] = key_states
        self._room_values[:, :, old:new] = value_states
        self.length = new
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length if self.given is None else self.given[0].shape[2]

    def crop(self, tokens_to_remove: int) -> None:
        if self.given is None and tokens_to_remove <= 0:
            self.length = max(self.length + tokens_to_remove, 0)
        else:
            super().crop(tokens_to_remove)

    def keep(self, width: int, places: list[int]) -> None:
        """See `keep` below: those that stay are moved to the front of the last `width` positions."""
        first = self.get_seq_length() - width
        index = (first + torch.tensor(places, dtype=torch.long)).to(self.device)
        with torch.inference_mode():  # where a draft's keys and values were made
            for each in (self.keys, self.values):
                each[:, :, first : first + len(places)] = each.index_select(2, index)
        self.crop(len(places) - width)


def apart(cache: DynamicCache) -> DynamicCache:
    """One that holds the same, and goes on without the other."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


def prepare_for_crop(cache: DynamicCache, roomy: bool = False) -> None:
    """To be called once, after the prompt: sliding-window layers keep what a later `crop` may need. `roomy`: full layers get
    room to write into."""
    cache.activate_past_recording()
    if roomy:
        layers: list[Any] = cache.layers
        rooms = Rooms()
        cache.layers = [
            rooms.add(each) if type(each) is DynamicLayer and each.is_initialized else each for each in layers
        ]


def crop(cache: DynamicCache, tokens_to_remove: int) -> None:
    """Take back the last positions. Also to be called with 0: sliding-window layers then drop what they can."""
    cache.crop(-tokens_to_remove)


def shorten(cache: DynamicCache, length: int) -> None:
    """Leave no more than so many positions, whatever each layer holds: a pass may have ended between two of them. Also where there
    are no more, sliding-window layers drop what lies behind the window."""
    layers: list[Any] = cache.layers
    for layer in layers:
        surplus = layer.get_seq_length() - length
        if layer.is_initialized and (surplus > 0 or isinstance(layer, DynamicSlidingWindowLayer)):
            layer.crop(-max(surplus, 0))


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
