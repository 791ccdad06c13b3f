"""The `lookahead` engine: transformers' own decoding loop, untouched, over a target that has looked ahead.

When the loop asks for one more position, the target's pass also scores the drafts behind it. The loop gets the first row
now, and the others at its next steps for as long as the token that it chose is the draft; then the cache is rolled back
and the next pass begins. So the loop, its processors, criteria, streamer and random numbers are those of plain decoding:
ids are equal under the same seed, for any number of sequences in the batch, which advance together.

Drafts take no random numbers here: a draft is kept when the loop chose the same token by itself. When it samples, a draft
model runs the race that the loop's next draw is going to run; see noise.py.
"""

import math
import time
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from specplug import cache as caches
from specplug import warp
from specplug.drafters import Drafter, Request, Safely, start_rows
from specplug.noise import Noise, StreamAhead
from specplug.schedule import Round, Schedule
from specplug.stats import Stats
from specplug.trace import Trace

# Inputs of one step that are known to grow with the number of positions, or not to depend on it.
EXTENDED = {"input_ids", "attention_mask", "position_ids", "token_type_ids", "cache_position", "logits_to_keep"}
CONSTANT = {caches.NAME, "use_cache", "return_dict", "output_attentions", "output_hidden_states"}


class Lookahead:
    """The drafts and the unread answers of one `generate` call.

    `input_ids`: (B, T), the text when the loop begins. `noise`: of the loop's draws; None is that of the global stream.
    """

    def __init__(
        self,
        cache: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        vocab_size: int,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        drafter: Drafter,
        schedule: Schedule,
        stats: Stats,
        noise: Noise | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.cache, self.ids, self.stats = cache, input_ids, stats
        self.trace, self.asked = trace, 0
        self.prefix_length = input_ids.shape[1]  # of the text when the last pass began
        num_rows = input_ids.shape[0]
        if noise is None and generation_config.do_sample:
            noise = StreamAhead(num_rows, vocab_size, input_ids.device)
        for_draft = warp.for_draft(logits_processor, num_rows)
        request = Request(False, for_draft, vocab_size, schedule.min_confidence, schedule.criterion, noise=noise)
        self.plan = schedule.start(num_rows, drafter.costs_nothing)
        self.pass_began: float | None = None
        self.buckets: list[int] = [0] * num_rows
        self.sessions = start_rows(drafter, request, num_rows)
        self.hidden = left_padding(input_ids, attention_mask)
        self.processors = logits_processor
        if trace is not None and warp.all_stateless(logits_processor):
            self.processors = warp.for_row(logits_processor, self.hidden[0])
        limit = generation_config.max_length
        self.max_length = None if limit is None else math.ceil(limit)
        self.eos = generation_config._eos_token_tensor
        self.pad = generation_config._pad_token_tensor
        self.finished = torch.zeros(num_rows, dtype=torch.bool, device=input_ids.device)
        self.active: list[int] = []  # rows that the last pass drafted for
        self.kept_of_finished: dict[int, int] = {}  # those of them that have ended since: how many drafts they kept
        self.safely = Safely(stats, noise)
        self.began = False
        self.drafts = input_ids.new_empty((num_rows, 0))  # (B, G) behind the last token that was scored
        self.logits: Tensor | None = None  # (B, G + 1, V) of that pass
        self.num_kept = 0  # drafts that the loop chose too
        self.output_class: Any = None

    def after_prefill(self, outputs: Any = None) -> None:
        """The prompt is in the cache: from here on, one-token steps are answered."""
        caches.prepare_for_crop(self.cache, roomy=True)
        self.began = True
        if self.trace is not None:
            self.trace.looked_ahead(0, False, None, torch.empty(0), self.processors)
        self.stats.num_prefill_tokens += len(self.ids)
        self.stats.num_new_tokens += len(self.ids)

    def finish(self) -> None:
        """Leave the cache as plain decoding would: it holds what the loop asked for, no more."""
        if self.began:
            self._roll_back(mismatch=False)
            caches.finish(self.cache)
        self.stats.num_draft_steps += self.sessions.num_steps
        self.stats.seconds_draft_forward += self.sessions.seconds_forward

    def forward(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for the target's call `forward(*args, **kwargs)` with our cache."""
        if not self.began:
            return forward(*args, **kwargs)
        if not self._is_step(args, kwargs):
            self._roll_back(mismatch=False)
            return forward(*args, **kwargs)
        started = time.perf_counter()
        try:
            token = kwargs["input_ids"]  # (B, 1)
            self.ids = torch.cat([self.ids, token.to(self.ids.device)], dim=1)
            self._note_finished(token[:, 0].to(self.ids.device))
            if self.num_kept < self.drafts.shape[1]:
                if torch.equal(token, self.drafts[:, self.num_kept : self.num_kept + 1]):
                    self.num_kept += 1
                    return self._answer()
                self._roll_back(mismatch=True)
            else:
                self._roll_back(mismatch=False)
            self.active = (~self.finished).nonzero()[:, 0].tolist()
            self.kept_of_finished = {}
            drafts = self._propose().to(token.device)  # (B, G)
            before = time.perf_counter()
            if self.trace is not None:
                self.prefix_length = self.ids.shape[1]
                self.trace.begin(self.asked, None, self.plan, self.ids, drafts.to(self.ids.device), None)
            outputs = forward(*args, **_extended(kwargs, drafts))
            self.stats.seconds_target += time.perf_counter() - before
            self.drafts, self.num_kept = drafts, 0
            self.logits = outputs.logits[:, -drafts.shape[1] - 1 :]
            self.output_class = type(outputs)
            return self._answer()
        finally:
            self.stats.seconds_rounds += time.perf_counter() - started

    def _is_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """One new position per sequence, with inputs that we know how to extend."""
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if args or ids is None or ids.shape[1] != 1 or kwargs.get("output_attentions"):
            return False
        if kwargs.get("output_hidden_states") or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
            return False
        return not {key for key, value in kwargs.items() if value is not None} - EXTENDED - CONSTANT

    def _answer(self) -> Any:
        assert self.logits is not None
        row = self.logits[:, self.num_kept : self.num_kept + 1]
        return self.output_class(logits=row, **{caches.NAME: self.cache})

    def _propose(self) -> Tensor:
        """(B, G) drafts, G as many as every unfinished sequence has; a finished one gets the padding it will be fed."""
        room = None if self.max_length is None else self.max_length - self.ids.shape[1] - 1
        gamma = self.plan.next_gamma() if room is None else min(self.plan.next_gamma(), room)
        nothing = self.ids.new_empty((len(self.ids), 0))
        active, self.asked = self.active, max(gamma, 0)
        if gamma <= 0 or not active:
            return nothing
        texts = [self.ids[b : b + 1, self.hidden[b] :] for b in range(len(self.ids))]
        ends = [text.shape[1] for text in texts]
        proposals = self.safely(lambda: self.sessions.propose(texts, gamma, active), None, ends)
        if proposals is None:
            return nothing
        proposals = proposals.trimmed(self.plan)
        self.buckets = proposals.buckets
        width = min(proposals.lengths[b] for b in active)
        drafts = self.ids.new_zeros((len(self.ids), width))
        drafts[active] = proposals.tokens[active, :width]
        if self.pad is not None:
            drafts[self.finished] = self.pad.to(drafts)
        return drafts

    def _roll_back(self, mismatch: bool) -> None:
        """End the last pass: count it, and take from the cache the drafts that the loop did not choose."""
        if self.logits is None:
            return
        num_drafts, made = self.drafts.shape[1], []
        for b in self.active:
            kept = self.kept_of_finished.get(b, self.num_kept)
            made.append(Round(num_drafts, kept, self.buckets[b]))
            self.stats.count_round(num_drafts, kept, mismatch and b not in self.kept_of_finished, kept + 1)
            self.sessions.observe(b, kept)
        now = time.perf_counter()
        if self.pass_began is not None:  # from one pass to the next, the loop's own work included
            self.plan.observe(made, self.num_kept + 1, now - self.pass_began)
        self.pass_began = now
        caches.crop(self.cache, num_drafts - self.num_kept)
        if self.trace is not None:
            new = self.ids[0, self.prefix_length + self.num_kept :].tolist()  # empty if the loop has ended
            following = new[0] if new else None
            self.trace.looked_ahead(self.num_kept, mismatch, following, self.logits, self.processors)
        self.logits, self.drafts, self.num_kept = None, self.drafts[:, :0], 0

    def _note_finished(self, tokens: Tensor) -> None:
        """A sequence whose last token ended it is padded from here on, and no longer counted."""
        if self.eos is None or len(self.ids) == 1:  # one sequence alone: the loop ends with it
            return
        ended = torch.isin(tokens, self.eos.to(tokens.device)) & ~self.finished
        for b in ended.nonzero()[:, 0].tolist():
            self.kept_of_finished[b] = self.num_kept
        self.finished |= ended


def left_padding(input_ids: Tensor, mask: Tensor | None) -> list[int]:
    """Leading positions of each prompt that are masked: nothing to draft from."""
    if mask is None or mask.ndim != 2 or mask.shape != input_ids.shape:
        return [0] * len(input_ids)
    return mask.long().cumsum(1).eq(0).sum(1).tolist()


def _extended(kwargs: dict[str, Any], drafts: Tensor) -> dict[str, Any]:
    """The inputs of one step, for that step and the drafts (B, G) behind it."""
    num_drafts = drafts.shape[1]
    if num_drafts == 0:
        return kwargs
    kwargs = dict(kwargs, input_ids=torch.cat([kwargs["input_ids"], drafts], dim=1))
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None:
        kwargs["attention_mask"] = torch.cat([mask, mask.new_ones((len(mask), num_drafts))], dim=1)
    for name in ("position_ids", "cache_position"):
        if (positions := kwargs.get(name)) is not None:
            behind = torch.arange(1, num_drafts + 1, dtype=positions.dtype, device=positions.device)
            kwargs[name] = torch.cat([positions, positions[..., -1:] + behind], dim=-1)
    if (types := kwargs.get("token_type_ids")) is not None:
        kwargs["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, num_drafts)], dim=1)
    if kwargs.get("logits_to_keep"):
        kwargs["logits_to_keep"] = num_drafts + 1
    return kwargs
