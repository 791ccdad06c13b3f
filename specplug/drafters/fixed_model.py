"""A model drafts at fixed shapes: on a device with graphs, the whole loop of drafting is one of them.

Each row's text begins at slot 0 of a ragged cache (ragged.py), so that rejected drafts are taken back by going on earlier. The loop
begins with the last two tokens of each text, whatever was kept: after a round in which all drafts were kept both are new to the
cache, and else the first is written once more. Where something has to be asked between two drafts (how sure the draft is, a processor
that reads the text, the noise of the target's draws), each step is a pass of its own.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specplug import warp
from specplug.cache import new_draft_cache
from specplug.drafters import Request, RowProposals
from specplug.drafters.forward import Forward, in_vocabulary
from specplug.fixed import WIDTHS, Buffers, FixedPasses, weakly
from specplug.verify import sample_by_inversion

# Where the host waits for a device, which can draft meanwhile.
OVERLAPPING = {"cuda"}


class Begun(NamedTuple):
    """A loop that runs already: how many drafts, and the length that the text will have if the last round ends as it seems."""

    gamma: int
    length: int


class DraftLoop:
    """`first`, (B, 2), the last tokens of the texts, the earlier ones at `starts`, (B,); to `tokens`, (B, G), and, when sampling,
    `probs`, (B, G, V)."""

    def __init__(self, buffers: Buffers, gamma: int, request: Request, compiled: bool) -> None:
        num_rows, device = buffers.cache.num_rows, buffers.cache.device
        with torch.inference_mode(False):
            self.first = torch.zeros((num_rows, 2), dtype=torch.long, device=device)
            self.starts = torch.zeros(num_rows, dtype=torch.long, device=device)
            self.tokens = torch.zeros((num_rows, gamma), dtype=torch.long, device=device)
            self.probs = None
            if request.do_sample:
                self.probs = torch.zeros((num_rows, gamma, request.vocab_size), device=device)
            self.two = torch.arange(2, device=device)
        self.forward, self.compiled = weakly(buffers), compiled
        self.processors, self.vocab_size = request.processors, request.vocab_size

    def __call__(self) -> None:
        gamma = self.tokens.shape[1]
        new, positions = self.first, self.starts[:, None] + self.two
        for step in range(gamma):
            logits = self.forward(new, positions, self.compiled)[:, -1]
            scores = warp.process_draft(
                self.processors, self.first[:, :1], in_vocabulary(logits.float(), self.vocab_size)
            )
            if self.probs is None:
                token = scores.argmax(-1)
            else:
                probs = warp.to_probs(scores)
                self.probs[:, step].copy_(probs)
                token = sample_by_inversion(probs).clamp(min=0)  # of a broken draft anything
            self.tokens[:, step].copy_(token)
            new, positions = token[:, None], positions[:, -1:] + 1


class FixedDraft(Forward):
    """A session for several sequences, or with `OneRow` for one."""

    def __init__(self, drafter: Any, request: Request, num_rows: int) -> None:
        super().__init__(drafter, request)
        self.fixed: FixedPasses = request.capture.fixed(self.model)
        self.rows: list[int] = []  # that the cache holds
        self.num_rows = num_rows
        self.num_right = [0] * num_rows  # leading tokens of each text that are in the cache
        self.num_fed: dict[int, int] = {}  # drafts of the last proposal that are in the cache, until they are judged
        self.loops = self.fixed.has_graphs and _key(request) is not None
        # Of this round: how many drafts were asked for, (1, T) text, (1, G) drafts.
        self.last: tuple[int, Tensor, Tensor] | None = None
        self.begun: Begun | None = None

    def propose(self, texts: list[Tensor], gamma: int, active: list[int]) -> RowProposals:
        lengths = {b: texts[b].shape[1] for b in active}
        gamma = self.room(max(lengths.values()), gamma)
        if gamma == 0:
            return RowProposals.none(torch.cat([text[:, -1:] for text in texts]))
        device = self.model.device
        own = {b: texts[b].to(device) for b in active}
        if not self.rows:
            self._prefill(own)
        elif len(active) < len(self.rows) and (2 * len(active) <= len(self.rows) or not self.fixed.has_graphs):
            self.fixed.select([self.rows.index(b) for b in active])
            self.rows = list(active)
        begun, self.begun = self.begun, None
        ready = begun is not None and begun == Begun(gamma, max(lengths.values()))
        if not ready:
            self._catch_up(own)
        started, before = self.clock.now(), self.request.capture.seconds
        with torch.inference_mode():
            if self.loops:
                tokens, probs = self._loop(own, gamma, ready)
            else:
                tokens, probs = self._steps(own, gamma)
        self.clock.add(started, self.request.capture.seconds - before)
        made = tokens.shape[1]
        for b in active:
            fed = max(made - 1, 0) if self.loops or made == gamma else made
            self.num_fed[b], self.num_right[b] = fed, lengths[b]
        if not made:
            return RowProposals.none(torch.cat([text[:, -1:] for text in texts]))
        proposals = self._of_all(texts, active, tokens, probs)
        if self.num_rows == 1:
            self.last = (gamma, own[active[0]], proposals.tokens)
        return proposals

    def begin(self, num_accepted: Tensor, next_token: Tensor) -> None:
        """Of one sequence: go on drafting behind what the target has just decided, (1,) each, which the host does not know yet.

        If the next round asks for other drafts, these are for nothing; what was put into the cache is right in any case.
        """
        if self.last is None or not self.loops or next_token.device.type not in OVERLAPPING:
            return
        (gamma, text, drafts), self.last = self.last, None
        furthest = text.shape[1] + drafts.shape[1] + 1
        if next_token.device != text.device or self.room(furthest, gamma) < gamma:
            return
        started, captured = self.clock.now(), self.request.capture.seconds
        with torch.inference_mode():
            program = self._program(gamma, furthest)
            loop: DraftLoop = program.function
            before = torch.cat([text[:, -1:], drafts], dim=1).gather(1, num_accepted[:, None])
            # -1 is what was drawn from no distribution, see verify.checked: the host raises when it reads it, and a device that had
            # looked it up among embeddings could not be used again.
            loop.first.copy_(torch.cat([before, next_token[:, None].clamp(min=0)], dim=1))
            loop.starts.copy_(text.shape[1] - 1 + num_accepted)
            self.fixed.run(program)
        self.clock.add(started, self.request.capture.seconds - captured)
        self.num_steps += gamma
        self.begun = Begun(gamma, text.shape[1] + 1)  # and as many more as are kept, see observe

    def fed(self, row: int) -> int:
        """How many of the row's drafts are in the cache, until they are judged."""
        return self.num_fed.get(row, 0)

    def hold(self, row: int, length: int) -> None:
        """No more than so many leading tokens of the row's text are as they were."""
        self.num_right[row] = min(self.num_right[row], length)

    def observe(self, row: int, num_accepted: int) -> None:
        """The drafts that were fed are in the cache; those that the target kept may stay."""
        self.num_right[row] += min(self.num_fed.pop(row, 0), num_accepted)
        if self.begun is not None:
            self.begun = self.begun._replace(length=self.begun.length + num_accepted)

    def _prefill(self, own: dict[int, Tensor]) -> None:
        """All of the texts but their last tokens, as any prompt."""
        self.rows = list(own)
        width = max(text.shape[1] for text in own.values()) - 1
        padding = [width + 1 - text.shape[1] for text in own.values()]
        new = torch.cat(
            [torch.nn.functional.pad(text[:, :-1], (left, 0)) for text, left in zip(own.values(), padding, strict=True)]
        )
        inputs: dict[str, Tensor] = {}
        if any(padding):
            mask = torch.arange(width, device=new.device) >= torch.tensor(padding, device=new.device)[:, None]
            inputs["attention_mask"] = mask.long()
            inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        self.cache = new_draft_cache(self.model.config)
        self._forward(new, padded=True, **inputs)
        self.fixed.fill(self.cache, padding)
        self.cache = None
        for b, text in own.items():
            self.num_right[b] = text.shape[1] - 1

    def _catch_up(self, own: dict[int, Tensor]) -> None:
        """Feed what was committed while others drafted, but for the last two tokens, with which the loop begins."""
        while True:
            missing = max(text.shape[1] - 2 - self.num_right[b] for b, text in own.items())
            if missing <= 0:
                return
            width = min(missing, WIDTHS[-1])
            starts = {b: min(self.num_right[b], max(text.shape[1] - 2 - width, 0)) for b, text in own.items()}
            with torch.inference_mode():
                self._pass({b: text[:, starts[b] : starts[b] + width] for b, text in own.items()}, starts, width)
            for b, text in own.items():
                self.num_right[b] = max(self.num_right[b], min(starts[b] + width, text.shape[1]))

    def _pass(self, new: dict[int, Tensor], starts: dict[int, int], width: int) -> Tensor:
        """(R, W, V) logits of all rows that the cache holds; those that are over are fed anything."""
        full = {row: torch.nn.functional.pad(each, (0, width - each.shape[1])) for row, each in new.items()}
        anything = next(iter(full.values()))
        self.num_steps += 1
        return self.fixed(
            torch.cat([full.get(row, anything) for row in self.rows]), [starts.get(row, 0) for row in self.rows]
        )

    def _loop(self, own: dict[int, Tensor], gamma: int, ready: bool) -> tuple[Tensor, Tensor | None]:
        """(A, G) drafts and what they were drawn from, (A, G, V), by one program, which may have been run already."""
        program = self._program(gamma, max(text.shape[1] for text in own.values()))
        loop: DraftLoop = program.function
        if not ready:
            anything = next(iter(own.values()))
            loop.first.copy_(torch.cat([own.get(row, anything)[:, -2:] for row in self.rows]))
            self.fixed.write(loop.starts, [own[row].shape[1] - 2 if row in own else 0 for row in self.rows])
            self.fixed.run(program)
            self.num_steps += gamma
        places = self._places(own)
        return loop.tokens[places], None if loop.probs is None else loop.probs[places]

    def _program(self, gamma: int, length: int) -> Any:
        """The loop of so many drafts, with room for them behind texts of this length."""
        self.fixed.make_room(length + gamma)
        return self.fixed.program(
            ("drafts", gamma, _key(self.request)),
            lambda buffers, compiled: DraftLoop(buffers, gamma, self.request, compiled),
        )

    def _steps(self, own: dict[int, Tensor], gamma: int) -> tuple[Tensor, Tensor | None]:
        """The same by one pass a draft."""
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        drafted = dict(own)
        named = [self.request.row] if self.num_rows == 1 else list(own)
        places = self._places(own)
        for step in range(gamma):
            width = 2 if step == 0 else 1
            starts = {b: text.shape[1] - width for b, text in drafted.items()}
            logits = self._pass({b: text[:, -width:] for b, text in drafted.items()}, starts, width)[places, width - 1]
            logits = in_vocabulary(logits, self.request.vocab_size)
            scores = warp.process_rows(self.request.processors, list(drafted.values()), logits)
            drawn = self._draw(scores, probs, named, [text.shape[1] for text in drafted.values()])
            if drawn is None:
                break
            tokens.append(drawn[:, None])
            drafted = {
                b: torch.cat([text, drawn[i : i + 1, None]], dim=1) for i, (b, text) in enumerate(drafted.items())
            }
        made = torch.cat(tokens, dim=1) if tokens else next(iter(own.values())).new_empty((len(own), 0))
        return made, torch.stack(probs, dim=1) if probs else None

    def _places(self, own: dict[int, Tensor]) -> Any:
        """Of the active rows in the cache's: a slice where these are all of them, which costs nothing."""
        if list(own) == self.rows:
            return slice(None)
        return self.fixed.indices([self.rows.index(b) for b in own])

    def _of_all(self, texts: list[Tensor], active: list[int], tokens: Tensor, probs: Tensor | None) -> RowProposals:
        """With a place for the rows that were not asked for, where the target is."""
        made = [tokens.shape[1] if b in active else 0 for b in range(len(texts))]
        return RowProposals(
            _spread(tokens.to(texts[0].device), active, len(texts)),
            made,
            None if probs is None else _spread(probs.to(texts[0].device), active, len(texts)),
            [0] * len(texts),
        )


def _spread(values: Tensor, rows: Sequence[int], num_rows: int) -> Tensor:
    """(A, ...) -> (B, ...), a copy, with zeros for the other rows."""
    if len(rows) == num_rows:
        return values.clone()
    spread = values.new_zeros((num_rows, *values.shape[1:]))
    for place, row in enumerate(rows):
        spread[row].copy_(values[place])
    return spread


def _key(request: Request) -> Hashable | None:
    """What a loop of drafts depends on, None if it cannot be one program."""
    if request.noise is not None or request.judge is not None or request.min_confidence:
        return None
    processors = warp.key_of(request.processors)
    return None if processors is None else (request.do_sample, request.vocab_size, processors)
