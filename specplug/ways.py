"""The ways to decode that a benchmark compares, and one call of each: what it made, how long it took, what it asked of the device.

Knows nothing about files.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specplug import bench, growth_bench, verify
from specplug.cache import get_cache
from specplug.config import Adaptive, Bench, Config, Fixed, choice, first_line
from specplug.launches import Counts, count
from specplug.measure import Sides, synchronize, timed_batch
from specplug.models import context_length
from specplug.plugin import models_of
from specplug.schedule import AdaptiveSchedule, FixedSchedule, Schedule

log = logging.getLogger(__name__)

COPIED = 1 << 28  # bytes; more than any cache holds
COUNTED_TOKENS = 48  # of the call whose host reads and launches are counted; all rounds are much the same
NEVER = 1 << 30  # passes before one is recorded


class Way(NamedTuple):
    """One way to decode: called with prompts and a seed, it gives what one call on them made, ready for JSON."""

    sides: Sides
    schedule: Schedule | None  # of ours; None is transformers'
    more: dict[str, Any]

    def __call__(self, prompts: list[Tensor], seed: int) -> dict[str, Any]:
        return call(self.sides, prompts, seed, self.schedule, self.more)

    def counted(self, prompts: list[Tensor]) -> Counts | None:
        """Host reads and launches of ours, in a call that is not timed, by the recordings that are there."""
        sides, plugin = self.sides, self.sides.plugin
        if self.schedule is None:
            return None
        arguments = sides.arguments | {"max_new_tokens": min(sides.arguments["max_new_tokens"], COUNTED_TOKENS)}
        plugin.schedule, plugin.record_after, plugin.synchronize = self.schedule, NEVER, False
        plugin.attach(sides.model)
        try:
            decode = functools.partial(timed_batch, sides.model, prompts, sides.pad, 0, **arguments)
            return count(decode, self.schedule, sides.model.device.type)
        finally:
            plugin.detach(release=False)
            plugin.record_after, plugin.synchronize = None, True


def ways_of(config: Config, sides: Sides) -> dict[str, Way]:
    """Each way by its name; every one with a plugin of its own counts, over the same drafter."""
    recipe = config.recipe
    assert isinstance(recipe, Bench)
    plugin, model = sides.plugin, sides.model
    ways = {bench.PLAIN: Way(sides, None, {})}
    # With a synthetic alpha theirs would accept what random weights agree on.
    if sides.assisted is not None and recipe.synthetic_alpha is None:
        ways[bench.ASSISTED] = Way(sides, None, sides.assisted)
    if model.device.type == "cuda" and recipe.batch_size == 1:  # generate compiles where it finds one
        ways[bench.STATIC] = Way(sides, None, {"cache_implementation": "static"})
    for gamma in sorted({0, *gammas_of(config)}):
        ways[f"gamma {gamma}"] = Way(sides, FixedSchedule(gamma), {})
    if isinstance(config.schedule, Adaptive):
        return ways | {bench.ADAPTIVE: Way(sides, plugin.schedule, {})}
    ways[bench.ADAPTIVE] = Way(sides, AdaptiveSchedule(), {})
    if not isinstance(config.schedule, Fixed):  # which is one of the gammas
        ways[choice(config.schedule)] = Way(sides, plugin.schedule, {})
    return ways


def gammas_of(config: Config) -> list[int]:
    """Of the ways that draft a fixed number: those of the recipe, and that of the schedule."""
    assert isinstance(config.recipe, Bench)
    return sorted({*config.recipe.gammas, *([config.schedule.gamma] if isinstance(config.schedule, Fixed) else [])})


def call(
    sides: Sides, prompts: list[Tensor], seed: int, schedule: Schedule | None, more: dict[str, Any]
) -> dict[str, Any]:
    """One call. `schedule`: of ours; None for transformers'."""
    model, plugin = sides.model, sides.plugin
    if schedule is not None:
        plugin.schedule = schedule
        plugin.attach(model)
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    try:
        made = sides.timed(prompts, seed, **more)
    finally:
        plugin.detach(release=False)
    synchronize(model)
    return {
        "new_tokens": sum(len(each.ids) for each in made),
        "seconds": sum(each.seconds for each in made),
        "seconds_first": made[0].seconds_first,
        "stats": plugin.last.to_dict() if schedule is not None and plugin.last is not None else None,
        "peak_bytes": torch.cuda.max_memory_allocated(model.device) if model.device.type == "cuda" else None,
        "ids": [each.ids for each in made],
    }


def first_call(ways: dict[str, Way], name: str, prompts: list[Tensor]) -> dict[str, Any] | None:
    """What it made. A way of transformers' own that fails, as its static cache does where nothing can be compiled, is said and left
    out: None. Not so plain decoding, beside which all others stand."""
    try:
        return ways[name](prompts, 0)
    except Exception as error:
        if ways[name].schedule is not None or name == bench.PLAIN:
            raise
        log.warning("%s is left out, it fails here: %s", name, first_line(error))
    del ways[name]
    return None


def measured(ways: dict[str, Way], prompts: list[Tensor], seed: int, repeats: int) -> dict[str, Any]:
    """All ways in turn, and again; of each the repeat with the median time, and whether its ids are those of plain decoding."""
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            made[name].append(way(prompts, seed))
    chosen = {name: sorted(each, key=lambda one: one["seconds"])[(repeats - 1) // 2] for name, each in made.items()}
    plain = chosen[bench.PLAIN]["ids"]
    return {
        "prompt_tokens": [ids.shape[1] for ids in prompts],
        "ways": {
            name: {key: value for key, value in each.items() if key != "ids"} | {"same_ids": each["ids"] == plain}
            for name, each in chosen.items()
        },
    }


@contextlib.contextmanager
def synthetic(alpha: float | None) -> Iterator[None]:
    """Within it there is a rule that keeps drafts with a probability that was asked for."""
    if alpha is not None:
        verify.RULES[bench.SYNTHETIC] = functools.partial(bench.verify_synthetic, alpha)
    try:
        yield
    finally:
        verify.RULES.pop(bench.SYNTHETIC, None)


def resized(ids: Tensor, length: int | None) -> Tensor:
    """(1, T) ids cut, or repeated, to so many."""
    if length is None:
        return ids
    return ids.repeat(1, -(-length // ids.shape[1]))[:, -length:]


def memory(model: Any, ids: Tensor) -> tuple[int, float]:
    """Bytes that a pass behind `ids` has to read, and bytes that this device's memory moves in a second."""
    embeddings = model.get_input_embeddings().weight
    tied = embeddings is model.get_output_embeddings().weight
    weights = sum(each.numel() * each.element_size() for each in model.parameters() if tied or each is not embeddings)
    with torch.no_grad():
        cache = get_cache(model(input_ids=ids, use_cache=True))
    held = sum(each.numel() * each.element_size() for layer in cache.layers for each in (layer.keys, layer.values))
    source = torch.ones(COPIED // 4, device=model.device)
    target = torch.empty_like(source)
    # On a GPU, so many that to begin and to wait, which take as long as a few of them, do not count.
    times = 1 if model.device.type == "cpu" else 32
    seconds = []
    for _ in range(6):
        synchronize(model)
        started = time.perf_counter()
        for _ in range(times):
            target.copy_(source)
        synchronize(model)
        seconds.append((time.perf_counter() - started) / times)
    return weights + held, 2 * COPIED / min(seconds)


def at_point(recipe: Bench, sides: Sides, prompts: list[Tensor], axis: str, point: int) -> dict[str, Any] | str:
    """Each side at one point, of its repeats the one with the median time; or why it cannot be measured."""
    plugin, new = sides.plugin, sides.arguments["max_new_tokens"]
    rows = point if axis == "batch" else recipe.batch_size
    batch = [prompts[k % len(prompts)] for k in range(rows)]
    if axis == "context":
        batch = [resized(ids, point) for ids in batch]
    longest = max(ids.shape[1] for ids in batch) + new
    for model in (sides.model, *models_of(plugin.drafter)):
        room = context_length(model)
        if room is not None and longest > room:
            whose = "target" if model is sides.model else "draft"
            return f"prompts with {new} new tokens come to {longest}, and the {whose} has {room} positions"
    made: dict[str, list[dict[str, Any]]] = {}
    gammas = growth_bench.gammas_at(recipe, axis, point)
    try:
        ways = {side: Way(sides, FixedSchedule(gamma), {}) for side, gamma in gammas.items()}
        plugin.record_after = 0
        for way in ways.values():
            way(batch, 0)
        plugin.record_after = None
        for _ in range(recipe.repeats):
            for side, way in ways.items():
                made.setdefault(side, []).append(way(batch, 0))
    except torch.OutOfMemoryError:
        return "it does not fit into the memory of the device"
    finally:
        plugin.record_after = None
    chosen = {
        side: sorted(each, key=lambda one: one["seconds"])[(recipe.repeats - 1) // 2] for side, each in made.items()
    }
    return {
        "prompt_tokens": [ids.shape[1] for ids in batch],
        "kv_bytes": kv_bytes(sides.model, rows, longest - 1),
        "sides": {
            side: {key: value for key, value in each.items() if key != "ids"} | {"gamma": gammas[side]}
            for side, each in chosen.items()
        },
    }


def kv_bytes(model: Any, rows: int, length: int) -> int:
    """Of the target's keys and values for so many sequences of so many tokens."""
    with torch.no_grad():
        cache = get_cache(model(input_ids=torch.zeros((1, 2), dtype=torch.long, device=model.device), use_cache=True))
    total = 0
    for layer in cache.layers:
        window = getattr(layer, "sliding_window", None)
        kept = length if window is None else min(length, window - 1)
        total += rows * kept * (layer.keys[:, :, 0].nbytes + layer.values[:, :, 0].nbytes)
    return total
