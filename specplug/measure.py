"""Measuring one prompt on several sides (plain, transformers' assisted, ours), and the verdict on exactness.

Token ids are counted, never re-tokenised text. Knows nothing about files.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specplug.cache import NAME, crop, prepare_for_crop
from specplug.drafters import Request
from specplug.drafters.model import ModelDrafter

# A divergence is a tie where the two tokens' logits differ by at most this many roundings of the largest logit. fp32 sums
# are rounded at every step; half precision is rounded once a layer, its sums are fp32.
TIE_ROUNDINGS = {torch.float32: 64, torch.float16: 4, torch.bfloat16: 4}


class FirstToken(BaseStreamer):
    """Notes when the first new token is there. The prompt comes first; every side gets the same streamer."""

    def __init__(self) -> None:
        self.puts, self.at = 0, 0.0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


@dataclass
class Timed:
    ids: list[int]  # the new tokens
    seconds: float  # of the whole call
    seconds_first: float  # until the first new token


def timed_generate(model: Any, ids: Tensor, seed: int, **arguments: Any) -> Timed:
    """One `generate` call on (1, T) ids from a fixed state of the random stream."""
    torch.manual_seed(seed)
    first = FirstToken()
    synchronize(model)
    started = time.perf_counter()
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=first, **arguments)
    synchronize(model)
    seconds = time.perf_counter() - started
    return Timed(output[0, ids.shape[1] :].tolist(), seconds, first.at - started)


def synchronize(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


@dataclass
class Verdict:
    kind: str  # identical, tie or mismatch
    position: int | None = None  # first new token that differs
    gap: float | None = None  # of the target's logits for the two tokens there
    tolerance: float | None = None


def compare(
    model: PreTrainedModel, prompt: Tensor, plain: list[int], ours: list[int], processors: Any = None
) -> Verdict:
    """Equal ids are identical. Else the first difference is looked at: can rounding explain it?

    Args:
        prompt: (1, T). plain, ours: new tokens of the two sides.
        processors: the logits processors of the call, if any.
    """
    if plain == ours:
        return Verdict("identical")
    position = next(
        (i for i, (a, b) in enumerate(zip(plain, ours, strict=False)) if a != b), min(len(plain), len(ours))
    )
    if position >= min(len(plain), len(ours)):  # one is the other's beginning: no choice of tokens explains that
        return Verdict("mismatch", position)
    prefix = torch.cat([prompt, prompt.new_tensor([plain[:position]])], dim=1)
    with torch.no_grad():
        logits = model(input_ids=prefix).logits[:, -1].float()  # (1, V)
    scores = (logits if processors is None else processors(prefix, logits.clone()))[0]
    gap = abs(float(scores[plain[position]] - scores[ours[position]]))
    dtype = model.dtype if model.dtype in TIE_ROUNDINGS else torch.float32
    tolerance = TIE_ROUNDINGS[dtype] * torch.finfo(dtype).eps * float(logits.abs().max())
    return Verdict("tie" if gap <= tolerance else "mismatch", position, gap, tolerance)


@dataclass
class Costs:
    """Median seconds of forward passes, measured in a row on one text."""

    seconds_target_step: float  # the target, one position
    seconds_target_pass: float  # the target, gamma + 1 positions
    seconds_draft_step: float  # the draft, one position; for a lookup, one proposal

    @property
    def cost_coefficient(self) -> float:
        return self.seconds_draft_step / self.seconds_target_step

    @property
    def width_cost(self) -> float:
        return self.seconds_target_pass / self.seconds_target_step


def measure_costs(model: PreTrainedModel, drafter: Any, ids: Tensor, gamma: int, repeats: int = 15) -> Costs:
    """Time the passes that a round consists of. `ids`: (1, T) text to stand on; repeats are interleaved."""

    def prepared(which: PreTrainedModel, width: int) -> Callable[[], float]:
        cache = DynamicCache(config=which.config)
        text = ids.to(which.device)
        with torch.no_grad():
            which(input_ids=text, use_cache=True, **{NAME: cache})
        prepare_for_crop(cache)
        new = text[:, -1:].expand(1, width).contiguous()

        def once() -> float:
            synchronize(which)
            started = time.perf_counter()
            with torch.no_grad():
                which(input_ids=new, use_cache=True, return_dict=True, **{NAME: cache})
            synchronize(which)
            seconds = time.perf_counter() - started
            crop(cache, width)
            return seconds

        return once

    def propose() -> float:
        session = drafter.start(Request(False, LogitsProcessorList(), model.config.get_text_config().vocab_size))
        session.propose(ids[:, :-1], max(gamma, 1))
        started = time.perf_counter()
        session.propose(ids, max(gamma, 1))
        return time.perf_counter() - started

    draft_step = prepared(drafter.model, 1) if isinstance(drafter, ModelDrafter) else propose
    passes = [prepared(model, 1), prepared(model, gamma + 1), draft_step]
    seconds: list[list[float]] = [[], [], []]
    for _ in range(repeats):
        for k, one in enumerate(passes):
            seconds[k].append(one())
    return Costs(*(sorted(each)[len(each) // 2] for each in seconds))
