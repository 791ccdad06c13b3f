"""SpeculativeProcessor: who is served, by which engine, and what was counted.

`attach` and `detach` are in attaching.py, the hook into `model.generate` in hook.py, the two forms without attach in carrier.py.
"""

import contextlib
import copy
import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from specplug import carrier, fixed, hook, packed
from specplug import kernel as kernels
from specplug.attention import why_not_attention
from specplug.batch import decode_batch
from specplug.cache import get_cache
from specplug.capture import GRAPHS, Capture
from specplug.config import Config, choice, first_line
from specplug.decode import decode, why_not_at_all, why_not_rounds
from specplug.drafters import Drafter, members_of
from specplug.drafters.build import make_drafter
from specplug.drafters.model import ModelDrafter
from specplug.lookahead import Lookahead, left_padding
from specplug.models import check_pair
from specplug.noise import Chooser, Keyed
from specplug.schedule import AdaptiveSchedule, Schedule, without_tree
from specplug.settings import ENGINES, LoopInputs, Settings, allowed, make_schedule
from specplug.stats import Call, Stats
from specplug.trace import Trace
from specplug.tree_pass import check_drafter, why_chains
from specplug.verify import RULE_NAMES

log = logging.getLogger(__name__)


class SpeculativeProcessor(LogitsProcessor):
    """A drafter, a schedule and their counts. Three ways to use it, one plugin for each model:

    - `specplug.attach(model, draft)`, or `plugin.attach(model)`: every `generate` of the model, until `detach`.
    - `model.generate(..., custom_generate=plugin)`: this call.
    - `model.generate(..., logits_processor=[plugin])`: this call, by the `lookahead` engine, for callers that hand on
      nothing but processors. The scores pass through untouched; the target is looked up in the loop that asks.

    Args:
        draft: a `Drafter`, a model, the name or folder of one, "lookup", a `Draft` config, or a whole `Config`.
        schedule, engine, verify, kernel, graph: as in `attach`.
        synchronize: have the device note when forward passes begin and end, so that the seconds counted are right.

    Attributes:
        stats: counts of all calls since the start or `reset_stats()`.
        last: counts of the last call, its `engine` ("refused" if it was) and the `reason` for it; None before the first.
        trace: None, or a `specplug.trace.Trace` in which the next call of one sequence records its rounds.
    """

    def __init__(
        self,
        draft: Any = None,
        *,
        schedule: Schedule | None = None,
        engine: str = "auto",
        verify: str = "block",
        kernel: str = "auto",
        graph: str = "capture",
        synchronize: bool = False,
    ) -> None:
        if isinstance(draft, Config):
            schedule, kernel, graph = schedule or make_schedule(draft), draft.kernel.value, draft.graph.value
            engine, verify = choice(draft.engine), choice(draft.verify)
            draft = draft.draft
        self.schedule = schedule or AdaptiveSchedule()
        self.engine = allowed("engine", engine, ENGINES)
        self.verify = allowed("verify", verify, RULE_NAMES)
        self.kernel = allowed("kernel", kernel, kernels.KERNELS)
        self.graph = allowed("graph", graph, GRAPHS)
        self.record_after: int | None = None  # passes before one is recorded; None is capture.py's own number
        if self.engine == "lookahead" and self.schedule.tree is not None:
            raise ValueError("engine=lookahead drafts no trees; take engine=auto or rounds, or leave the tree out")
        self.synchronize = synchronize
        self.stats = Stats()
        self.last: Call | None = None
        self.trace: Trace | None = None
        self._draft = draft
        self._drafter: Drafter | None = draft if hasattr(draft, "start") else None
        self._target: weakref.ref[PreTrainedModel] | None = None
        self._warned: set[str] = set()
        self._counting = threading.Lock()
        self._loops: dict[int, Any] = {}  # id of a running loop's frame -> its lookahead
        self._handed = threading.local()  # what `generate` fails to hand to a custom_generate

    @property
    def drafter(self) -> Drafter:
        if self._drafter is None:
            raise ValueError("this plugin has no drafter yet: what was named is loaded when it first meets its target")
        return self._drafter

    def reset_stats(self) -> None:
        self.stats, self.last = Stats(), None

    def attach(self, model_or_pipeline: Any) -> "SpeculativeProcessor":
        """Serve this model's `generate` from now on. Raises ValueError if it is served already or cannot be."""
        model = hook.model_of(model_or_pipeline)
        if self._target is not None and self._target() is not None:
            raise ValueError("this plugin is attached to another model; make one plugin per model, or detach() first")
        self._meet(model, getattr(model_or_pipeline, "tokenizer", None))
        hook.attach(model, self)
        self._target = weakref.ref(model)
        return self

    def detach(self, release: bool = True) -> None:
        """Leave the model as it was; a call that is under way is finished first. Does nothing if not attached.

        `release`: free the caches and graphs that were kept for the next calls of target and draft, see fixed.py.
        """
        model = self._target() if self._target is not None else None
        self._target = None
        if model is None:
            return
        hook.detach(model, self)
        if release:
            for each in (model, *([] if self._drafter is None else models_of(self._drafter))):
                fixed.release(each)

    def __enter__(self) -> "SpeculativeProcessor":
        return self

    def __exit__(self, *_: Any) -> None:
        self.detach()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a logits processor: `(input_ids, scores)` -> scores. As a custom_generate: what `_sample` takes."""
        if args and isinstance(args[0], PreTrainedModel):
            return self._custom_generate(*args, **kwargs)
        input_ids, scores = args
        carrier.arm(self, input_ids)
        return scores

    @property
    def __signature__(self) -> inspect.Signature:
        """`generate` reads it just before it drops what a custom_generate needs; see carrier.py."""
        rescued = carrier.rescue(self)
        if rescued is not None:
            self._handed.arguments = rescued
        return carrier.SIGNATURE

    def _custom_generate(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        handed = self._handed.__dict__.pop("arguments", {})
        if kwargs["generation_config"].num_beams > 1:
            hook.refuse_seed("beam search (num_beams above 1)")
            self.warn_once("beam search is left to transformers, without drafts; num_beams=1 uses them")
            return hook.original_class(model)._beam_search(model, *args, **kwargs)
        self._meet(model, handed.get("tokenizer"))
        plain = functools.partial(hook.original_class(model)._sample, model)
        kwargs = {"streamer": handed.get("streamer"), "synced_gpus": handed.get("synced_gpus") or False, **kwargs}
        return self.serve(model, plain, *args, **kwargs)

    def serve(
        self,
        model: Any,
        plain: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Stand in for the loop `plain`, which is transformers' `_sample` with the model bound."""
        call = Call(num_calls=1)
        processors = LogitsProcessorList(p for p in logits_processor if not isinstance(p, SpeculativeProcessor))
        given = LoopInputs(
            input_ids, processors, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs
        )
        try:
            if self.trace is not None and len(input_ids) > 1:
                raise ValueError(
                    f"this plugin's trace records one sequence, and the call has {len(input_ids)}; trace = None"
                )
            settings = Settings(self.schedule, self.engine, None).of_call(hook.call_settings())
            return self._decode(call, settings, _keyed(settings, given), model, plain, given)
        except BaseException as error:
            if call.engine == "refused":
                call.reason = first_line(error)
            raise
        finally:
            self.count(call)

    def _decode(
        self, call: Call, settings: Settings, keyed: Keyed | None, model: Any, plain: Any, given: LoopInputs
    ) -> Any:
        """Choose the engine and run it. `keyed`: the noise of a call with a seed."""
        engine, reason = self._choose(settings, model, given)
        schedule = settings.schedule
        if schedule.tree is not None and engine != "plain":
            no_tree = why_chains(engine, len(given.input_ids), model, get_cache(given.model_kwargs))
            if no_tree is not None:
                self._say_chains(settings, no_tree)
                schedule = without_tree(schedule)
                reason = f"{reason}; chains, not trees: {no_tree}"
        if (
            keyed is not None
            and engine != "rounds"
            and given.config.return_dict_in_generate
            and given.config.output_scores
        ):
            raise ValueError(
                f"seed={keyed.seed} with output_scores=True: this call goes through transformers' loop"
                f" ({reason}), where a seed takes the place of the scores; ask for output_logits, or leave one out"
            )
        call.engine, call.reason = engine, reason
        if call.engine == "rounds":
            return self._in_rounds(call, schedule, keyed, model, given)
        return self._in_their_loop(call, schedule, keyed, model, plain, given)

    def _in_rounds(self, call: Call, schedule: Schedule, keyed: Keyed | None, model: Any, given: LoopInputs) -> Any:
        """By our own loop."""
        inputs = (given.input_ids, given.processors, given.criteria, given.config)
        common: Any = {
            "drafter": self.drafter,
            "schedule": schedule,
            "stats": call,
            "rule": self.verify,
            "keyed": keyed,
            "synchronize": self.synchronize,
            "capture": Capture(self.graph, self.record_after),
            **given.model_kwargs,
        }
        with _quicker(self.kernel, model, *models_of(self.drafter)), model._optimize_model_for_decode():
            if len(given.input_ids) > 1:
                return decode_batch(model, *inputs, **common)
            return decode(model, *inputs, given.streamer, trace=self.trace, **common)

    def _in_their_loop(
        self, call: Call, schedule: Schedule, keyed: Keyed | None, model: Any, plain: Any, given: LoopInputs
    ) -> Any:
        """By transformers' loop `plain`, over a target that looks ahead or as it is."""
        input_ids, processors, criteria, config, synced_gpus, streamer, model_kwargs = given
        mask, choosing, drawing = model_kwargs.get("attention_mask"), processors, config
        if keyed is not None:
            choosing = LogitsProcessorList([*processors, Chooser(keyed, left_padding(input_ids, mask))])
            drawing = copy.copy(config)
            drawing.do_sample = False  # nothing is left to draw, and the stream is not touched
        loop = functools.partial(plain, input_ids, choosing, criteria, drawing, synced_gpus, streamer, **model_kwargs)
        if call.engine == "plain":
            return loop()
        lookahead = Lookahead(
            get_cache(model_kwargs),
            input_ids,
            mask,
            _vocab_size(model),
            config,
            processors,
            self.drafter,
            schedule,
            call,
            noise=keyed,
            trace=self.trace,
        )
        try:
            with (
                _quicker(self.kernel, model, *models_of(self.drafter)),
                hook.intercepted(model, lookahead.cache, lookahead),
            ):
                return loop()
        finally:
            lookahead.finish()

    def _choose(self, settings: Settings, model: Any, given: LoopInputs) -> tuple[str, str]:
        """The engine for this call and the reason. Raises ValueError if the one that was asked for cannot serve it."""
        if settings.engine == "plain":
            return "plain", "engine=plain"
        input_ids, processors, criteria, config, synced_gpus, streamer, model_kwargs = given
        reason = why_not_at_all(model, input_ids, config, model_kwargs) or why_not_attention(model)
        if reason is not None:
            if settings.engine != "auto":
                raise ValueError(
                    f"engine={settings.engine} cannot serve this call: {reason}. engine=auto decodes it plainly."
                )
            self.warn_once(f"decoding plainly, without drafts: {reason}")
            return "plain", reason
        if settings.engine == "lookahead":
            return "lookahead", "engine=lookahead"
        rule = self.verify if settings.seed is None else "seed"
        reason = why_not_rounds(
            model, input_ids, config, processors, criteria, synced_gpus, streamer, model_kwargs, rule
        )
        if reason is None:
            return "rounds", "everything passed is served by it exactly"
        if settings.engine == "rounds":
            raise ValueError(
                f"engine=rounds cannot serve this call: {reason}. engine=auto serves it by the lookahead engine."
            )
        return "lookahead", reason

    def _say_chains(self, settings: Settings, reason: str) -> None:
        """Trees were asked for, and this call drafts chains."""
        if settings.engine == "rounds":
            raise ValueError(f"engine=rounds cannot draft trees in this call: {reason}. engine=auto drafts chains.")
        self.warn_once(f"drafting chains, not trees: {reason}")

    def _meet(self, model: PreTrainedModel, tokenizer: Any = None) -> None:
        """Load the draft if it is only named yet, and see that it fits this target."""
        with self._counting:
            if self._drafter is None:
                self._drafter = make_drafter(self._draft, model, tokenizer)
        if self.schedule.min_confidence and self._drafter.costs_nothing:
            raise ValueError(
                f"schedule=confidence asks a draft model how sure it is, and {self._drafter.name} is none; take adaptive or fixed"
            )
        kernels.prepare(self.kernel, model)
        if self.schedule.tree is not None:
            check_drafter(self._drafter)
        for member in members_of(self._drafter):
            if isinstance(member, ModelDrafter) and member.same_vocabulary:
                check_pair(model, member.model)

    def count(self, call: Call) -> None:
        with self._counting:
            self.last = call
            self.stats = self.stats + call

    def warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("specplug: %s", message)


def _keyed(settings: Settings, given: LoopInputs) -> Keyed | None:
    """The noise of a call with a seed. Raises ValueError where a seed has no effect."""
    seed = settings.seed
    if seed is None:
        return None
    if not given.config.do_sample:
        raise ValueError(
            f"seed={seed.seed} with do_sample=False: greedy decoding draws nothing; pass do_sample=True, or leave seed out"
        )
    hidden = left_padding(given.input_ids, given.model_kwargs.get("attention_mask"))
    lengths = [given.input_ids.shape[1] - padding for padding in hidden]
    return Keyed(seed.seed, seed.ids_of(len(given.input_ids)), lengths)


def models_of(drafter: Drafter) -> list[PreTrainedModel]:
    """The models that draft, none for a lookup."""
    return [member.model for member in members_of(drafter) if isinstance(member, ModelDrafter)]


@contextlib.contextmanager
def _quicker(kernel: str, *models: PreTrainedModel) -> Iterator[None]:
    """Within it, passes over a few positions cost about what one position costs, where that can be had."""
    with kernels.swapped(kernel, *models), packed.swapped(kernel, *models):
        yield


def _vocab_size(model: PreTrainedModel) -> int:
    size: int = model.config.get_text_config().vocab_size
    return size
