"""The `rounds` engine: our own decoding loop, round after round until a criterion stops it.

Receives what transformers prepared for its own loop (`_sample`) and returns what that loop returns. One sequence here,
several in `batch.py`; `why_not_rounds` says what is left to the `lookahead` engine, `why_not_at_all` what to plain decoding.
"""

import functools
import time
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
from specplug.fixed import FixedPasses
from specplug.fixed import why_not as why_not_fixed
from specplug.lookahead import left_padding
from specplug.noise import Keyed, Noise, StreamAhead
from specplug.round import Text, verify_at_once, verify_by_walk, verify_in_order, verify_in_tree
from specplug.schedule import AdaptivePlan, Round, Schedule
from specplug.stats import Stats
from specplug.stopping import Stopping
from specplug.trace import Trace
from specplug.tree import Tree, limited
from specplug.tree_pass import tree_inputs
from specplug.verify import sample

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

    target = Clock(model.device, synchronize)
    model_kwargs.pop("tokenizer", None)
    do_sample = bool(generation_config.do_sample)
    keep = bool(generation_config.return_dict_in_generate)
    all_scores: tuple[Tensor, ...] | None = () if keep and generation_config.output_scores else None
    all_logits: tuple[Tensor, ...] | None = () if keep and generation_config.output_logits else None
    stopping = Stopping(stopping_criteria)
    text = Text(input_ids)
    (hidden,) = left_padding(input_ids, model_kwargs.get("attention_mask"))
    for_draft = warp.for_draft(logits_processor)
    stateless = warp.all_stateless(logits_processor)
    if stateless:
        logits_processor = warp.for_row(logits_processor, hidden)

    def choose(probs: Tensor) -> Tensor:
        """The target's own draw, (1, V) -> (1,)."""
        if keyed is None:
            return sample(probs)
        return keyed.choose([0], [len(text) - hidden], probs)

    # The prompt's pass, transformers' own: chunked prefill and a reused cache included.
    started = now()
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
    cache = caches.get_cache(model_kwargs)
    stats.seconds_prefill += now() - started
    stats.num_prefill_tokens += 1
    started = now()

    noise: Noise | None = None
    verify: Any = functools.partial(verify_at_once if stateless else verify_in_order, do_sample=do_sample, rule=rule)
    if do_sample and (rule == "walk" or keyed is not None):
        noise = keyed or StreamAhead(1, outputs.logits.shape[-1], input_ids.device)
        verify = functools.partial(verify_by_walk, stateless=stateless, choose=choose)
    capture = capture or Capture()
    fixed: FixedPasses | None = None
    if schedule.tree is None and why_not_fixed(model, capture.graph) is None and _usual(model_kwargs, hidden, text):
        fixed = capture.fixed(model)
        fixed.fill(cache, [hidden], _room(stopping, len(text) - hidden))
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
        cache if fixed is None else None,
        synchronize,
        noise,
        judge=stop_drafting,
        capture=capture,
        tree=schedule.tree is not None,
        since=lambda _, known: text.since(hidden + known),
    )
    session: Any = drafter.start(request)
    if fixed is not None and stateless and noise is None:
        verify = functools.partial(verify, begin=getattr(session, "begin", None))
    in_tree = functools.partial(
        verify_in_tree, do_sample=do_sample, rule=rule, stateless=stateless, choose=sample if noise is None else choose
    )
    nothing = Proposal(input_ids.new_empty((1, 0)), None)
    proposal, logits = nothing, outputs.logits[:, -1:].float()  # (1, 1, V)
    del outputs  # the prompt's logits can be large
    if fixed is None:
        caches.prepare_for_crop(cache, roomy=True)
    safely = Safely(stats, noise)
    recorded = fixed is None and _starts_at_zero(model_kwargs, len(text))
    passes = (capture if recorded else Capture()).passes(model)
    first, stop, began, captured, num_early = True, False, time.perf_counter(), 0.0, 0
    places: list[int] = []  # of the last pass, those that the text goes through
    settled = True  # the cache holds no drafts that the text does not go through
    try:
        while True:
            num_accepted, rejected, num_tokens = 0, False, 0
            places = []
            judge = verify if proposal.tree is None else in_tree
            for token, origin, scores, place in judge(proposal, logits, logits_processor, text=text):
                text.commit(token)
                places.append(place)
                if all_scores is not None:
                    all_scores += (scores,)
                if all_logits is not None:
                    all_logits += (logits[:, place].clone(),)
                if trace is not None:
                    trace.emit(token, origin, scores, place)
                num_tokens += 1
                num_accepted += origin == "accepted"
                rejected = rejected or origin == "recovered"
                stop = stopping.should_stop(text, token, all_scores)
                if streamer is not None:
                    streamer.put(
                        torch.tensor([token], dtype=input_ids.dtype)
                    )  # (1,), on the CPU, as plain decoding does
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
                # The pass added one position for the last token and one per draft; each token committed keeps one.
                if fixed is None:
                    caches.keep(cache, num_drafts + 1, places)
                    settled = True
                if request.tree:
                    session.observe_path(places[1:])
                else:
                    session.observe(num_accepted)
                over = time.perf_counter()
                seconds = None if capture.num_early > num_early else over - began - (capture.seconds - captured)
                plan.observe([Round(num_drafts, num_accepted, proposal.bucket)], num_tokens, seconds)
                began, captured, num_early = over, capture.seconds, capture.num_early
            if stop:
                break

            room = stopping.room(len(text))
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
            width = proposal.tokens.shape[1] + 1
            drafted, tree = torch.cat([text.ids, proposal.tokens], dim=1), proposal.tree
            forward, before = target.now(), capture.seconds
            ids = drafted[:, -width:]
            if fixed is not None:
                logits = fixed(ids, [len(text) - hidden - 1])
            else:
                ordinary = functools.partial(_pass, model, drafted, input_ids.shape[1], width, model_kwargs, tree)
                given = None if tree is None else tree_inputs({"input_ids": ids, caches.NAME: cache}, tree, model.dtype)
                settled, places = False, []
                logits = passes(ids, cache, ordinary, given)
            logits = logits[:, -width:].float()  # (1, G + 1, V)
            target.add(forward, capture.seconds - before)
    finally:
        if not settled:  # something raised
            if proposal.tree is not None and places:
                caches.keep(cache, proposal.tokens.shape[1] + 1, places)
            caches.shorten(cache, len(text) - (1 if places else 0))
        if fixed is not None:
            # The prompt is in it also where a streamer raised at the first token.
            fixed.cache.give_back(cache, max(len(text) - 1, input_ids.shape[1]) - hidden, hidden)
        capture.close()
        caches.finish(cache)
        stats.seconds_rounds += now() - started
        stats.seconds_target += target.seconds
        stats.seconds_capture += capture.seconds
        stats.num_draft_steps += session.num_steps
        stats.seconds_draft_forward += session.seconds_forward
    if streamer is not None:
        streamer.end()
    ids = text.ids.clone()
    if not keep:
        return ids
    fields: dict[str, Any] = {"sequences": ids, "scores": all_scores, "logits": all_logits, caches.NAME: cache}
    return GenerateDecoderOnlyOutput(**fields)


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


def _room(stopping: Stopping, length: int) -> int:
    """Positions that a text may come to, as far as it is known, so that buffers need not be moved; no more than twice as many."""
    room = stopping.room(length)
    return 2 * length if room is None else min(length + room, 2 * length)


def _pass(model: Any, text: Tensor, prompt: int, width: int, model_kwargs: dict[str, Any], tree: Tree | None) -> Tensor:
    """Logits of the last committed token and all drafts: the last `width` of the text, (1, T). As transformers does it.

    `model_kwargs`: as they were behind the prompt's pass. `tree`: how the drafts hang together; None is one behind another.
    """
    further = text.shape[1] - prompt - 1  # the first token is counted already
    if further:
        types = model_kwargs.get("token_type_ids")
        model_kwargs = model._update_model_kwargs_for_generation({}, dict(model_kwargs), num_new_tokens=further)
        if (
            types is not None
        ):  # plain decoding repeats the last one, and transformers here as many of the last as are new
            model_kwargs["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, further)], dim=1)
    if "logits_to_keep" in model_kwargs:
        model_kwargs = {**model_kwargs, "logits_to_keep": width}
    inputs = model.prepare_inputs_for_generation(text, next_sequence_length=width, **model_kwargs)
    if tree is not None:
        inputs = tree_inputs(inputs, tree, model.dtype)
    return model(**inputs, return_dict=True).logits
