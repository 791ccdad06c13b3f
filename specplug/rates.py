"""Tokens per second and their ratios, from the samples of a run: totals over totals, intervals, and by length."""

from collections import defaultdict
from functools import reduce
from operator import add
from statistics import median
from typing import Any

import numpy as np

from specplug.stats import Stats, ratio

SIDES = ("plain", "assisted", "speculative")
Sample = dict[str, Any]


def tokens_and_seconds(sample: Sample, side: str, decode: bool = False) -> tuple[int, float] | None:
    """`decode`: the tokens after the first, and the time they took; of a batch nothing is known of that."""
    measured = sample.get(side)
    if measured is None or (decode and measured["seconds_first"] is None):
        return None
    if decode:
        return measured["new_tokens"] - 1, measured["seconds"] - measured["seconds_first"]
    return measured["new_tokens"], measured["seconds"]


def rate(samples: list[Sample], side: str, decode: bool = False) -> float | None:
    """All tokens over all seconds; None if the side was not measured on every sample."""
    pairs = [tokens_and_seconds(sample, side, decode) for sample in samples]
    known = [pair for pair in pairs if pair is not None]
    tokens, seconds = sum(t for t, _ in known), sum(s for _, s in known)
    return tokens / seconds if seconds > 0 and len(known) == len(pairs) else None


def speedup(samples: list[Sample], over: str, decode: bool = False) -> float | None:
    ours, theirs = rate(samples, "speculative", decode), rate(samples, over, decode)
    return ratio(ours, theirs)


def median_ratio(samples: list[Sample], over: str) -> float | None:
    ratios = [r for r in (speedup([sample], over) for sample in samples) if r is not None]
    return median(ratios) if ratios else None


def interval(samples: list[Sample], over: str, bootstrap: int, seed: int) -> list[float] | None:
    """95 % percentile bootstrap over prompts of the ratio of totals."""
    if len(samples) < 2 or not bootstrap or speedup(samples, over) is None:
        return None
    pairs = [[tokens_and_seconds(sample, side) for sample in samples] for side in ("speculative", over)]
    (tokens, seconds), (their_tokens, their_seconds) = (np.array(each, dtype=float).T for each in pairs)
    rng = np.random.default_rng(seed)
    ratios = []
    for _ in range(bootstrap):
        drawn = rng.integers(len(samples), size=len(samples))
        ours = tokens[drawn].sum() / seconds[drawn].sum()
        theirs = their_tokens[drawn].sum() / their_seconds[drawn].sum()
        ratios.append(ours / theirs if theirs else 0.0)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return [float(low), float(high)]


def by_length(samples: list[Sample]) -> dict[str, list[dict[str, Any]]]:
    """Speed-up and acceptance by tokens of the prompt and by new tokens of plain decoding, in steps of a factor of two."""
    found = {}
    for name, length_of in (
        ("prompt_tokens", lambda sample: sample["prompt_tokens"]),
        ("new_tokens", lambda sample: sample["plain"]["new_tokens"]),
    ):
        buckets: dict[int, list[Sample]] = defaultdict(list)
        for sample in samples:
            buckets[max(length_of(sample) - 1, 1).bit_length()].append(sample)
        found[name] = [
            {
                "from": 2 ** (step - 1) + 1 if step > 1 else 1,
                "to": 2**step,
                "num_samples": len(members),
                "tokens_per_second": {side: rate(members, side) for side in ("plain", "speculative")},
                "speedup": speedup(members, "plain"),
                "mean_acceptance_length": stats_of(members).mean_acceptance_length,
            }
            for step, members in sorted(buckets.items())
        ]
    return found


def stats_of(samples: list[Sample]) -> Stats:
    return reduce(add, (Stats.from_dict(sample["speculative"]["stats"]) for sample in samples), Stats())
