"""The target's passes over one sequence behind its prompt, and what they leave in its cache.

A pass is made at fixed shapes, by a recording, or as transformers makes it; decode.py need not know which. It adds a position
for the last committed token and one for each draft, and of those the ones stay that the text goes through.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from specplug import cache as caches
from specplug.capture import Capture
from specplug.fixed import FixedPasses
from specplug.fixed import why_not as why_not_fixed
from specplug.round import Text
from specplug.tree import Tree
from specplug.tree_pass import tree_inputs


class TargetPasses:
    """Args: the text, which has the prompt alone yet, with `hidden` positions of padding; `model_kwargs` as the prompt's pass left
    them; `room`: how many tokens may come at most, if that is known; `trees`: whether proposals may be trees.

    `places`, which the caller fills while it verifies: of the last pass, those that the text goes through.
    """

    def __init__(
        self,
        model: Any,
        text: Text,
        hidden: int,
        model_kwargs: dict[str, Any],
        capture: Capture,
        room: int | None,
        trees: bool,
    ) -> None:
        self.model, self.text, self.hidden, self.model_kwargs = model, text, hidden, model_kwargs
        self.cache = caches.get_cache(model_kwargs)
        self.prompt_length = len(text)
        self.fixed: FixedPasses | None = None
        length = len(text) - hidden
        longest = None if room is None else length + room
        served = not trees and why_not_fixed(model, capture.graph, 1, longest) is None
        if served and _usual(model_kwargs, hidden, text):
            self.fixed = capture.fixed(model)
            # No buffers for more than twice the prompt, however many tokens may come.
            self.fixed.fill(self.cache, [hidden], length + min(length if room is None else room, length))
        self._capture = capture
        self.places: list[int] = []
        self._width = 1
        self._tree: Tree | None = None
        self._settled = True  # the cache holds no drafts that the text does not go through

    def prepare(self) -> None:
        """To be called once the draft has looked at the cache, before the first pass."""
        if self.fixed is None:
            caches.prepare_for_crop(self.cache, roomy=True)
            whole = _starts_at_zero(self.model_kwargs, len(self.text))
            reason = None if whole else "padding, or positions or token types of the caller's own"
            self._passes = self._capture.passes(self.model, reason)

    def score(self, drafted: Tensor, width: int, tree: Tree | None) -> Tensor:
        """Logits (1, W, V) in fp32 of the last `width` tokens of the text with the drafts behind it, (1, T): the last committed one
        and all drafts. `tree`: how these hang together; None is one behind another."""
        ids = drafted[:, -width:]
        if self.fixed is not None:
            logits = self.fixed(ids, [len(self.text) - self.hidden - 1])
        else:
            ordinary = functools.partial(self._ordinary, drafted, width, tree)
            given = None
            if tree is not None:
                given = tree_inputs({"input_ids": ids, caches.NAME: self.cache}, tree, self.model.dtype)
            self._width, self._tree, self._settled, self.places = width, tree, False, []
            logits = self._passes(ids, self.cache, ordinary, given)
        return logits[:, -width:].float()

    def keep(self, width: int) -> None:
        """Take back what the last pass, over so many positions, added besides `places`."""
        if self.fixed is None:
            caches.keep(self.cache, width, self.places)
            self._settled = True

    def finish(self) -> None:
        """Leave the cache as plain decoding would, also where something has raised."""
        if not self._settled:
            if self._tree is not None and self.places:
                caches.keep(self.cache, self._width, self.places)
            caches.shorten(self.cache, len(self.text) - (1 if self.places else 0))
        if self.fixed is not None:
            # The prompt is in it also where a streamer raised at the first token.
            length = max(len(self.text) - 1, self.prompt_length) - self.hidden
            self.fixed.cache.give_back(self.cache, length, self.hidden)
        caches.finish(self.cache)

    def _ordinary(self, drafted: Tensor, width: int, tree: Tree | None) -> Tensor:
        """Such a pass as transformers makes it."""
        model, model_kwargs = self.model, self.model_kwargs
        further = drafted.shape[1] - self.prompt_length - 1  # the first token is counted already
        if further:
            types = model_kwargs.get("token_type_ids")
            model_kwargs = model._update_model_kwargs_for_generation({}, dict(model_kwargs), num_new_tokens=further)
            if types is not None:
                # Plain decoding repeats the last one, and transformers here as many of the last as are new.
                model_kwargs["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, further)], dim=1)
        if "logits_to_keep" in model_kwargs:
            model_kwargs = {**model_kwargs, "logits_to_keep": width}
        inputs = model.prepare_inputs_for_generation(drafted, next_sequence_length=width, **model_kwargs)
        if tree is not None:
            inputs = tree_inputs(inputs, tree, model.dtype)
        logits: Tensor = model(**inputs, return_dict=True).logits
        return logits


def _starts_at_zero(model_kwargs: dict[str, Any], length: int) -> bool:
    """No padding, no positions of the caller's own, nothing else that grows with the text: then a pass can be recorded."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    return (
        (mask is None or bool(mask.all()))
        and (positions is None or positions[0].tolist() == list(range(length + 1)))
        and model_kwargs.get("token_type_ids") is None
    )


def _usual(model_kwargs: dict[str, Any], hidden: int, text: Text) -> bool:
    """One token behind another from position 0, behind so much padding: then a pass can be run at fixed shapes."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    usual = (torch.arange(text.ids.shape[1] + 1, device=text.ids.device) - hidden)[None]
    return (
        (mask is None or (mask.shape == usual.shape and bool((mask.bool() == (usual >= 0)).all())))
        and (
            positions is None
            or (positions.shape == usual.shape and bool((positions[:, hidden:] == usual[:, hidden:]).all()))
        )
        and (mask is not None or hidden == 0)
        and model_kwargs.get("token_type_ids") is None
    )
