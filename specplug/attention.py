"""Whether the attention of a model can be trusted with a pass over several positions: does it keep each from those behind it?

transformers makes masks for the kinds of attention that it knows, and none for others: paged attention, which continuous batching
gives masks of its own, and functions that were registered without one. A token alone needs no mask, so plain decoding may well be right
with those; a token and the drafts behind it are not.
"""

from typing import Any

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS


def why_not_attention(model: Any) -> str | None:
    """None if passes over drafts are masked, else the reason why they are not."""
    kind = getattr(model.config.get_text_config(), "_attn_implementation", None)
    if kind is None or kind in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
        return None
    return (
        f"transformers makes no masks for its attention, {kind}, so that drafts would be seen by what stands before them; load it with"
        " attn_implementation=sdpa, or register a mask function under that name too"
    )
