"""What a benchmark of several ways to decode makes of its measurements. Knows samples and costs, runs nothing.

A sample is one batch of prompts that went through all ways: under `ways`, by name, its new tokens, its seconds and the counts of
its rounds.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from statistics import median
from typing import Any

import torch
from torch import Tensor

from specplug import theory
from specplug.launches import Counts
from specplug.round_costs import RoundCosts
from specplug.stats import Stats, number, ratio
from specplug.verify import Verified, sample_by_inversion

# Ways to decode. Others of ours are named by their gamma, "gamma 4", or by their schedule.
PLAIN = "transformers"
ASSISTED = "transformers, assisted"
STATIC = "transformers, static cache"
OWN = "gamma 0"
ADAPTIVE = "adaptive"
SYNTHETIC = "synthetic"
HEADER = (
    "way", "tok/s", "x plain", "decoding", "x plain", "first token", "a round", "target", "draft", "rest", "tokens a round",
    "of the memory's", "of theory's",
)  # fmt: skip

HEADER_OF_CALLS = (
    "way", "first call", "of it recording", "later calls", "x later", "host reads a round", "launches a round",
)  # fmt: skip


@dataclass
class Costs:
    """What passes cost without anything between them, and what limits them."""

    rounds: RoundCosts
    costs_nothing: bool  # of the drafter; a draft step is a proposal, whatever its length
    bytes_per_pass: int  # weights that a pass reads, and the keys and values of one sequence
    copied_per_second: float  # bytes, those read and those written, of a copy that no cache holds


def verify_synthetic(
    alpha: float,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    generator: torch.Generator | None = None,
    num_drafts: Tensor | None = None,
) -> Verified:
    """Keep each draft with probability `alpha`, whatever it is: the speed of a pair that agrees so often, and nobody's text.

    Args as in `verify.verify_token`.
    """
    kept = torch.rand(draft_tokens.shape, device=draft_tokens.device, generator=generator) < alpha
    if num_drafts is not None:
        kept &= torch.arange(kept.shape[1], device=kept.device) < num_drafts[:, None]
    num_accepted = kept.long().cumprod(-1).sum(-1)  # (B,)
    rows = torch.arange(len(kept), device=kept.device)
    return Verified(num_accepted, sample_by_inversion(target_probs[rows, num_accepted], generator))


def summarize(
    samples: Sequence[dict[str, Any]],
    costs: Costs | None,
    synthetic_alpha: float | None,
    batch_size: int,
    first_calls: dict[str, dict[str, Any]],
    counts: dict[str, Counts | None],
) -> dict[str, Any]:
    """Figures of every way, over the samples that have it; None where nothing was measured.

    `first_calls`: what the first call of each way made. `counts`: of ours, the host reads and launches of a call.
    """
    names = list(dict.fromkeys(name for each in samples for name in each["ways"]))
    ways = {name: of_way([each["ways"][name] for each in samples if name in each["ways"]]) for name in names}
    for way in ways.values():
        for kind in ("tokens_per_second", "tokens_per_second_decode"):
            way[kind.replace("tokens_per_second", "speedup")] = ratio(way[kind], ways[PLAIN][kind])
    for name, way in ways.items():
        way.update(of_calls(first_calls.get(name), counts.get(name)))
        if costs is not None:
            add_shares(name, way, ways, costs, batch_size)
    return {
        "synthetic_alpha": synthetic_alpha,
        "batch_size": batch_size,
        "num_batches": len(samples),
        "ways": ways,
        "costs": None if costs is None else asdict(costs),
    }


def of_way(made: list[dict[str, Any]]) -> dict[str, Any]:
    """One way over all batches. Decoding is all but the first token of each sequence, where its time is known."""
    stats = reduce(add, (Stats.from_dict(each["stats"]) for each in made if each["stats"]), Stats())
    tokens, seconds = sum(each["new_tokens"] for each in made), sum(each["seconds"] for each in made)
    timed = [each for each in made if each["seconds_first"] is not None]
    first = sum(each["seconds_first"] for each in timed)
    rounds = stats.num_rounds
    parts = {"target": stats.seconds_target, "draft": stats.seconds_draft_forward, "rest": stats.seconds_other}
    return {
        "num_new_tokens": tokens,
        "tokens_per_second": ratio(tokens, seconds),
        "tokens_per_second_decode": ratio(
            sum(each["new_tokens"] - 1 for each in timed), sum(each["seconds"] for each in timed) - first
        ),
        "seconds_first": ratio(first, len(timed)),
        "seconds_per_round": ratio(stats.seconds_rounds - stats.seconds_capture, rounds),
        "round": {name: ratio(spent, rounds) for name, spent in parts.items()},
        "seconds_capture": stats.seconds_capture,
        "seconds_later": median(each["seconds"] for each in made),
        "num_rounds": rounds,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "mean_gamma": stats.mean_gamma,
        "alpha": stats.alpha,
        "overhead": stats.overhead,
        "peak_bytes": max((each["peak_bytes"] for each in made if each["peak_bytes"] is not None), default=None),
        "same_ids": sum(bool(each["same_ids"]) for each in made),
        "num_batches": len(made),
    }


def of_calls(first: dict[str, Any] | None, counts: Counts | None) -> dict[str, Any]:
    """What the first call took, which compiles and records, and what a round asks of the host and of the device."""
    recording = None if first is None or first["stats"] is None else first["stats"]["seconds_capture"]
    return {
        "seconds_first_call": None if first is None else first["seconds"],
        "seconds_capture_first_call": recording,
        "host_reads_per_round": None if counts is None else counts.host_reads / counts.num_rounds,
        "launches_per_round": None if counts is None else counts.launches / counts.num_rounds,
    }


def add_shares(name: str, way: dict[str, Any], ways: dict[str, Any], costs: Costs, batch_size: int) -> None:
    """Of the memory's speed, where a step reads the weights once; of theory's speed-up over our own plain loop.

    Theory: Leviathan et al. 2022 (arXiv 2211.17192), theorem 3.8, with the measured alpha and the costs of a draft step and of a
    pass over so many positions. It speaks of one sequence, a fixed gamma, and drafts in every round.
    """
    way["share_of_memory"] = way["share_of_theory"] = way["predicted_speedup"] = None
    if name in (PLAIN, OWN, STATIC) and way["tokens_per_second_decode"]:
        least = costs.bytes_per_pass / costs.copied_per_second
        way["share_of_memory"] = least * way["tokens_per_second_decode"]
    gamma = gamma_of(name)
    own = ways.get(OWN, {}).get("tokens_per_second_decode")
    if batch_size > 1 or not gamma or costs.costs_nothing or way["alpha"] is None or not own:
        return
    step, seconds = costs.rounds.target[0], costs.rounds.seconds(gamma)
    way["predicted_speedup"] = theory.expected_tokens(way["alpha"], gamma) * step / seconds
    way["share_of_theory"] = ratio(way["tokens_per_second_decode"], own * way["predicted_speedup"])


def gamma_of(name: str) -> int | None:
    """Of a way that drafts a fixed number."""
    return int(name.removeprefix("gamma ")) if name.startswith("gamma ") else None


def milliseconds(value: float | None) -> str:
    return number(value, 2, " ms", 1e3)


def percent(value: float | None) -> str:
    return number(value, 0, " %", 100)


def table(summary: dict[str, Any]) -> list[list[str]]:
    """HEADER and a row a way."""
    rows = [list(HEADER)]
    for name, way in summary["ways"].items():
        rows.append(
            [
                name,
                number(way["tokens_per_second"], 1),
                number(way["speedup"], 2, "x"),
                number(way["tokens_per_second_decode"], 1),
                number(way["speedup_decode"], 2, "x"),
                milliseconds(way["seconds_first"]),
                milliseconds(way["seconds_per_round"]),
                *(milliseconds(way["round"][part]) for part in ("target", "draft", "rest")),
                number(way["mean_acceptance_length"]),
                percent(way.get("share_of_memory")),
                percent(way.get("share_of_theory")),
            ]
        )
    return rows


def table_of_calls(summary: dict[str, Any]) -> list[list[str]]:
    """HEADER_OF_CALLS and a row a way."""
    return [
        list(HEADER_OF_CALLS),
        *(
            [
                name,
                milliseconds(way["seconds_first_call"]),
                milliseconds(way["seconds_capture_first_call"]),
                milliseconds(way["seconds_later"]),
                number(ratio(way["seconds_first_call"], way["seconds_later"]), 2, "x"),
                number(way["host_reads_per_round"]),
                number(way["launches_per_round"], 0),
            ]
            for name, way in summary["ways"].items()
        ),
    ]
