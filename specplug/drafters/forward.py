"""A draft model's passes in one call, and the draws from what they say."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specplug import warp
from specplug.cache import NAME, new_draft_cache, prepare_for_crop
from specplug.capture import MAX_WIDTH, Passes
from specplug.device import Clock
from specplug.drafters import Request
from specplug.verify import race, sample_by_inversion


class Forward:
    """The draft's passes on one call's cache: fed, counted, and in the target's vocabulary."""

    def __init__(self, drafter: Any, request: Request) -> None:
        self.model, self.max_length, self.request = drafter.model, drafter.max_length, request
        self.takes_positions, self.takes_keep = drafter.takes_positions, drafter.takes_keep
        self.cache: DynamicCache | None = None
        self.num_steps, self.clock = 0, Clock(drafter.model.device, request.time_forward)
        self.passes: Passes | None = None
        self.num_logits = 0  # of its own vocabulary, as the last pass had them

    @property
    def seconds_forward(self) -> float:
        return self.clock.seconds

    def room(self, length: int, gamma: int) -> int:
        """How many of `gamma` drafts fit behind a text of that length; the draft's context may be shorter than the target's."""
        return gamma if self.max_length is None else max(min(gamma, self.max_length - length), 0)

    def _forward(self, new: Tensor, padded: bool = False, **inputs: Any) -> Tensor:
        """Feed new tokens (B, N); returns fp32 logits of the next token, (B, V) with V of the target."""
        return self._logits(new, 1, padded, **inputs)[:, 0]

    def _logits(self, new: Tensor, num: int, padded: bool = False, recorded: bool = True, **inputs: Any) -> Tensor:
        """The same behind each of the last `num` tokens, (B, num, V). `padded`: several sequences, some with padding. `recorded`: by a
        recording, where there may be one."""
        # The last ones' logits are enough. A recording has all of them, and is compared with passes that do; what is never
        # recorded, a prompt among them, may be long.
        never = padded or self.cache is None or new.shape[1] > MAX_WIDTH
        if self.takes_keep and never and new.shape[1] > num:
            inputs["logits_to_keep"] = num
        first = self.cache is None
        if self.cache is None:
            self.cache = new_draft_cache(self.model.config)
        inputs |= {"input_ids": new, "use_cache": True, "return_dict": True, NAME: self.cache}
        started, before = self.clock.now(), self.request.capture.seconds
        with torch.inference_mode():  # a tenth quicker than no_grad for a small draft; nothing here is written in place
            if padded and self.cache.get_seq_length():  # else it is the prompt
                self.request.capture.count(self.model, False, "its rows are aligned by padding")
            if padded or not recorded:
                logits = self.model(**inputs).logits
            else:
                given = inputs if "attention_mask" in inputs else None
                if self.passes is None:
                    self.passes = self.request.capture.passes(self.model)
                logits = self.passes(new, self.cache, lambda: self.model(**inputs).logits, given)
            logits = logits[:, -num:].float()
        self.clock.add(started, self.request.capture.seconds - before)
        self.num_steps += 1
        if first:
            prepare_for_crop(self.cache, roomy=not padded)
        self.num_logits = logits.shape[-1]
        return in_vocabulary(logits, self.request.vocab_size)

    def _draw(self, scores: Tensor, probs: list[Tensor], rows: list[int], lengths: list[int]) -> Tensor | None:
        """The next draft token of each row, (B, V) -> (B,); when sampling, its distribution is added to `probs`.

        `lengths`: of the rows' texts with what is drafted. None if the draft is less confident than was asked for, in the
        mean of the rows.
        """
        noise = self.request.noise
        greedy = not self.request.do_sample and noise is None
        if greedy and not self.request.asks:
            return scores.argmax(-1)
        drawn_from = warp.to_probs(scores)
        if self.request.asks:
            highest, likeliest = drawn_from.max(-1)
            if self.request.unsure(drawn_from, highest):
                return None
            if greedy:
                return likeliest
        if noise is not None:
            return race(drawn_from, noise.of(rows, lengths, drawn_from))
        probs.append(drawn_from)
        return sample_by_inversion(drawn_from).clamp(min=0)  # of a broken draft anything


def in_vocabulary(logits: Tensor, size: int) -> Tensor:
    """(..., V) of the draft -> (..., size) of the target, for one tokenizer's vocabularies, padded or not."""
    missing = size - logits.shape[-1]
    if missing > 0:  # the draft never says what it does not have
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits if missing == 0 else logits[..., :size]
