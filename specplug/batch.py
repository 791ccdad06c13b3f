"""The `rounds` engine for several sequences: each row accepts as many drafts as it can, and leaves when it is finished.

Rows of different lengths stay aligned to their right ends, in the text and in the cache, as left-padded prompts are: after
each pass `cache.align` moves every row by its own number of rejected positions. `why_not_batch` says what is not served
here; the `lookahead` engine then does.
"""

import time
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from specplug import cache as caches
from specplug import warp
from specplug.attention import takes_positions
from specplug.capture import Capture
from specplug.device import Clock
from specplug.drafters import Drafter, Request, RowProposals, Safely, start_rows
from specplug.fixed import FixedPasses, to_device
from specplug.fixed import why_not as why_not_fixed
from specplug.lookahead import left_padding
from specplug.noise import Keyed
from specplug.round import Text
from specplug.schedule import Round, Schedule
from specplug.stats import Stats
from specplug.stopping import Stopping
from specplug.verify import RULES, chain, checked, verify_greedy, verify_walk

# Criteria that judge each row by itself, whatever the others are.
ROWWISE = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)


def why_not_batch(
    model: Any,
    input_ids: Tensor,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> str | None:
    """None if rows may advance by different lengths, else what needs them to advance together."""
    if not warp.all_stateless(processors, len(input_ids)):
        known = warp.for_draft(processors, len(input_ids))
        other = next(type(each).__name__ for each in processors if each not in known)
        return f"{other} may look at all sequences of the batch"
    others = [type(each).__name__ for each in criteria if type(each) not in ROWWISE]
    if others:
        return f"{others[0]} may look at all sequences of the batch"
    if not any(type(each) is EosTokenCriteria for each in criteria) and len(criteria) > 1:
        return "without an end-of-sequence token, finished sequences go on until all are finished"
    if streamer is not None:
        return "a streamer is given one token of every sequence at a time"
    if config.return_dict_in_generate:
        return "scores or the cache of all sequences were asked for"
    if caches.get_cache(model_kwargs).get_seq_length() > 0:
        return "the batch goes on from a filled cache"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not (mask.ndim == 2 and bool((mask.long().diff(dim=1) >= 0).all())):
        return "the attention mask has holes"
    if not takes_positions(model):
        return (
            f"{type(model).__name__} takes no position_ids, and would count those of a row that falls behind as padding"
        )
    if model_kwargs.get("token_type_ids") is not None:
        return "the batch has token_type_ids"
    positions = model_kwargs.get("position_ids")
    if positions is not None and not _from_zero(positions, torch.ones_like(input_ids) if mask is None else mask):
        return "the batch has position_ids of its own"
    return None


def _from_zero(positions: Tensor, mask: Tensor) -> bool:
    """Does each row of (B, T) count from 0, behind its padding?"""
    if positions.shape not in (mask.shape, mask[:1].shape):
        return False
    usual = mask.long().cumsum(1) - 1
    return bool(((positions == usual) | (usual < 0)).all())


class Row:
    """One sequence: its text as plain decoding has it, padding included, and where it stands in the output."""

    def __init__(self, index: int, ids: Tensor, hidden: int) -> None:
        self.index, self.text, self.hidden = index, Text(ids), hidden

    @property
    def length(self) -> int:
        """Without the padding of the prompt."""
        return len(self.text) - self.hidden

    @property
    def visible(self) -> Tensor:
        return self.text.ids[:, self.hidden :]


def decode_batch(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter,
    schedule: Schedule,
    stats: Stats,
    rule: str = "block",
    keyed: Keyed | None = None,
    synchronize: bool = False,
    capture: Capture | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Generate for (B, T) ids; counts, one round a row and pass, go to `stats`. Returns (B, T + new), padded on the right.

    `keyed`: the noise of a call with a seed, which is verified by the walk rule.
    """

    def now() -> float:
        if synchronize and model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return time.perf_counter()

    target = Clock(model.device, synchronize)
    model_kwargs.pop("tokenizer", None)
    do_sample = bool(generation_config.do_sample)
    padding = left_padding(input_ids, model_kwargs.get("attention_mask"))
    rows = [Row(b, input_ids[b : b + 1], padding[b]) for b in range(len(input_ids))]
    everyone, active = rows, list(rows)
    stopping = Stopping(stopping_criteria)

    started = now()
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
    cache = caches.get_cache(model_kwargs)
    logits = outputs.logits[:, -1:].float()  # (B, 1, V)
    del outputs
    stats.seconds_prefill += now() - started
    stats.num_prefill_tokens += len(rows)
    started = now()

    capture = capture or Capture()
    fixed: FixedPasses | None = None
    not_fixed = why_not_fixed(model, capture.graph, len(rows))
    if not_fixed is None:
        fixed = capture.fixed(model)
        fixed.fill(cache, padding)
    held = list(rows)  # rows in the cache
    for_draft = warp.for_draft(logits_processor, len(rows))
    drawn = do_sample and keyed is None
    request = Request(
        drawn,
        for_draft,
        logits.shape[-1],
        schedule.min_confidence,
        schedule.criterion,
        time_forward=synchronize,
        noise=keyed,
        capture=capture,
        since=lambda b, known: everyone[b].text.since(everyone[b].hidden + known),
    )
    session, plan = start_rows(drafter, request, len(rows)), schedule.start(len(rows), drafter.costs_nothing)
    safely = Safely(stats, keyed)
    if fixed is None:
        cache = caches.apart(cache)  # rows are going to leave it, and a caller's would lack them
        model_kwargs = {**model_kwargs, caches.NAME: cache}
        caches.prepare_for_crop(cache)
    nothing = proposals = RowProposals.none(input_ids)
    slots, first, began = input_ids.shape[1], True, time.perf_counter()  # slots: positions in the cache
    captured, num_early = 0.0, 0
    try:
        while True:
            lengths = [proposals.lengths[row.index] for row in active]
            width = logits.shape[1]
            num_accepted, next_token, drafts = _verify(
                active, proposals, lengths, logits, logits_processor, do_sample, rule, keyed
            )
            going_on, committed, made = [], [], []
            for i, row in enumerate(active):
                num_tokens, stopped = _commit(row, [*drafts[i][: num_accepted[i]], next_token[i]], stopping)
                kept = min(num_accepted[i], num_tokens)
                if first:
                    stats.num_new_tokens += 1
                else:
                    stats.count_round(lengths[i], kept, kept < lengths[i] and num_tokens > kept, num_tokens)
                    session.observe(row.index, kept)
                    made.append(Round(lengths[i], kept, proposals.buckets[row.index]))
                committed.append(num_tokens)
                if not stopped:
                    going_on.append(i)
            over = time.perf_counter()
            if not first:
                seconds = None if capture.num_early > num_early else over - began - (capture.seconds - captured)
                plan.observe(made, sum(committed) / len(committed), seconds)
            began, captured, num_early = over, capture.seconds, capture.num_early
            if not going_on:
                break

            # Rows that are finished leave; the others drop what was rejected.
            active = [active[i] for i in going_on]
            if fixed is None:  # and are aligned again
                if len(going_on) < len(committed):
                    caches.select(cache, going_on)
                remove = torch.tensor([0 if first else width - committed[i] for i in going_on])
                slots = max(row.length for row in active) - 1
                caches.align(cache, remove, slots)
            elif len(active) < len(held) and (2 * len(active) <= len(held) or not fixed.has_graphs):
                # Graphs are for so many rows, so not each time that one leaves.
                fixed.select([held.index(row) for row in active])
                held = list(active)
            first = False

            room = stopping.room(min(len(row.text) for row in active))
            gamma = plan.next_gamma() if room is None else min(plan.next_gamma(), room - 1)
            texts, indices = [row.visible for row in everyone], [row.index for row in active]
            proposals = nothing
            if gamma > 0:
                ends = [row.length for row in everyone]
                proposals = safely(lambda: session.propose(texts, gamma, indices), nothing, ends)  # noqa: B023
            proposals = proposals.trimmed(plan)
            width = max(proposals.lengths[row.index] for row in active) + 1
            forward, before = target.now(), capture.seconds
            if fixed is not None:
                logits = _fixed_pass(fixed, held, active, proposals, width)
            else:
                capture.count(model, False, not_fixed)
                inputs = _target_inputs(model, active, proposals, width, slots, model_kwargs)
                logits = model(**inputs, return_dict=True).logits[:, -width:].float()  # (A, G + 1, V)
            target.add(forward, capture.seconds - before)
    finally:
        capture.close()
        capture.add_to(stats)
        caches.finish(cache)
        stats.seconds_rounds += now() - started
        stats.seconds_target += target.seconds
        stats.num_draft_steps += session.num_steps
        stats.seconds_draft_forward += session.seconds_forward
    return _stacked([row.text.ids for row in everyone], generation_config._pad_token_tensor)


def _verify(
    active: list[Row],
    proposals: RowProposals,
    lengths: list[int],
    logits: Tensor,
    processors: LogitsProcessorList,
    do_sample: bool,
    rule: str,
    keyed: Keyed | None,
) -> tuple[list[int], list[int], list[list[int]]]:
    """Accepted drafts, next token and all drafts of each active row, from (A, G + 1, V) logits. One host read."""
    tokens = _of_active(proposals.tokens, active)[:, : logits.shape[1] - 1]  # (A, G)
    if warp.all_pointwise(processors):
        flat = logits.reshape(1, -1, logits.shape[-1])
        scores = warp.process_at_once(processors, active[0].text.ids, tokens[:1, :0], flat).view_as(logits)
    else:
        scores = torch.cat(
            [
                warp.process_at_once(
                    warp.for_row(processors, row.hidden), row.text.ids, tokens[i : i + 1], logits[i : i + 1]
                )
                for i, row in enumerate(active)
            ]
        )
    if keyed is not None:
        return _walk(active, tokens, lengths, warp.to_probs(scores), keyed)
    num_drafts = None if set(lengths) == {tokens.shape[1]} else to_device(lengths, logits.device)
    if do_sample:
        probs = None if proposals.probs is None else _of_active(proposals.probs, active)[:, : tokens.shape[1]]
        verified = RULES[rule](tokens, probs, warp.to_probs(scores), num_drafts=num_drafts)
    else:
        verified = verify_greedy(tokens, scores, num_drafts)
    read = torch.cat([torch.stack(list(verified), dim=1), tokens], dim=1).tolist()  # (A, 2 + G)
    return [row[0] for row in read], checked([row[1] for row in read]), [row[2:] for row in read]


def _of_active(values: Tensor, active: list[Row]) -> Tensor:
    """(B, ...) -> (A, ...)"""
    if len(active) == len(values):
        return values
    return values[to_device([row.index for row in active], values.device)]


def _walk(
    active: list[Row], tokens: Tensor, lengths: list[int], probs: Tensor, keyed: Keyed
) -> tuple[list[int], list[int], list[list[int]]]:
    """The walk rule for each row, from (A, G) drafts and (A, G + 1, V) probabilities: the noise is there for all positions."""
    places = [(i, node) for i, num_drafts in enumerate(lengths) for node in range(num_drafts + 1)]
    at = torch.tensor(places, device=probs.device)
    flat = probs[at[:, 0], at[:, 1]]  # (N, V) positions that a row may be asked about
    indices, ends = [active[i].index for i, _ in places], [active[i].length + node for i, node in places]
    drawn = dict(zip(places, keyed.choose(indices, ends, flat).tolist(), strict=True))
    num_accepted, next_token = [], []
    read = tokens.tolist()
    for i, drafts in enumerate(read):
        *kept, last = verify_walk(chain(drafts[: lengths[i]]), lambda node: drawn[i, node])  # noqa: B023
        num_accepted.append(len(kept))
        next_token.append(last.token)
    return num_accepted, next_token, read


def _commit(row: Row, tokens: list[int], stopping: Stopping) -> tuple[int, bool]:
    """Add tokens until a criterion stops the row: how many, and whether it did."""
    for count, token in enumerate(tokens, start=1):
        row.text.commit(token)
        if stopping.should_stop(row.text, token, None):
            return count, True
    return len(tokens), False


def _fixed_pass(fixed: FixedPasses, held: list[Row], active: list[Row], proposals: RowProposals, width: int) -> Tensor:
    """(A, W, V) logits of the last committed token of each row and the drafts behind it. Rows that are finished are still in
    the cache, and are given something."""
    tail = proposals.tokens[:, : width - 1]
    last = torch.cat([row.text.ids[:, -1:] for row in held])  # (R, 1)
    own = _of_active(tail, held)
    going_on = {row.index for row in active}
    starts = [row.length - 1 if row.index in going_on else 0 for row in held]
    logits = fixed(torch.cat([last, own], dim=1), starts)
    return logits if len(active) == len(held) else logits[fixed.indices([held.index(row) for row in active])]


def _target_inputs(
    model: Any, active: list[Row], proposals: RowProposals, width: int, slots: int, model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """What `forward` takes to score the last committed token of each row and the drafts behind it."""
    device = active[0].text.ids.device
    tail = proposals.tokens[[row.index for row in active], : width - 1]  # (A, W - 1)
    committed = torch.cat(
        [torch.nn.functional.pad(row.visible, (slots + 1 - row.length, 0)) for row in active]
    )  # (A, S + 1)
    text = torch.cat([committed, tail], dim=1)  # (A, S + W)
    real = torch.tensor([row.length for row in active], device=device)[:, None]
    mask = (torch.arange(slots + width, device=device) >= slots + 1 - real).long()
    inputs = {key: value for key, value in model_kwargs.items() if key not in ("attention_mask", "position_ids")}
    inputs["attention_mask"] = mask
    if model_kwargs.get("position_ids") is not None:
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = width
    return model.prepare_inputs_for_generation(text, next_sequence_length=width, **inputs)


def _stacked(texts: list[Tensor], pad: Tensor | None) -> Tensor:
    longest = max(text.shape[1] for text in texts)
    value = 0 if pad is None else int(pad.reshape(-1)[0])
    return torch.cat([torch.nn.functional.pad(text, (0, longest - text.shape[1]), value=value) for text in texts])
