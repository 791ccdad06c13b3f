"""Are passes captured on this device, is what they say right, and what do they save? python tests/gpu/check.py OUT.json [--device cpu]

The embedded pair in fp32, greedy and sampled, alone and in batches: ids beside plain `generate`, graphs made, host reads and
launches of a round, tokens a second with graphs and without, side by side. Exit code 1 if ids differ, if a model was not captured
on a device that has graphs, or if a round is read more than once.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import specplug
from specplug import fixed, launches
from specplug.data import load_rows
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], choices=range(1, 9), metavar="1 to 8")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    on_cuda = given.device.startswith("cuda")
    synchronize = torch.cuda.synchronize if on_cuda else lambda: None
    config = specplug.load(f"target.device={given.device}", f"draft.device={given.device}", "target.dtype=fp32")
    model, tokenizer = load_target(config.target)
    prompts = [encode(tokenizer, row, config, model) for row in load_rows(config.dataset, 8)]
    batches = {rows: together(prompts[:rows]) for rows in given.rows}
    model.generation_config.eos_token_id = None
    found: dict = {
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "torch": torch.__version__,
        "ways": [],
        "problems": [],
    }
    call = dict(do_sample=False, max_new_tokens=given.tokens, pad_token_id=0)
    for rows, batch in batches.items():
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
                if not torch.equal(ids, plain):
                    found["problems"].append(f"{rows} rows, {name}: ids differ from plain decoding")
        for name, way in ways.items():
            entry = {
                "rows": rows,
                "way": name,
                "tokens_per_second": rows * given.tokens / sorted(seconds[name][1:])[given.repeats // 2],
                "seconds_first": seconds[name][0],
            }
            if way is not None:
                for do_sample in (False, True):
                    schedule = FixedSchedule(way[0])
                    plugin = specplug.attach(model, config=config, schedule=schedule, graph=way[1], engine="rounds")
                    sampling = call | {"do_sample": do_sample, "max_new_tokens": min(given.tokens, 32)}
                    for _ in range(2):
                        model.generate(**batch, **sampling)
                    counts = launches.count(
                        lambda: model.generate(**batch, **sampling),  # noqa: B023
                        schedule,
                        model.device.type,
                    )
                    plugin.detach(release=False)
                    if counts is None:
                        continue
                    entry["sampled" if do_sample else "greedy"] = counts._asdict()
                    if way[1] == "capture" and on_cuda and counts.host_reads > ROUNDS_READ * counts.num_rounds:
                        found["problems"].append(
                            f"{rows} rows, {name}: {counts.host_reads} host reads in {counts.num_rounds} rounds"
                        )
            found["ways"].append(entry)
    found["graphs"] = graphs_of(model)
    if model.device.type in fixed.GRAPHS and not found["graphs"]:
        found["problems"].append(f"no pass was captured: {fixed.why_not(model, 'capture')}")
    if on_cuda:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    given.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))
    return bool(found["problems"])


if __name__ == "__main__":
    sys.exit(main())
