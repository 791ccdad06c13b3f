"""attach and detach: hooking the engine into `model.generate`, for every caller of it.

The instance's class is swapped for a subclass that overrides `_sample`, the loop that `generate` enters last, with
processors, criteria, streamer and cache prepared by transformers. Beam search and explicit assistants have loops of their
own and are left alone. Which plugin serves which model is kept here, not on the model: a copied or pickled model is a
plain one.
"""

import logging
import threading
import weakref
from typing import Any

from transformers import Pipeline, PreTrainedModel

from specplug.config import Config, Draft, Dtype, Fixed
from specplug.decode import decode, why_not_rounds
from specplug.drafters import Drafter
from specplug.drafters.lookup import LookupDrafter
from specplug.drafters.model import ModelDrafter
from specplug.models import build_drafter, check_pair
from specplug.schedule import FixedSchedule, Schedule
from specplug.stats import Call, Stats

log = logging.getLogger(__name__)

ENGINES = ("auto", "rounds", "plain")
VERIFY_RULES = ("token",)
DEFAULT_GAMMA = 4


class SpeculativeProcessor:
    """A drafter, a schedule and their counts, to be attached to one model at a time. Also a context manager.

    Attributes:
        stats: counts of all calls since the start or `reset_stats()`.
        last: counts of the last call, its `engine` and the `reason` for it; None before the first.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        schedule: Schedule | None = None,
        engine: str = "auto",
        verify: str = "token",
        synchronize: bool = False,
    ) -> None:
        if engine not in ENGINES:
            raise ValueError(f"engine={engine!r}: allowed are {', '.join(ENGINES)}")
        if verify not in VERIFY_RULES:
            raise ValueError(f"verify={verify!r}: allowed are {', '.join(VERIFY_RULES)}")
        self.drafter = drafter
        self.schedule = schedule or FixedSchedule(DEFAULT_GAMMA)
        self.engine, self.verify, self.synchronize = engine, verify, synchronize
        self.stats = Stats()
        self.last: Call | None = None
        self._target: weakref.ref[PreTrainedModel] | None = None
        self._warned: set[str] = set()
        self._counting = threading.Lock()

    def reset_stats(self) -> None:
        self.stats, self.last = Stats(), None

    def attach(self, model_or_pipeline: Any) -> "SpeculativeProcessor":
        """Serve this model's `generate` from now on. Raises ValueError if it is served already or cannot be."""
        model = _model_of(model_or_pipeline)
        if isinstance(model, SpeculativeMixin):
            raise ValueError("this model has a plugin attached; call specplug.detach(model) first")
        if self._target is not None and self._target() is not None:
            raise ValueError("this plugin is attached to another model; make one plugin per model, or detach() first")
        if isinstance(self.drafter, ModelDrafter):
            check_pair(model, self.drafter.model)
        model.__class__ = _speculative_class(type(model))
        _ATTACHED[model] = self
        self._target = weakref.ref(model)
        return self

    def detach(self) -> None:
        """Leave the model as it was. Does nothing if not attached."""
        model = self._target() if self._target is not None else None
        self._target = None
        if model is not None and isinstance(model, SpeculativeMixin) and _ATTACHED.get(model) is self:
            del _ATTACHED[model]
            model.__class__ = type(model)._specplug_original

    def __enter__(self) -> "SpeculativeProcessor":
        return self

    def __exit__(self, *_: Any) -> None:
        self.detach()

    def _serve(self, model: PreTrainedModel, plain: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for `_sample(input_ids, logits_processor, stopping_criteria, generation_config, ...)`."""
        call = Call(num_calls=1)
        try:
            reason = "engine=plain" if self.engine == "plain" else _why_plain(model, *args, **kwargs)
            if reason is None:
                call.reason = "everything passed is served by it exactly"
                return self._rounds(model, call, *args, **kwargs)
            if self.engine == "rounds":
                raise ValueError(f"engine=rounds cannot serve this call: {reason}. engine=auto decodes it plainly.")
            if self.engine == "auto":
                self._warn_once(f"decoding plainly, without drafts: {reason}")
            call.engine, call.reason = "plain", reason
            return plain(*args, **kwargs)
        finally:
            with self._counting:
                self.last = call
                self.stats = self.stats + call

    def _rounds(
        self,
        model: Any,
        call: Call,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        with model._optimize_model_for_decode():
            return decode(
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer,
                drafter=self.drafter,
                schedule=self.schedule,
                stats=call,
                synchronize=self.synchronize,
                **model_kwargs,
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("specplug: %s", message)


def _why_plain(
    model: PreTrainedModel,
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> str | None:
    return why_not_rounds(model, input_ids, generation_config, synced_gpus, model_kwargs)


class SpeculativeMixin:
    """Put before a model's own class by `attach`."""

    _specplug_original: type

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        plain = super()._sample  # type: ignore[misc]
        plugin = _ATTACHED.get(self)  # type: ignore[call-overload]
        return plain(*args, **kwargs) if plugin is None else plugin._serve(self, plain, *args, **kwargs)

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        plugin = _ATTACHED.get(self)  # type: ignore[call-overload]
        if plugin is not None:
            plugin._warn_once("beam search is left to transformers, without drafts; num_beams=1 uses them")
        return super()._beam_search(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the original class, without the plugin."""
        reduced: Any = super().__reduce_ex__(protocol)
        return (_new_instance, (self._specplug_original,), *reduced[2:])


def _new_instance(original: Any) -> Any:
    return original.__new__(original)


_ATTACHED: weakref.WeakKeyDictionary[PreTrainedModel, SpeculativeProcessor] = weakref.WeakKeyDictionary()
_CLASSES: dict[type, type] = {}


def _speculative_class(original: type) -> type:
    """One subclass per model class, under the original's name: saved files and logs show the architecture."""
    if original not in _CLASSES:
        names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        body = {**names, "__doc__": original.__doc__, "_specplug_original": original}
        _CLASSES[original] = type(original.__name__, (SpeculativeMixin, original), body)
    return _CLASSES[original]


def _model_of(model_or_pipeline: Any) -> PreTrainedModel:
    model = model_or_pipeline.model if isinstance(model_or_pipeline, Pipeline) else model_or_pipeline
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise ValueError(
            f"cannot attach to a {type(model).__name__}: give a transformers model that can generate, or a pipeline"
        )
    return model


def attach(
    model_or_pipeline: Any,
    draft: Any = None,
    *,
    gamma: int | None = None,
    verify: str | None = None,
    schedule: Schedule | None = None,
    engine: str | None = None,
    config: Config | None = None,
) -> SpeculativeProcessor:
    """Let `generate` of a model, or of a pipeline's model, decode speculatively. Its output stays what it was.

    Args:
        model_or_pipeline: a transformers model, or a text-generation pipeline.
        draft: a model, the name or folder of one, a `Drafter`, a `Draft` config, or None or "lookup" for n-gram lookup.
        gamma: draft tokens a round (default 4). `schedule` replaces it.
        verify: accept rule for sampling, "token"; at temperature 0 it is the comparison with the argmax.
        engine: "auto" decodes plainly, with one warning, what cannot be served exactly; "rounds" raises instead;
            "plain" never drafts.
        config: a `Config` from `specplug.load()`, for what is not given here.
    Raises:
        ValueError: draft and target do not fit, or a value is not allowed; the text says what is.
    """
    model = _model_of(model_or_pipeline)
    if config is not None:
        draft = config.draft if draft is None else draft
        gamma = config.schedule.gamma if gamma is None and isinstance(config.schedule, Fixed) else gamma
        engine = type(config.engine).__name__.lower() if engine is None else engine
        verify = type(config.verify).__name__.lower() if verify is None else verify
    if schedule is not None and gamma is not None:
        raise ValueError("gamma and schedule both say how many tokens to draft; give one of them")
    if draft is model:
        raise ValueError(
            "draft is the target itself; it would cost more than it saves. Name a smaller or quantized one."
        )
    return SpeculativeProcessor(
        _drafter(draft, model, getattr(model_or_pipeline, "tokenizer", None)),
        schedule=schedule or FixedSchedule(DEFAULT_GAMMA if gamma is None else gamma),
        engine=engine or "auto",
        verify=verify or "token",
    ).attach(model)


def detach(model_or_pipeline: Any) -> None:
    """Undo `attach`. Does nothing to a model that has no plugin."""
    plugin = _ATTACHED.get(_model_of(model_or_pipeline))
    if plugin is not None:
        plugin.detach()


def attached(model_or_pipeline: Any) -> SpeculativeProcessor | None:
    """The plugin that serves this model, or None."""
    return _ATTACHED.get(_model_of(model_or_pipeline))


def _drafter(draft: Any, model: PreTrainedModel, tokenizer: Any) -> Drafter:
    if draft is None or draft == "lookup":
        return LookupDrafter()
    if isinstance(draft, str):
        # A draft that is only named gets the target's device, and its dtype where that is an ordinary one.
        dtype = next((each for each in Dtype if each.value == str(model.dtype).removeprefix("torch.")), Dtype.fp32)
        draft = Draft(name_or_path=draft, dtype=dtype, device=str(model.device))
    if isinstance(draft, Draft):
        return build_drafter(draft, model, tokenizer)
    if isinstance(draft, PreTrainedModel):
        return ModelDrafter(draft)
    if hasattr(draft, "start"):
        return draft
    raise ValueError(f"draft={draft!r}: give a model, the name or folder of one, 'lookup', a Drafter or a draft config")
