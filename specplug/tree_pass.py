"""One pass of a model over a tree of drafts: which models can make it, and what they are given.

Each node has to see the text and what is above it, and nothing of its siblings, and to stand where its depth says. So the model
gets a mask with a row for each node and the position of each. That a model takes such a mask is tried out once, on a few tokens,
since one that ignores it would score nonsense without an error.
"""

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specplug.cache import NAME, get_cache
from specplug.config import first_line
from specplug.drafters import members_of
from specplug.tree import Tree, attention_mask

SERVED = ("sdpa", "eager")  # kinds of attention that add the mask they are given
_FOUND: weakref.WeakKeyDictionary[PreTrainedModel, str | None] = weakref.WeakKeyDictionary()


def why_not_tree(model: PreTrainedModel, cache: Any = None) -> str | None:
    """None if the model can score a tree in one pass, on this cache if it is given, else the reason."""
    if cache is not None and any(type(layer) is not DynamicLayer for layer in cache.layers):
        return "its cache has a sliding window, and a path cannot be gathered out of one"
    text = model.config.get_text_config()
    implementation = getattr(text, "_attn_implementation", None)
    if implementation not in SERVED:
        return f"{type(model).__name__} has attn_implementation={implementation}, which takes no mask of our own; load it with sdpa"
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if (
        kinds != {"full_attention"}
        or getattr(text, "sliding_window", None)
        or getattr(text, "attention_chunk_size", None)
    ):
        return f"{type(model).__name__} has layers that do not attend to all of the text, whose masks are its own"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"the forward of {type(model).__name__} takes no position_ids, so siblings cannot stand in one place"
    if model not in _FOUND:
        _FOUND[model] = _tried_out(model)
    return _FOUND[model]


def why_chains(engine: str, num_rows: int, model: PreTrainedModel, cache: Any) -> str | None:
    """None if a call of so many sequences, served by this engine, can have trees, else the reason."""
    if engine != "rounds":
        return f"the {engine} engine drafts chains"
    if num_rows > 1:
        return "a batch drafts a chain for each of its sequences"
    return why_not_tree(model, cache)


def check_drafter(drafter: Any) -> None:
    """Raises ValueError if the drafter cannot draft trees."""
    for member in members_of(drafter):
        if not getattr(member, "drafts_trees", False):
            raise ValueError(
                f"tree: {member.name} drafts no trees; take a model of the same tokenizer, lookup or suffix, or leave the tree out"
            )
        model = getattr(member, "model", None)
        reason = why_not_tree(model) if isinstance(model, PreTrainedModel) else None
        if reason is not None:
            raise ValueError(f"tree: the draft cannot draft trees, {reason}; leave the tree out")


def _tried_out(model: PreTrainedModel) -> str | None:
    """Score a node behind the second of two siblings in a tree, and behind that sibling alone: they have to agree, within a
    share of what it would change to see the first sibling too."""
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.tensor([[number % vocab_size for number in (11, 5, 17, 7, 13, 3)]], device=model.device)
    try:
        with torch.no_grad():
            alone = _last_logits(model, torch.cat([ids[:, :3], ids[:, 4:]], dim=1))
            both = _last_logits(model, ids)
            cache = DynamicCache(config=model.config)
            model(input_ids=ids[:, :2], use_cache=True, return_dict=True, **{NAME: cache})
            given = {"input_ids": ids[:, 2:], "use_cache": True, NAME: cache}
            in_tree = model(**tree_inputs(given, Tree([0, 0, 2]), model.dtype), return_dict=True).logits[0, -1].float()
    except Exception as error:
        return f"a pass of {type(model).__name__} with a mask of our own fails: {first_line(error)}"
    share = 0.05 if model.dtype == torch.float32 else 0.25
    if not float((in_tree - alone).norm()) <= share * float((both - alone).norm()):  # also for nan
        return f"{type(model).__name__} does not heed the mask or the positions that it is given"
    return None


def _last_logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -1]
    return logits.float()


def tree_inputs(inputs: dict[str, Any], tree: Tree, dtype: torch.dtype) -> dict[str, Any]:
    """What `forward` takes for the last committed token and the drafts of a tree, from what it would take for a chain of as many."""
    ids = inputs["input_ids"]  # (1, N + 1)
    num_before = get_cache(inputs).get_seq_length()
    mask = inputs.get("attention_mask")
    before = (
        torch.ones((1, num_before), dtype=torch.bool, device=ids.device)
        if mask is None
        else mask[:, :num_before].bool()
    )
    depths = torch.tensor(tree.depths, device=ids.device)
    positions = inputs.get("position_ids")
    first = before.sum(-1, keepdim=True) if positions is None else positions[..., :1]
    return {
        **inputs,
        "attention_mask": attention_mask(tree.visible(), before, dtype),
        "position_ids": first + depths,
    }
