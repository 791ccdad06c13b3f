"""Several run folders of evaluations beside each other: may they be compared, what differs, and the figures of each."""

from collections import Counter
from pathlib import Path
from typing import Any

from specplug.config import ConfigError
from specplug.runs import MAY_DIFFER, flatten
from specplug.stats import number
from specplug.summary import RunFiles, read_run

Runs = dict[str, RunFiles]  # by label

# What has to be equal for a speed-up of one run to stand beside that of another.
TARGET = ("name_or_path", "gguf_file", "revision", "dtype", "quantization", "attn_implementation")
MACHINE = ("device", "dtype", "threads")


def read_runs(folders: list[str], bootstrap: int) -> Runs:
    """Raises ConfigError, one line a folder, for those that hold no evaluation."""
    runs, problems = {}, []
    for label, folder in zip(labels(folders), folders, strict=True):
        try:
            run = read_run(Path(folder), bootstrap)
            if run.config["recipe"]["name"] != "evaluate":
                problems.append(
                    f"recipe.runs: {folder} is a run of recipe={run.config['recipe']['name']}; name evaluations"
                )
            elif not run.samples:
                problems.append(f"recipe.runs: {folder} has no sample yet; go on with it: specplug resume={folder}")
            runs[label] = run
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"recipe.runs: {folder} holds no evaluation ({_why(error)})")
    if problems:
        raise ConfigError("\n".join(problems))
    return runs


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"no readable {Path(error.filename).name}" if error.filename else str(error)
    return f"its files are not those of a run: {type(error).__name__}"


def labels(folders: list[str]) -> list[str]:
    """The last parts of each path, as many as tell it from the others; numbered if the same folder is named twice."""
    parts = [Path(folder).parts or (folder,) for folder in folders]
    found = ["/".join(each) for each in parts]
    for length in range(1, max(map(len, parts)) + 1):
        short = ["/".join(each[-length:]) for each in parts]
        if len(set(short)) == len(set(found)):
            found = short
            break
    seen: Counter[str] = Counter()
    for k, each in enumerate(found):
        seen[each] += 1
        found[k] = each if seen[each] == 1 else f"{each} ({seen[each]})"
    return found


def why_not_comparable(runs: Runs) -> list[str]:
    """What keeps these runs from being compared, in a few words each; empty if nothing does."""
    given: dict[str, list[Any]] = {
        "targets": [{key: run.config["target"].get(key) for key in TARGET} for run in runs.values()],
        "data sets": [run.config["dataset"] for run in runs.values()],
        "samplings": [run.config["sampling"] for run in runs.values()],
        "machines": [{key: run.summary["environment"].get(key) for key in MACHINE} for run in runs.values()],
    }
    reasons = []
    for what, values in given.items():
        flat = [flatten(value) for value in values]
        keys = sorted({key for each in flat for key in each if any(other.get(key) != each[key] for other in flat)})
        if keys:
            told = [", ".join(f"{key} {each.get(key)}" for key in keys) for each in flat]
            reasons.append(
                f"{what} differ ({'; '.join(f'{name}: {each}' for name, each in zip(runs, told, strict=True))})"
            )
    prompts = [{sample["id"] for sample in run.samples} for run in runs.values()]
    if any(each != prompts[0] for each in prompts):
        counts = ", ".join(str(len(each)) for each in prompts)
        reasons.append(f"prompts differ ({counts}; {len(set.intersection(*prompts))} in common)")
    return reasons


def differences(runs: Runs) -> dict[str, list[Any]]:
    """Settings that are not the same in all runs: key -> value in each."""
    flat = [flatten(run.config) for run in runs.values()]
    keys = sorted({key for each in flat for key in each} - MAY_DIFFER)
    return {
        key: [each.get(key) for each in flat]
        for key in keys
        if any(each.get(key) != flat[0].get(key) for each in flat[1:])
    }


def rows(runs: Runs) -> list[list[str]]:
    """A line a run; the header first."""
    table = [
        ["run", "n", "plain tok/s", "ours tok/s", "speed-up", "decoding alone", "vs assisted", "alpha",
         "tokens / pass", "drafts / round", "identical", "score plain / ours"]
    ]  # fmt: skip
    for label, run in runs.items():
        s = run.summary
        interval = s["speedup_interval"]
        speeds = [number(s["tokens_per_second"][side], 0) for side in ("plain", "speculative")]
        exactness = s["exactness"]
        table.append(
            [
                label,
                str(s["num_samples"]),
                *speeds,
                number(s["speedup"], 2, "x")
                + ("" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"),
                number(s["speedup_decode"], 2, "x"),
                number(s["speedup_vs_assisted"], 2, "x"),
                number(s["alpha"], 3),
                number(s["mean_acceptance_length"]),
                number(s["mean_gamma"], 1),
                "-" if exactness["not_compared"] else f"{exactness['identical']} of {s['num_samples']}",
                "/".join(number(s["task_score"][side]) for side in ("baseline", "speculative")),
            ]
        )
    return table


def category_rows(runs: Runs) -> list[list[str]]:
    """Speed-up by category, a column a run."""
    names = dict.fromkeys(name for run in runs.values() for name in run.summary["categories"])
    table = [["category", *runs]]
    for name in names:
        parts = [run.summary["categories"].get(name) for run in runs.values()]
        table.append([name, *("-" if part is None else number(part["speedup"], 2, "x") for part in parts)])
    return table


def difference_rows(runs: Runs) -> list[list[str]]:
    return [
        ["setting", *runs],
        *([key, *("null" if v is None else str(v) for v in values)] for key, values in differences(runs).items()),
    ]


def warning(reasons: list[str]) -> str:
    """One line; empty if there is nothing to warn of."""
    return f"these runs are not comparable: {', and '.join(reasons)}" if reasons else ""
