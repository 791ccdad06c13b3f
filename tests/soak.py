"""Thousands of calls of `generate` in one process, and whether anything grows: python tests/soak.py

Calls of random lengths and batch sizes, greedy and sampled, over the drafters, engines, schedules, rules and kernels, recorded or not, in
the three forms, by plugins that stay and by plugins that come and go, some interrupted in the middle, some from two threads at
once. Between them everything is detached and what is alive is counted. Prints one line of JSON; exit code 1 if anything grew after
the first fifth, or if a call raised what it should not.
"""

import argparse
import ctypes
import gc
import json
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from conftest import PAD, make_model, noisy_copy
from torch import nn

import specplug
from specplug import capture, fixed, hook, packed, tree_pass, verify
from specplug import kernel as kernels
from specplug.drafters.early_exit import EarlyExitDrafter
from specplug.drafters.suffix import SuffixDrafter
from specplug.models import load_model
from specplug.schedule import AdaptiveSchedule, ConfidenceSchedule, FixedSchedule, TreeSchedule, without_tree
from specplug.tree import Dynamic

MAX_ROWS = 8  # sequences of a batch
# By how much this may grow after warming up. Memory is handed back in whole pages and arenas; objects are those that torch,
# transformers and recordings keep for what is met for the first time.
TOLERANCES = {"resident_bytes": 64 << 20, "objects": 1000}
# What fills up with what the calls can need: how much there may be for each model or plugin. All else must not grow at all.
BOUNDS = {
    "recordings": ("models", 6),
    "models_recorded": ("models", 1),
    "models_tried_out": ("models", 1),
    "buffers": ("models", fixed.KEPT),
    "programs": ("models", fixed.KEPT * fixed.PROGRAMS),
    "warnings": ("plugins", 6),
    "estimates": ("plugins", MAX_ROWS),
}
OBJECTS_OF_ESTIMATES = 50  # lists and queues of one, when it knows all widths
# What must be as it was before the first call.
AT_REST = (
    "hooks", "classes_changed", "attributes", "attached", "live_calls", "lookaheads", "settings", "layers_inside", "rules", "loops",
)  # fmt: skip
TWO_AT_ONCE = 0.06  # share of the calls that have another one beside them
CHECKS = 10  # of what is alive, evenly over the calls


class Interrupted(Exception):
    """What a call is interrupted by."""


class Countdown:
    def __init__(self, n: int) -> None:
        self.left = n

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Interrupted


class Streamer(Countdown):
    """Raises at the n-th chunk."""

    def put(self, value: torch.Tensor) -> None:
        self.count()

    def end(self) -> None:
        pass


class Processor(Countdown, transformers.LogitsProcessor):
    """Raises when it is asked for the n-th time."""

    def __call__(self, input_ids, scores):
        self.count()
        return scores


class Criterion(Countdown, transformers.StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.count()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class World:
    """A target, what may draft for it, and plugins that stay."""

    def __init__(self, name: str, target, draft, trees: bool, plugin_class: type) -> None:
        self.name, self.target, self.draft, self.trees, self.plugin_class = name, target, draft, trees, plugin_class
        self.vocab = target.config.vocab_size
        self.early_exit = EarlyExitDrafter(target, 1)
        self.plugins: list = []

    def make(self, r: random.Random, drafter: str):
        draft = {
            "model": self.draft,
            "suffix": SuffixDrafter(warm=r.random() < 0.5, max_runs=50),
            "chain": ["suffix", self.draft],
            "early_exit": self.early_exit,
        }.get(drafter, drafter)
        gamma = r.choice([0, 1, 3, 6])
        schedules = [FixedSchedule(gamma), FixedSchedule(gamma), AdaptiveSchedule(8)]
        if drafter in ("model", "early_exit", "chain"):
            schedules.append(ConfidenceSchedule(4, 0.3, r.choice(["probability", "entropy"])))
        schedule = r.choice(schedules)
        engine = r.choice(["auto", "auto", "auto", "rounds", "lookahead", "plain"])
        if self.trees and engine in ("auto", "rounds") and r.random() < 0.3:
            schedule = r.choice(
                [TreeSchedule([2, 2, 1]), TreeSchedule(Dynamic(6, 3)), AdaptiveSchedule(6, tree_depth=3)]
            )
        settings = {"engine": engine, "verify": r.choice(["token", "block", "walk"])}
        settings |= {"kernel": r.choice(["auto", "auto", "torch"]), "graph": r.choice(["capture", "capture", "off"])}
        plugin = self.plugin_class(draft, schedule=schedule, **settings)
        plugin.record_after = r.choice([None, 2])
        return plugin


DRAFTERS = ("model", "lookup", "suffix", "chain", "early_exit")


WORLDS = ("llama", "mistral", "gpt2", "embedded")


def worlds(r: random.Random, plugin_class: type, names: Sequence[str] = WORLDS) -> list[World]:
    """Layers large enough for the kernel, a sliding window, another architecture, and the embedded pair."""
    made = []
    for name in names:
        if name == "embedded":
            config = specplug.load("pair=tiny")
            target, draft = load_model(config.target, "target"), load_model(config.draft, "draft")
        else:
            target = build(name, **({"hidden_size": 128, "intermediate_size": 128} if name == "llama" else {}))
            draft = noisy_copy(target)
        made.append(World(name, target, draft, name != "mistral", plugin_class))
    for world in made:
        world.plugins = [world.make(r, drafter) for drafter in DRAFTERS * 2]
    return made


def build(name: str, **shape):
    if not shape:
        return make_model(name)
    config = make_model(name).config.to_dict() | shape
    config.pop("head_dim", None)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()


def arguments(r: random.Random, world: World, form: str) -> dict:
    """Keyword arguments of one `generate` call."""
    rows = 1 if r.random() < 0.6 else r.randint(2, MAX_ROWS)
    lengths = [r.randint(1, 24) for _ in range(rows)]
    ids = torch.full((rows, max(lengths)), PAD)
    for b, length in enumerate(lengths):
        ids[b, max(lengths) - length :] = torch.tensor([r.randrange(3, world.vocab) for _ in range(length)])
    call = {
        "input_ids": ids,
        "attention_mask": (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long(),
    }
    new = r.choice([1, 2, 8, 8, 16, 16, 40])
    call |= {"max_new_tokens": new, "do_sample": r.random() < 0.5, "pad_token_id": PAD}
    if call["do_sample"]:
        call |= r.choice([{}, {"temperature": 0.7}, {"top_k": 8}, {"top_p": 0.9}])
        if form == "attached" and r.random() < 0.2:
            call["specplug"] = {"seed": r.randrange(2**32)}
    call |= r.choice([{}, {}, {}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}])
    if r.random() < 0.15:
        call |= {"return_dict_in_generate": True, "output_scores": "specplug" not in call}
    if r.random() < 0.15:
        call["streamer"] = Streamer(10**6)
    at = r.randint(0, new)  # a call may be over before it is interrupted
    kind = r.choice(["", "", "", "", "", "", "streamer", "criterion", "processor"])
    if kind == "streamer":
        call["streamer"] = Streamer(at)
    elif kind == "criterion":
        call["stopping_criteria"] = transformers.StoppingCriteriaList([Criterion(at)])
    elif kind == "processor":
        call["logits_processor"] = [Processor(at)]
    return call


def outcome(world: World, call: dict) -> str:
    """What became of one call. Whatever is not meant to be raised is raised."""
    try:
        world.target.generate(**call)
    except Interrupted:
        return "interrupted"
    except ValueError as error:
        if not any(each in str(error) for each in ("cannot serve this call", "cannot draft trees in this call")):
            raise
        return "refused"
    return "done"


def one(r: random.Random, world: World, plugin, form: str) -> list[str]:
    """One call, or two at once from two threads."""
    calls = [arguments(r, world, form) for _ in range(2 if r.random() < TWO_AT_ONCE else 1)]
    if form == "attached":
        plugin.attach(world.target)
    for call in calls:
        if form == "custom_generate":
            call["custom_generate"] = plugin
        elif form == "processor":
            call["logits_processor"] = [*call.get("logits_processor", []), plugin]
    try:
        if len(calls) == 1:
            return [outcome(world, calls[0])]
        made: list = []
        threads = [threading.Thread(target=lambda call=call: made.append(caught(world, call))) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in made:
            if isinstance(each, Exception):
                raise each
        return [f"{each}, two at once" for each in made]
    finally:
        plugin.detach()


def caught(world: World, call: dict) -> str | Exception:
    try:
        return outcome(world, call)
    except Exception as error:
        return error


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def alive(made: list[World]) -> dict[str, int]:
    """How much there is of everything, while nothing runs and nothing is attached. Tensors and objects: those that came since."""
    gc.collect()
    trim()
    objects = gc.get_objects()
    kept = [buffers for idle in fixed._IDLE.values() for buffers in idle]  # which have a bound of their own
    of_kept = {each.untyped_storage().data_ptr() for buffers in kept for each in tensors_of(buffers)}
    tensors = [
        each
        for each in objects
        if issubclass(type(each), torch.Tensor) and (each.is_meta or each.untyped_storage().data_ptr() not in of_kept)
    ]
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if not each.is_meta
    }
    models = [model for world in made for model in (world.target, world.draft, world.early_exit.model)]
    modules = [module for model in models for module in model.modules()]
    plugins = [plugin for world in made for plugin in world.plugins]
    everywhere = nn.modules.module
    return {
        "models": len(models),
        "plugins": len(plugins),
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        - sum(each.cache.num_bytes for each in kept),
        "objects": len(objects),
        "tensors": len(tensors),
        "tensor_bytes": sum(storages.values()),
        "hooks": sum(len(getattr(module, name, ())) for module in modules for name in HOOKS)
        + len(everywhere._global_forward_hooks)
        + len(everywhere._global_forward_pre_hooks),
        "classes_changed": sum(type(module).__module__.startswith("specplug") or isinstance(module, hook.SpeculativeMixin) for module in modules),
        "attributes": sum(len(vars(module)) for module in modules),
        "models_recorded": len(capture._KNOWN),
        "recordings": sum(each.replay is not None for _, kept in capture._KNOWN.values() for each in kept.values()),
        "attached": len(hook._ATTACHED),
        "live_calls": len(hook._LIVE_CALLS),
        "lookaheads": len(hook._LOOKAHEADS),
        "speculative_classes": len(hook._CLASSES),
        "settings": hook._SETTINGS.get() is not None,
        "layers_inside": len(kernels._INSIDE) + len(packed._INSIDE),
        "buffers": sum(map(len, fixed._IDLE.values())),
        "programs": sum(len(each.programs) for each in kept),
        "models_tried_out": len(tree_pass._FOUND),
        "rules": len(verify.RULES),
        "loops": sum(len(plugin._loops) for plugin in plugins),
        # By batch size, and that of trees apart from that of chains.
        "estimates": sum(len(each.states) for plugin in plugins for each in estimating(plugin.schedule)),
        "warnings": sum(len(plugin._warned) for plugin in plugins),
        "threads": threading.active_count(),
        "system_threads": len(os.listdir("/proc/self/task")),
        "open_files": len(os.listdir("/proc/self/fd")),
    }  # fmt: skip


def tensors_of(buffers) -> list[torch.Tensor]:
    """What a set of buffers holds, and its programs."""
    places = buffers.cache.places
    held = [*buffers.cache.tensors, places.rows]
    holders = [places, *(program.function for program in buffers.programs.values())]
    return held + [each for holder in holders for each in vars(holder).values() if isinstance(each, torch.Tensor)]


def estimating(schedule) -> list[AdaptiveSchedule]:
    """The adaptive schedules in it."""
    return [each for each in (schedule, without_tree(schedule)) if isinstance(each, AdaptiveSchedule)]


def trim() -> None:
    """Hand freed memory back to the system, where the C library can."""
    hand_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if hand_back is not None:
        hand_back(0)


def large_blocks_apart() -> None:
    """Have glibc map each larger block by itself, so that resident memory is what is held, not the gaps of a heap that caches of many
    sizes came and went in."""
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    if tell is not None:
        tell(-3, 1 << 16)  # M_MMAP_THRESHOLD


def grown(before: dict[str, int], first: dict[str, int], last: dict[str, int]) -> dict[str, list[int]]:
    """What is more than it may be: before the first call, after warming up, at the end."""
    limits = {name: count + TOLERANCES.get(name, 0) for name, count in first.items()}
    limits["objects"] += OBJECTS_OF_ESTIMATES * (last["estimates"] - first["estimates"])
    limits |= {name: first[name] + last[of] * each for name, (of, each) in BOUNDS.items()}
    limits |= {name: before[name] for name in AT_REST}
    return {name: [before[name], first[name], last[name]] for name in first if last[name] > limits[name]}


def run(
    num_calls: int,
    seed: int,
    plugin_class: type = specplug.SpeculativeProcessor,
    names: Sequence[str] = WORLDS,
) -> dict:
    started = time.perf_counter()
    r = random.Random(seed)
    torch.manual_seed(seed)
    made = worlds(r, plugin_class, names)
    gc.collect()
    gc.freeze()  # what is there now stays, and is not looked through again
    try:
        return soaked(num_calls, seed, r, made) | {"seconds": round(time.perf_counter() - started, 1)}
    finally:
        gc.unfreeze()


def soaked(num_calls: int, seed: int, r: random.Random, made: list[World]) -> dict:
    outcomes: Counter[str] = Counter()
    engines: Counter[str] = Counter()
    before = alive(made)
    seen: list[dict[str, int]] = []
    last_warm = num_calls // 5
    every = max((num_calls - last_warm) // CHECKS, 1)
    turns = [(world, plugin) for world in made for plugin in world.plugins]  # each once, before what is left to chance
    for number in range(num_calls):
        if number >= last_warm and (number - last_warm) % every == 0:
            seen.append(alive(made))
        fresh = r.random() < 0.2
        world, plugin = turns[number] if number < min(len(turns), last_warm) else r.choice(turns)
        if fresh:
            plugin = world.make(r, r.choice(DRAFTERS))
        form = r.choice(["attached"] * 4 + ["custom_generate", "processor"])
        if form == "processor" and plugin.engine == "rounds":
            form = "attached"  # which is refused in that form
        outcomes.update(one(r, world, plugin, form))
        if plugin.last is not None:
            engines[plugin.last.engine] += 1
        del plugin
    seen.append(alive(made))
    return {
        "calls": num_calls,
        "seed": seed,
        "outcomes": dict(sorted(outcomes.items())),
        "engines": dict(sorted(engines.items())),
        "resident_mib": [round(each["resident_bytes"] / 2**20, 1) for each in seen],
        "objects": [each["objects"] for each in seen],
        "before": before,
        "after_warm_up": seen[0],
        "at_the_end": seen[-1],
        "grown": grown(before, seen[0], seen[-1]),
    }


def quiet() -> None:
    logging.getLogger("specplug").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="passes have fixed shapes, as on a device with graphs")
    given = parser.parse_args()
    if given.fixed:
        fixed.GRAPHS["cpu"] = lambda program, device, shared: program
    if given.calls < CHECKS:
        parser.error(f"--calls {given.calls}: {CHECKS} or more are needed to see a trend")
    torch.set_num_threads(1)
    large_blocks_apart()
    quiet()
    result = run(given.calls, given.seed)
    print(json.dumps(result))
    return bool(result["grown"])


if __name__ == "__main__":
    sys.exit(main())
