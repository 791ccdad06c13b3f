"""Where our engines meet `model.generate`: the instance's class is swapped for a subclass of it.

The subclass overrides `_sample`, the loop that `generate` enters last, for an attached plugin; `generate`, for the settings
of one call; and the model's call, for the `lookahead` engine. What serves which model is kept here, not on the model: a
copied or pickled model is a plain one. A model keeps its swapped class until it is detached and the last call is over.
"""

import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import Pipeline, PreTrainedModel

from specplug.cache import NAME


class Serves(Protocol):
    """What this module needs of a plugin."""

    def serve(self, model: PreTrainedModel, plain: Any, *args: Any, **kwargs: Any) -> Any: ...

    def warn_once(self, message: str) -> None: ...


class Intercepts(Protocol):
    """What this module needs of a lookahead."""

    def after_prefill(self, outputs: Any) -> None: ...

    def forward(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


@dataclass
class CallSettings:
    """What `generate(..., specplug=given)` was given, and whether a plugin has read it."""

    given: Any
    read: bool = False


_LOCK = threading.RLock()
_ATTACHED: weakref.WeakKeyDictionary[PreTrainedModel, Serves] = weakref.WeakKeyDictionary()
_LIVE_CALLS: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()
_CLASSES: dict[type, type] = {}
_LOOKAHEADS: dict[int, Intercepts] = {}  # id of a cache -> the lookahead that keeps it; two calls never share a cache
_SETTINGS: ContextVar[CallSettings | None] = ContextVar("specplug settings of this call", default=None)


class SpeculativeMixin:
    """Put before a model's own class while it is served.

    One thread may look a method up here and run it after another thread's call has ended and swapped the class back. `super()`
    would then raise, so the model's own method is found by `_own`.
    """

    _specplug_original: type

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        plain = _own(self, "_sample")
        plugin = attached(self)
        return plain(*args, **kwargs) if plugin is None else plugin.serve(self, plain, *args, **kwargs)

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        refuse_seed("beam search (num_beams above 1)")
        plugin = attached(self)
        if plugin is not None:
            plugin.warn_once("beam search is left to transformers, without drafts; num_beams=1 uses them")
        return _own(self, "_beam_search")(*args, **kwargs)

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        refuse_seed("transformers' assisted generation (assistant_model or prompt_lookup_num_tokens)")
        return _own(self, "_assisted_decoding")(*args, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Also what `generate(cache_implementation="paged")` comes to."""
        refuse_seed("continuous batching")
        plugin = attached(self)
        if plugin is not None:
            plugin.warn_once("continuous batching is left to transformers, without drafts; generate decodes with them")
        return _own(self, "generate_batch")(*args, **kwargs)

    def _prefill(self, *args: Any, **kwargs: Any) -> Any:
        outputs = _own(self, "_prefill")(*args, **kwargs)
        lookahead = _LOOKAHEADS.get(id(outputs.get(NAME)))
        if lookahead is not None:
            lookahead.after_prefill(outputs)
        return outputs

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """torch's `Module.__call__` after its own look-up: found on the class at each call, also through a bound
        `model.__call__` that the loop took before the swap. `forward` may be covered by hooks on the instance."""
        forward = _own(self, "_call_impl")
        lookahead = _LOOKAHEADS.get(id(kwargs.get(NAME)))
        return forward(*args, **kwargs) if lookahead is None else lookahead.forward(forward, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the original class, without the plugin."""
        original = original_class(self)
        reduced: Any = original.__reduce_ex__(self, protocol)
        return (_new_instance, (original,), *reduced[2:])


def _own(model: Any, name: str) -> Any:
    """A method of the model's own class, bound."""
    return getattr(original_class(model), name).__get__(model)


def _new_instance(original: Any) -> Any:
    return original.__new__(original)


def _speculative_class(original: type) -> type:
    """One subclass per model class, under the original's name: saved files and logs show the architecture."""
    if original not in _CLASSES:

        @functools.wraps(original.generate)  # type: ignore[attr-defined]
        def generate(self: Any, *args: Any, specplug: dict[str, Any] | None = None, **kwargs: Any) -> Any:
            settings = CallSettings(specplug)
            token = _SETTINGS.set(settings)
            try:
                output = original.generate(self, *args, **kwargs)  # type: ignore[attr-defined]
                if not settings.read:  # a loop of the caller's own, which cannot be known before it has run
                    refuse_seed("this custom_generate")
                return output
            finally:
                _SETTINGS.reset(token)

        names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
        body = {**names, "_specplug_original": original, "generate": generate}
        _CLASSES[original] = type(original.__name__, (SpeculativeMixin, original), body)
    return _CLASSES[original]


def original_class(model: Any) -> Any:
    now = type(model)  # looked at once: another thread may be about to change it
    return getattr(now, "_specplug_original", now)


def attached(model: Any) -> Any:
    """The plugin that serves this model, or None."""
    return _ATTACHED.get(model)


def call_settings() -> dict[str, Any] | None:
    """What `generate(..., specplug={...})` was given, inside that call; from then on it is the plugin's to honour."""
    settings = _SETTINGS.get()
    if settings is None:
        return None
    settings.read = True
    given: dict[str, Any] | None = settings.given
    return given


def refuse_seed(loop: str) -> None:
    """Raises ValueError if this call was given a seed, which such a loop takes no notice of."""
    settings = _SETTINGS.get()
    if settings is not None and isinstance(settings.given, dict) and "seed" in settings.given:
        raise ValueError(
            f"specplug={settings.given!r}: {loop} draws in a loop of its own, where a seed has no effect; decode without it,"
            " or leave seed out and call torch.manual_seed"
        )


def attach(model: PreTrainedModel, plugin: Serves) -> None:
    with _LOCK:
        if model in _ATTACHED:
            raise ValueError("this model has a plugin attached; call specplug.detach(model) first")
        _ATTACHED[model] = plugin
        _settle(model)


def detach(model: PreTrainedModel, plugin: Serves) -> None:
    """Does nothing if this plugin does not serve the model."""
    with _LOCK:
        if _ATTACHED.get(model) is plugin:
            del _ATTACHED[model]
            _settle(model)


def begin_call(model: PreTrainedModel) -> None:
    """Keep the swapped class until `end_call`."""
    with _LOCK:
        _LIVE_CALLS[model] = _LIVE_CALLS.get(model, 0) + 1
        _settle(model)


def end_call(model: PreTrainedModel) -> None:
    with _LOCK:
        _LIVE_CALLS[model] -= 1
        _settle(model)


@contextmanager
def intercepted(model: PreTrainedModel, cache: Any, lookahead: Intercepts) -> Iterator[None]:
    """Within: calls of the model with this very cache go through the lookahead."""
    begin_call(model)
    _LOOKAHEADS[id(cache)] = lookahead
    try:
        yield
    finally:
        if _LOOKAHEADS.get(id(cache)) is lookahead:
            del _LOOKAHEADS[id(cache)]
        end_call(model)


def _settle(model: PreTrainedModel) -> None:
    """Give the model the class that its plugin and its running calls ask for."""
    served = model in _ATTACHED or _LIVE_CALLS.get(model, 0) > 0
    if served and not isinstance(model, SpeculativeMixin):
        model.__class__ = _speculative_class(type(model))
    elif not served and isinstance(model, SpeculativeMixin):
        model.__class__ = model._specplug_original
    if not _LIVE_CALLS.get(model, 1):
        del _LIVE_CALLS[model]


def model_of(model_or_pipeline: Any) -> PreTrainedModel:
    """Raises ValueError for what has no `generate` of transformers."""
    model = model_or_pipeline.model if isinstance(model_or_pipeline, Pipeline) else model_or_pipeline
    inner = getattr(model, "get_base_model", None)  # PEFT's wrapper generates through the model it wraps
    if not isinstance(model, PreTrainedModel) and inner is not None:
        model = inner()
    if not isinstance(model, PreTrainedModel) and isinstance(getattr(model, "module", None), PreTrainedModel):
        raise ValueError(
            f"cannot attach to a {type(model).__name__}, which copies or wraps the model in every call: attach to its .module, "
            "or run one process per device"
        )
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise ValueError(
            f"cannot attach to a {type(model).__name__}: give a transformers model that can generate, or a pipeline"
        )
    return model
