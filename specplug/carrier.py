"""The two forms without attach: the plugin as one of a call's logits processors, and as its custom_generate.

Both have to find what transformers does not hand over, so both read the frames of the callers, and nothing else in this
package does. What they look for is checked, and not to find it means to decode plainly.
"""

import inspect
import sys
import weakref
from types import FrameType
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from specplug import hook
from specplug.attention import why_not_attention
from specplug.cache import get_cache
from specplug.decode import why_not_at_all
from specplug.lookahead import Lookahead
from specplug.stats import Call

LOOP = "_sample"  # transformers' decoding loop
# Its loop with an assistant, which drafts in a loop of its own, with the caller's processors.
ASSISTED = "_assisted_decoding"
EXTRACT = "_extract_generation_mode_kwargs"  # where `generate` sorts out what a custom_generate gets
MAX_DEPTH = 12  # frames between the loop and a processor in its list, and between the two loops

# `generate` gives a custom_generate those of its arguments that the signature names and its own loop does not.
SIGNATURE = inspect.Signature(
    [
        inspect.Parameter("model", inspect.Parameter.POSITIONAL_ONLY),
        inspect.Parameter("tokenizer", inspect.Parameter.KEYWORD_ONLY, default=None),
        inspect.Parameter("model_kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


def arm(plugin: Any, input_ids: Tensor) -> None:
    """Called as a logits processor: from the first call on, the loop's target looks ahead, until the loop is gone.

    The prompt's pass is over then, and its cache filled. The loop gives no sign when it ends, nor when it raises; but its
    generation config, a copy made for this call alone, dies with it.
    """
    frame = _caller(sys._getframe(2), LOOP)
    if frame is not None and id(frame) in plugin._loops:
        return
    if frame is None or _caller(frame, ASSISTED) is not None:
        plugin.warn_once("beam search and other loops are left to transformers, without drafts; num_beams=1 uses them")
        return
    names = frame.f_locals
    model, config, model_kwargs = names.get("self"), names.get("generation_config"), names.get("model_kwargs")
    processors: Any = names.get("logits_processor")
    if isinstance(names, dict):
        names.clear()  # up to Python 3.12 a copy that would keep the prompt's logits alive; later a view of the frame
    del names
    if not isinstance(model, PreTrainedModel) or not isinstance(config, GenerationConfig) or model_kwargs is None:
        return
    if hook.attached(model) is not None:  # that plugin serves the call already
        return
    if plugin.engine == "rounds":
        raise ValueError(
            "engine=rounds cannot serve a plugin that is passed as a logits processor; take auto or lookahead"
        )
    call = Call(num_calls=1, engine="lookahead", reason="passed as a logits processor")
    key = id(frame)
    reason = "engine=plain" if plugin.engine == "plain" else why_not_at_all(model, input_ids, config, model_kwargs)
    reason = reason or why_not_attention(model)
    if reason is not None:
        plugin.warn_once(f"decoding plainly, without drafts: {reason}")
        call.engine, call.reason = "plain", reason
        plugin._loops[key] = None
        weakref.finalize(config, _disarm, plugin, key, None, None, call).atexit = False
        return
    plugin._meet(model)
    cache = get_cache(model_kwargs)
    lookahead = CarriedLookahead(
        cache,
        input_ids,
        model_kwargs.get("attention_mask"),
        model.config.get_text_config().vocab_size,
        config,
        LogitsProcessorList(p for p in processors if p is not plugin),
        plugin.drafter,
        plugin.schedule,
        call,
    )
    lookahead.after_prefill()
    interception = hook.intercepted(model, cache, lookahead)
    interception.__enter__()
    plugin._loops[key] = lookahead
    lookahead.loop = key
    lookahead.disarm = weakref.finalize(config, _disarm, plugin, key, interception, lookahead, call)
    lookahead.disarm.atexit = False


class CarriedLookahead(Lookahead):
    """Answers its loop alone. Where an exception's traceback is kept, the loop's frame outlives the loop."""

    loop: int
    disarm: weakref.finalize

    def forward(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and id(frame) != self.loop:
            frame = frame.f_back
        if frame is None:
            self.disarm()
            return forward(*args, **kwargs)
        return super().forward(forward, args, kwargs)


def _disarm(plugin: Any, key: int, interception: Any, lookahead: Any, call: Call) -> None:
    plugin._loops.pop(key, None)
    if interception is not None:
        interception.__exit__(None, None, None)
        lookahead.finish()
    plugin.count(call)


def _caller(frame: FrameType | None, name: str) -> FrameType | None:
    """The first frame with this function's name, from `frame` on."""
    for _ in range(MAX_DEPTH):
        if frame is None or frame.f_code.co_name == name:
            return frame
        frame = frame.f_back
    return None


def rescue(plugin: Any) -> dict[str, Any] | None:
    """Called while `generate` reads the plugin's signature as a custom_generate: the arguments that it is about to drop.
    None if somebody else reads it.

    It takes `tokenizer`, without which stop strings raise, out of the call's keyword arguments, and then puts together
    what to hand on from these alone. So the tokenizer is put back, and the streamer is kept until the loop begins.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != EXTRACT:
        frame = frame.f_back
    if frame is None:
        return None
    names = frame.f_locals
    if names.get("custom_generate") is not plugin or "generation_mode_kwargs" not in names:
        return None
    dropped = dict(names["generation_mode_kwargs"])
    if "tokenizer" in dropped:
        names["kwargs"]["tokenizer"] = dropped["tokenizer"]
    return dropped
