"""The `rounds` engine: our own decoding loop, round after round until a criterion stops it.

Receives what transformers prepared for its own loop (`_sample`) and returns what that loop returns. One sequence here,
several in `batch.py`; `why_not_rounds` says what is left to the `lookahead` engine, `why_not_at_all` what to plain decoding.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from specplug import cache as caches
from specplug import warp
from specplug.batch import why_not_batch
from specplug.capture import Capture
from specplug.device import Clock
from specplug.drafters import Drafter, Proposal, Request, Safely
from specplug.lookahead import left_padding
from specplug.noise import Keyed, Noise, StreamAhead
from specplug.round import Emitted, Text, verify_at_once, verify_by_walk, verify_in_order, verify_in_tree
from specplug.schedule import AdaptivePlan, Round, Schedule
from specplug.stats import Stats
from specplug.stopping import Stopping
from specplug.target import TargetPasses
from specplug.trace import Trace
from specplug.tree import limited
from specplug.verify import sample

READ_A_MASK_TOKEN = ("xlm", "flaubert")
GROWING = {"attention_mask", "position_ids", "token_type_ids"}  # one entry per position of the text
HANDLED = GROWING | {
    caches.NAME,
    "tokenizer",
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
}


def why_not_at_all(
    model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """None if drafts can be taken back exactly in this call, else the reason why it has to be decoded plainly."""
    if model.config.is_encoder_decoder:
        return f"{type(model).__name__} is an encoder-decoder model"
    if model._is_stateful:
        return f"{type(model).__name__} keeps a recurrent state, which cannot be rolled back"
    if model.config.model_type in READ_A_MASK_TOKEN:
        return f"{type(model).__name__} reads a mask token behind the text in each pass"
    if config.output_attentions or config.output_hidden_states:
        return "attentions or hidden states were asked for, whose shapes tell how the text was made"
    if _positions_change(model, input_ids, config, model_kwargs):
        return (
            "its position embeddings change with the length of the text (dynamic or longrope), within the lengths that this"
            " call may come to; drafts are further positions of a pass, and would change them too early"
        )
    return caches.why_not_croppable(caches.get_cache(model_kwargs))


def _positions_change(
    model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> bool:
    """May a pass with drafts get other position embeddings than passes without? transformers takes the furthest position of
    a pass to choose them: between two sets (longrope), or, beyond a length, a set for each length (dynamic)."""
    text_config = model.config.get_text_config()
    parameters = getattr(text_config, "rope_parameters", None) or {}
    trained = getattr(text_config, "max_position_embeddings", None) or 0
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    for each in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = each.get("rope_type")
        if kind not in ("dynamic", "longrope"):
            continue
        limit = trained if kind == "dynamic" else each.get("original_max_position_embeddings") or trained
        ends = torch.tensor([input_ids.shape[1]])  # of each prompt, in positions
        if positions is not None:
            ends = positions.amax(-1) + 1
        elif mask is not None and mask.ndim == 2:
            ends = mask.sum(-1)
        longest = (
            float("inf") if config.max_length is None else config.max_length + int(ends.max()) - input_ids.shape[1]
        )
        if longest > limit and not (kind == "longrope" and int(ends.min()) > limit):
            return True
    return False


def why_not_rounds(
    model: PreTrainedModel,
    input_ids: Tensor,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    synced_gpus: bool,
    streamer: Any,
    model_kwargs: dict[str, Any],
    rule: str,
) -> str | None:
    """None if our own loop makes of this call what transformers' loop makes of it, else the reason.

    `rule`: the accept rule, or "seed" for a call whose random numbers belong to a seed.
    """
    if input_ids.shape[1] == 0 or model_kwargs.get("inputs_embeds") is not None:
        return "the prompt is given as embeddings"
    if synced_gpus:
        return "the call runs under synced_gpus"
    # `generate` hands on the tokenizer that it built stop strings with; the model never sees it.
    unknown = sorted(key for key, value in model_kwargs.items() if key not in HANDLED and value is not None)
    if unknown:
        return f"the model is given further inputs ({', '.join(unknown)})"
    if len(input_ids) > 1:
        if config.do_sample and rule == "walk":
            return "verify=walk follows the random stream, from which a batch draws for all its sequences at once"
        return why_not_batch(model, input_ids, config, processors, criteria, streamer, model_kwargs)
    return None


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any,
    drafter: Drafter,
    schedule: Schedule,
    stats: Stats,
    rule: str = "block",
    keyed: Keyed | None = None,
    synchronize: bool = False,
    trace: Trace | None = None,
    capture: Capture | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate for one sequence, (1, T); counts go to `stats`. Returns ids (1, T + new), or transformers' output object.

    `keyed`: the noise of a call with a seed, which is verified by the walk rule. `synchronize`: wait for the device at the ends of
    the call and of the prompt's pass, and have it note when other passes begin and end, so that the seconds in `stats` are right.
    """

    def now() -> float:
        if synchronize and model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return time.perf_counter()

    clock = Clock(model.device, synchronize)
    model_kwargs.pop("tokenizer", None)
    do_sample = bool(generation_config.do_sample)
    text = Text(input_ids)
    output = Output(text, stopping_criteria, generation_config, streamer, trace)
    (hidden,) = left_padding(input_ids, model_kwargs.get("attention_mask"))
    for_draft = warp.for_draft(logits_processor)
    stateless = warp.all_stateless(logits_processor)
    if stateless:
        logits_processor = warp.for_row(logits_processor, hidden)

    # The prompt's pass, transformers' own: chunked prefill and a reused cache included.
    started = now()
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
    stats.seconds_prefill += now() - started
    stats.num_prefill_tokens += 1
    started = now()

    noise: Noise | None = None
    if do_sample and (rule == "walk" or keyed is not None):
        noise = keyed or StreamAhead(1, outputs.logits.shape[-1], input_ids.device)
    capture = capture or Capture()
    room = output.stopping.room(len(text) - hidden)
    target = TargetPasses(model, text, hidden, model_kwargs, capture, room, trees=schedule.tree is not None)
    plan = schedule.start(1, drafter.costs_nothing)
    stop_drafting = None
    # Only of a drafter that asks before each draft; and elsewhere than on the CPU each question would wait for the device.
    asks = input_ids.device.type == "cpu" and getattr(drafter, "asks", False)
    if asks and isinstance(plan, AdaptivePlan):
        stop_drafting = plan.use_judge()
    request = Request(
        do_sample and noise is None,
        for_draft,
        outputs.logits.shape[-1],
        schedule.min_confidence,
        schedule.criterion,
        target.cache if target.fixed is None else None,
        synchronize,
        noise,
        judge=stop_drafting,
        capture=capture,
        length=None if room is None else len(text) - hidden + room,
        tree=schedule.tree is not None,
        since=lambda _, known: text.since(hidden + known),
    )
    session: Any = drafter.start(request)
    begin = None
    if target.fixed is not None:
        begin = getattr(session, "begin", None)
    choose = sample if keyed is None else lambda probs: keyed.choose([0], [len(text) - hidden], probs)
    in_chain, in_tree = _rules(do_sample, rule, stateless, noise is not None, choose, begin)
    nothing = Proposal(input_ids.new_empty((1, 0)), None)
    proposal, logits = nothing, outputs.logits[:, -1:].float()  # (1, 1, V)
    del outputs  # the prompt's logits can be large
    target.prepare()
    safely = Safely(stats, noise)
    first, stop, began, captured, num_early = True, False, time.perf_counter(), 0.0, 0
    try:
        while True:
            num_accepted, rejected, num_tokens = 0, False, 0
            target.places = []
            verify = in_chain if proposal.tree is None else in_tree
            for emitted in verify(proposal, logits, logits_processor, text=text):
                target.places.append(emitted.node)
                num_tokens += 1
                num_accepted += emitted.origin == "accepted"
                rejected = rejected or emitted.origin == "recovered"
                stop = output.add(emitted, logits)
                if stop:
                    break
            if trace is not None:
                trace.end(logits, logits_processor)
            num_drafts = proposal.tokens.shape[1]
            if first:
                stats.num_new_tokens += 1
                first, began = False, time.perf_counter()
            else:
                stats.count_round(num_drafts, num_accepted, rejected, num_tokens, proposal.depth)
                target.keep(num_drafts + 1)
                if request.tree:
                    session.observe_path(target.places[1:])
                else:
                    session.observe(num_accepted)
                over = time.perf_counter()
                seconds = None if capture.num_early > num_early else over - began - (capture.seconds - captured)
                plan.observe([Round(num_drafts, num_accepted, proposal.bucket)], num_tokens, seconds)
                began, captured, num_early = over, capture.seconds, capture.num_early
            if stop:
                break

            room = output.stopping.room(len(text))
            gamma, depth = plan.next_gamma(), None if room is None else room - 1
            shape = limited(schedule.tree, gamma, depth)
            if shape is None and depth is not None:
                gamma = min(gamma, depth)
            visible = text.ids[:, hidden:]
            proposal = nothing
            if shape is not None:
                proposal = safely(lambda: session.propose_tree(visible, shape), nothing, [visible.shape[1]])  # noqa: B023
            elif gamma > 0 and not request.tree:
                proposal = safely(lambda: session.propose(visible, gamma), nothing, [visible.shape[1]])  # noqa: B023
            proposal = proposal.first(plan.trim(proposal.tokens.shape[1], proposal.bucket))
            if proposal.tree is not None and proposal.tree.is_chain:
                proposal = proposal._replace(tree=None)  # needs no mask, and its rules are quicker
            if trace is not None:
                trace.begin(gamma, room, plan, text.ids, *proposal[:2], tree=proposal.tree)
            drafted = torch.cat([text.ids, proposal.tokens], dim=1)
            forward, before = clock.now(), capture.seconds
            logits = target.score(drafted, proposal.tokens.shape[1] + 1, proposal.tree)  # (1, G + 1, V)
            clock.add(forward, capture.seconds - before)
    finally:
        target.finish()
        capture.close()
        stats.seconds_rounds += now() - started
        stats.seconds_target += clock.seconds
        capture.add_to(stats)
        stats.num_draft_steps += session.num_steps
        stats.seconds_draft_forward += session.seconds_forward
    return output.finish(target.cache)


def _rules(
    do_sample: bool, rule: str, stateless: bool, coupled: bool, choose: Callable[[Tensor], Tensor], begin: Any
) -> tuple[Callable[..., Iterator[Emitted]], Callable[..., Iterator[Emitted]]]:
    """How proposals are verified, see round.py: chains, and trees. `coupled`: drafts see the noise of the target's draws, which
    are made by `choose`."""
    in_chain: Any
    if coupled:
        in_chain = functools.partial(verify_by_walk, stateless=stateless, choose=choose)
    elif stateless:
        in_chain = functools.partial(verify_at_once, do_sample=do_sample, rule=rule, begin=begin)
    else:
        in_chain = functools.partial(verify_in_order, do_sample=do_sample, rule=rule)
    in_tree = functools.partial(verify_in_tree, do_sample=do_sample, rule=rule, stateless=stateless, choose=choose)
    return in_chain, in_tree


class Output:
    """Where the tokens of a call go: into its text, to its criteria, and to whoever asked to see them."""

    def __init__(
        self,
        text: Text,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: Any,
        trace: Trace | None,
    ) -> None:
        self.text, self.stopping, self.streamer, self.trace = text, Stopping(criteria), streamer, trace
        self.dtype = text.ids.dtype
        self.as_object = bool(config.return_dict_in_generate)
        self.scores: tuple[Tensor, ...] | None = () if self.as_object and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if self.as_object and config.output_logits else None

    def add(self, emitted: Emitted, logits: Tensor) -> bool:
        """The text goes on with this token, from a pass with (1, N, V) logits. Returns whether it ends there."""
        self.text.commit(emitted.token)
        if self.scores is not None:
            self.scores += (emitted.scores,)
        if self.logits is not None:
            self.logits += (logits[:, emitted.node].clone() if emitted.logits is None else emitted.logits,)
        if self.trace is not None:
            self.trace.emit(emitted.token, emitted.origin, emitted.scores, emitted.node)
        stop = self.stopping.should_stop(self.text, emitted.token, self.scores)
        if self.streamer is not None:
            # (1,), on the CPU, as plain decoding does
            self.streamer.put(torch.tensor([emitted.token], dtype=self.dtype))
        return stop

    def finish(self, cache: Any) -> Tensor | GenerateDecoderOnlyOutput:
        """What `generate` returns."""
        if self.streamer is not None:
            self.streamer.end()
        ids = self.text.ids.clone()
        if not self.as_object:
            return ids
        fields: dict[str, Any] = {"sequences": ids, "scores": self.scores, "logits": self.logits, caches.NAME: cache}
        return GenerateDecoderOnlyOutput(**fields)
