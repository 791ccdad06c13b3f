"""Are passes captured on this device, is what they say right, and what do they save? python tests/gpu/check.py OUT.json [--device cpu]

The embedded pair, greedy and sampled, alone and in batches: ids beside plain `generate`, graphs made, host reads and launches of a
round, tokens a second with graphs and without, side by side. On CUDA also what graphs rest on: fresh random numbers at each replay, by
the seed that is set meanwhile; a capture that fails and leaves all in order; and which kernels take the time. Exit code 1 if ids differ
by more than rounding explains, if a model was not captured on a device that has graphs, if a round is read more than once, or if anything
raises; OUT.json has what was found until then, with the problems.
"""

import argparse
import contextlib
import functools
import json
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

import specplug
from specplug import fixed, launches
from specplug.data import load_rows
from specplug.graphs import CudaGraph
from specplug.measure import compare
from specplug.models import load_target
from specplug.recipes.evaluate import encode
from specplug.schedule import FixedSchedule

ROUNDS_READ = 1  # host reads of a round


def together(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One batch, padded on the left."""
    width = max(each.shape[1] for each in prompts)
    pad = torch.nn.functional.pad
    ids = [pad(each, (width - each.shape[1], 0)) for each in prompts]
    masks = [pad(torch.ones_like(each), (width - each.shape[1], 0)) for each in prompts]
    return {"input_ids": torch.cat(ids), "attention_mask": torch.cat(masks)}


def graphs_of(model) -> int:
    return sum(program.graph is not None for kept in fixed._IDLE.get(model, []) for program in kept.programs.values())


def of_random_numbers(device: torch.device) -> None:
    """A graph draws other numbers each time, and the same ones from the same seed."""
    drawn = torch.zeros(64, device=device)
    graph = CudaGraph(lambda: drawn.copy_(torch.rand(64, dtype=torch.float64, device=device)), device, {})

    def after(seed: int | None) -> list[float]:
        if seed is not None:
            torch.manual_seed(seed)
        graph()
        return drawn.tolist()

    first, second, again = after(1), after(None), after(1)
    assert first != second and first == again and first != after(2), "the random numbers of a graph"


def of_a_failed_capture(device: torch.device) -> None:
    """What raises in a capture is raised, and the next things work: drawing, capturing, replaying, in and out of inference mode."""
    kept, shared = torch.zeros(4, device=device), {}
    adds = CudaGraph(lambda: kept.add_(1), device, shared)
    try:
        CudaGraph(lambda: (kept + torch.rand(4, device=device)).sum().item(), device, shared)
    except RuntimeError as error:
        print(f"as it should, this capture failed: {error}", file=sys.stderr)
    else:
        raise AssertionError("a host read was captured")
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device), "the stream was not put back"
    torch.rand(4, device=device)
    with torch.inference_mode():
        draws = CudaGraph(lambda: kept.add_(torch.rand(4, device=device)), device, shared)
        draws()
    draws()
    adds()
    # The first was run twice before its capture and once behind it, and so was, and once more, what adds random numbers below 1.
    assert torch.isfinite(kept).all() and kept.min() >= 3 and kept.max() < 7, kept


def of_a_graph_that_outlives_another(device: torch.device) -> None:
    """A graph computes what it did when another one on its stream has gone, and writes nowhere else."""
    weights, inputs = (torch.randn(rows, 4096, device=device, dtype=torch.bfloat16) for rows in (4096, 4))
    made = torch.zeros(4, 4096, device=device, dtype=torch.bfloat16)
    first, second = (CudaGraph(lambda: made.copy_(inputs @ weights), device, {}) for _ in range(2))
    second()
    expected = made.clone()
    first.graph.reset()
    del first
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = torch.zeros(1 << 28, device=device, dtype=torch.uint8)
    made.zero_()
    second()
    assert torch.equal(made, expected) and not others.any(), "the memory of a graph"


def of_seeds(model, config, batch: dict, call: dict) -> None:
    """Where transformers' own draws are followed, sampled ids are those of plain decoding from the same seed."""

    def sampled() -> list[int]:
        torch.manual_seed(3)
        return model.generate(**batch, **call).tolist()

    plain = sampled()
    for rule, engine in (("walk", "rounds"), ("block", "lookahead")):
        with specplug.attach(model, config=config, schedule=FixedSchedule(4), verify=rule, engine=engine):
            assert sampled() == plain, f"verify={rule}, engine={engine}"


def kernels_of(call) -> dict[str, float]:
    """Milliseconds of the device by kernel, of those that take most: which attention was chosen is among their names."""
    spent: Counter = Counter()
    with torch.autograd.profiler.profile(use_device="cuda") as profiler:
        call()
    for each in profiler.kineto_results.events():
        if each.device_type() == torch.autograd.DeviceType.CUDA:
            spent[each.name()[:160]] += each.duration_ns() / 1e6
    return dict(spent.most_common(12))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], choices=range(1, 9), metavar="1 to 8")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    found: dict = {"torch": torch.__version__, "dtype": given.dtype, "ways": [], "ties": [], "problems": []}
    try:
        look(given, found)
    except Exception as error:
        traceback.print_exc()
        found["problems"].append(f"{type(error).__name__}: {error}")
    finally:
        given.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))
    return bool(found["problems"])


@contextlib.contextmanager
def noted(found: dict, what: str):
    """What raises within is a problem, and the other checks go on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        found["problems"].append(f"{what}: {type(error).__name__}: {error}")


def look(given: argparse.Namespace, found: dict) -> None:
    on_cuda = given.device.startswith("cuda")
    synchronize = torch.cuda.synchronize if on_cuda else lambda: None
    found["device"] = torch.cuda.get_device_name() if on_cuda else "cpu"
    config = specplug.load(
        *(f"{role}.{key}={value}" for role in ("target", "draft") for key, value in (("device", given.device), ("dtype", given.dtype)))
    )  # fmt: skip
    model, tokenizer = load_target(config.target)
    there = torch.cuda.is_available()  # not only in name
    for check in (
        (of_random_numbers, of_a_failed_capture, of_a_graph_that_outlives_another) if there and on_cuda else ()
    ):
        with noted(found, check.__doc__.splitlines()[0]):
            check(model.device)
    prompts = [encode(tokenizer, row, config, model) for row in load_rows(config.dataset, 8)]
    model.generation_config.eos_token_id = None
    call = dict(do_sample=False, max_new_tokens=given.tokens, pad_token_id=0)
    if given.dtype == "fp32":  # in bf16 rounding parts draws by the same numbers
        with noted(found, "ids of one seed"):
            of_seeds(
                model,
                config,
                together(prompts[:1]),
                call | {"do_sample": True, "max_new_tokens": min(given.tokens, 32)},
            )
    for rows in given.rows:
        batch = together(prompts[:rows])
        plain = model.generate(**batch, **call)
        ways = {"plain": None} | {
            f"gamma {gamma}, graph={graph}": (gamma, graph) for gamma in (0, 4) for graph in ("capture", "off")
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(given.repeats + 1):  # the first one captures
            for name, way in ways.items():
                plugin = None
                if way is not None:
                    plugin = specplug.attach(
                        model, config=config, schedule=FixedSchedule(way[0]), graph=way[1], engine="rounds"
                    )
                synchronize()
                started = time.perf_counter()
                ids = model.generate(**batch, **call)
                synchronize()
                seconds[name].append(time.perf_counter() - started)
                if plugin is not None:
                    plugin.detach(release=False)  # else each call would capture anew
                width = batch["input_ids"].shape[1]
                for row, prompt in enumerate(prompts[:rows]):
                    verdict = compare(model, prompt, plain[row, width:].tolist(), ids[row, width:].tolist())
                    if verdict.kind != "identical":
                        to = found["ties" if verdict.kind == "tie" else "problems"]
                        to.append(f"{rows} rows, {name}: ids of row {row} differ from plain decoding: {verdict}")
        for name, way in ways.items():
            entry = {
                "rows": rows,
                "way": name,
                "tokens_per_second": rows * given.tokens / sorted(seconds[name][1:])[given.repeats // 2],
                "seconds_first": seconds[name][0],
            }
            found["ways"].append(entry)
            if way is not None:
                with noted(found, f"{rows} rows, {name}, counts"):
                    count(given, found, entry, model, config, batch, call, way, there and on_cuda)
    found["graphs"] = graphs_of(model)
    if model.device.type in fixed.GRAPHS and not found["graphs"]:
        found["problems"].append(f"no pass was captured: {fixed.why_not(model, 'capture')}")
    if on_cuda:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()


def count(given, found, entry, model, config, batch, call, way, with_kernels) -> None:
    """Host reads, launches and kernels of calls that are not timed."""
    for do_sample in (False, True):
        schedule = FixedSchedule(way[0])
        plugin = specplug.attach(model, config=config, schedule=schedule, graph=way[1], engine="rounds")
        short = {"do_sample": do_sample, "max_new_tokens": min(given.tokens, 32)}
        generate = functools.partial(model.generate, **batch, **call | short)
        try:
            for _ in range(2):
                generate()
            counts = launches.count(generate, schedule, model.device.type)
            if with_kernels and not do_sample:
                entry["milliseconds_of_kernels"] = kernels_of(generate)
        finally:
            plugin.detach(release=False)
        if counts is None:
            continue
        entry["sampled" if do_sample else "greedy"] = counts._asdict()
        if (
            way[1] == "capture"
            and given.device.startswith("cuda")
            and counts.host_reads > ROUNDS_READ * counts.num_rounds
        ):
            found["problems"].append(
                f"{entry['rows']} rows, {entry['way']}: {counts.host_reads} host reads in {counts.num_rounds} rounds"
            )


if __name__ == "__main__":
    sys.exit(main())
