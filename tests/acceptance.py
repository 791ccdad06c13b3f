"""How many tokens a target pass gives, by accept rule, for chains and for trees: a command, and a table on stdout.

python tests/acceptance.py --limit 12 --widths 2 4 8 --temperatures 0 0.7 1.0 -- sampling.max_new_tokens=64
python tests/acceptance.py --limit 6 --widths 8 --rules walk -- pair=lookup draft=suffix target=custom \
    target.name_or_path=MODEL.gguf dataset=spec_bench dataset.path=question.jsonl

Behind `--` stand the overrides of a configuration. Prompts are taken evenly over the data set. A chain of n drafts is compared with
trees of n nodes: dynamic ones no deeper than n and than --depth, static ones of the shapes below. All rules, shapes and
temperatures are given the same seeds. No time is measured.
"""

import argparse

import torch

import specplug
from specplug.data import load_rows
from specplug.pipelines import generate_arguments, pipeline_from
from specplug.recipes.evaluate import encode
from specplug.schedule import FixedSchedule, Schedule, TreeSchedule
from specplug.stats import Stats
from specplug.tree import Dynamic

STATIC = {2: [2], 4: [2, 1], 8: [2, 1, 1, 1], 16: [2, 2, 1, 1]}  # of so many nodes, or nearly


def schedules(width: int, depth: int) -> dict[str, Schedule]:
    """A chain and the trees with as many nodes, or as many as the shape allows."""
    found: dict[str, Schedule] = {f"chain of {width}": FixedSchedule(width)}
    if width in STATIC:
        found[f"static {STATIC[width]}"] = TreeSchedule(STATIC[width])
    found[f"dynamic {width}, depth {min(width, depth)}"] = TreeSchedule(Dynamic(width, min(width, depth)))
    return found


def measure(plugin: specplug.SpeculativeProcessor, model, prompts, arguments, seed: int) -> Stats:
    plugin.reset_stats()
    for number, ids in enumerate(prompts):
        torch.manual_seed(seed + number)
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **arguments)
    return plugin.stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=12, help="prompts")
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--depth", type=int, default=8, help="of dynamic trees, at most")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--rules", nargs="+", default=["token", "block", "walk"], help="when sampling")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    config = specplug.load("engine=rounds", *given.overrides)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    pipe, plugin = pipeline_from(config)
    rows = load_rows(config.dataset, None)
    rows = rows[:: max(len(rows) // given.limit, 1)][: given.limit]
    prompts = [encode(pipe.tokenizer, row, config, pipe.model) for row in rows]
    print(
        "| temperature | rule | drafts | tokens per pass | alpha | nodes a round |\n| --- | --- | --- | --- | --- | --- |"
    )
    for temperature in given.temperatures:
        config.sampling.temperature = temperature
        arguments = generate_arguments(config)
        for width in given.widths:
            for name, schedule in schedules(width, given.depth).items():
                for rule in given.rules if temperature > 0 else ["greedy"]:
                    plugin.schedule, plugin.verify = schedule, "block" if rule == "greedy" else rule
                    stats = measure(plugin, pipe.model, prompts, arguments, config.seed)
                    alpha = float("nan") if stats.alpha is None else stats.alpha
                    print(
                        f"| {temperature} | {rule} | {name} | {stats.mean_acceptance_length:.2f} | {alpha:.3f} "
                        f"| {stats.mean_gamma:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
