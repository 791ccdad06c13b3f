"""Evaluations in which something fails, is killed, is long, is repeated, or is decoded in batches."""

import json
import os
import random
import signal
import time
import tracemalloc
from pathlib import Path

import pytest
import torch

import specplug
from specplug import measure
from specplug.cli import run_recipe
from specplug.config import ConfigError
from specplug.data import until_end
from specplug.rates import by_length
from specplug.runs import each_sample

QUICK = (
    "recipe.bootstrap=50",
    "recipe.warmup=0",
    "recipe.trace=0",
    "recipe.compare_assisted=false",
    "schedule=fixed",
    "sampling.max_new_tokens=16",
    "threads=1",
)


pytestmark = pytest.mark.usefixtures("quick_reports")


def run(capsys, folder, *overrides):
    code = run_recipe(specplug.load(*QUICK, *overrides), folder)
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def done(folder: Path) -> dict:
    """By id, what does not depend on the clock."""
    found = {}
    for sample in each_sample(folder / "samples.jsonl"):
        if "error" not in sample:
            ours = sample["speculative"]
            found[sample["id"]] = (sample["plain"]["token_ids"], ours["token_ids"], sample["score"], sample["seed"])
    return found


@pytest.fixture
def failing(monkeypatch):
    """Prompts of one category fail, each in its own way, for as long as `failing` holds something."""
    samples, ways = measure.Sides.samples, {"qa": torch.OutOfMemoryError("CUDA out of memory\nand more lines")}

    def fail(self, rows, prompts, seed):
        for row in rows:
            if row.category in ways:
                raise ways[row.category]
        return samples(self, rows, prompts, seed)

    monkeypatch.setattr(measure.Sides, "samples", fail)
    return ways


def test_failed_prompts_are_written_down_and_tried_again(tmp_path, capsys, failing):
    folder = tmp_path / "run"
    failing["rewrite"] = ValueError("a tensor\nof nothing")
    code, summary = run(capsys, folder, "recipe.limit=4")
    assert code == 0 and summary["num_samples"] == 2
    reasons = {each["id"]: each["reason"] for each in summary["errors"]}
    assert reasons == {"qa-0": "OutOfMemoryError: CUDA out of memory", "rewrite-0": "ValueError: a tensor"}
    for name in ("report.md", "report.html"):
        page = (folder / name).read_text()
        assert "2 of 4 prompts" in page and "CUDA out of memory" in page
    failing.clear()
    code, summary = run(capsys, folder, "recipe.limit=4", f"resume={folder}")
    assert code == 0 and summary["num_samples"] == 4 and summary["errors"] == []


def test_a_run_in_which_all_fail_ends_with_exit_code_1(tmp_path, capsys, failing):
    code, summary = run(capsys, tmp_path, "dataset.categories=[qa]", "recipe.limit=2")
    assert "output: none" in (tmp_path / "report.md").read_text()
    assert code == 1 and summary["num_samples"] == 0 and len(summary["errors"]) == 2 and summary["speedup"] is None


def test_a_failed_prompt_can_end_the_run(tmp_path, failing):
    with pytest.raises(
        ConfigError, match=r"^qa-0: OutOfMemoryError: CUDA out of memory; recipe\.on_error=record"
    ) as caught:
        run_recipe(specplug.load(*QUICK, "recipe.limit=4", "recipe.on_error=stop"), tmp_path)
    assert "\n" not in str(caught.value) and list(done(tmp_path)) == ["story-0"]


def test_a_prompt_that_is_too_long_is_left_out(tmp_path, capsys):
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("word " * 600, "Who is Mia?")))
    code, summary = run(capsys, tmp_path / "run", "dataset=jsonl", f"dataset.path={file}")
    assert code == 0 and summary["num_samples"] == 1 and "context of 512" in summary["errors"][0]["reason"]


def test_killed_at_random_moments_and_resumed(tmp_path, capsys):
    """What is there in the end is what a run that was left alone makes."""
    overrides = ("recipe.limit=4", "dataset.categories=[qa,arithmetic]")
    run(capsys, tmp_path / "whole", *overrides)
    folder, rng, kills = tmp_path / "run", random.Random(0), 0
    samples = folder / "samples.jsonl"
    while kills < 2:
        resume = [f"resume={folder}"] if (folder / "config.json").exists() else []
        size = samples.stat().st_size if samples.exists() else 0
        child = os.fork()
        if child == 0:  # with the libraries loaded already
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                run_recipe(specplug.load(*QUICK, *overrides, *resume), folder)
            finally:
                os._exit(0)
        begun = time.monotonic()
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if (samples.exists() and samples.stat().st_size > size) or time.monotonic() - begun > 60:
                time.sleep(rng.uniform(0, 0.15))
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.005)
        kills += 1
    code, summary = run(capsys, folder, *overrides, f"resume={folder}")
    assert code == 0 and summary["num_samples"] == 4
    assert done(folder) == done(tmp_path / "whole")


def test_a_long_run_keeps_neither_rows_nor_samples(tmp_path, capsys, monkeypatch):
    """15 MB of prompts, and as much of answers, go through; at most a tenth of that is held at a time."""
    count, length = 300, 50_000
    file = tmp_path / "d.jsonl"
    with file.open("w") as lines:
        for k in range(count):
            lines.write(json.dumps({"prompt": f"{k}" + " a" * (length // 2), "answer": "x"}) + "\n")
    once = {}
    samples = measure.Sides.samples

    def quick(self, rows, prompts, seed):
        if not once:
            once.update(samples(self, rows, prompts, seed)[0])
        record = json.loads(json.dumps(once)) | {"id": rows[0].id, "seed": seed}
        record["plain"]["text"] = rows[0].prompt
        return [record]

    from specplug.recipes import evaluate

    short = torch.tensor([[5, 6, 7]])
    monkeypatch.setattr(evaluate, "encode", lambda *args, **kwargs: short)
    monkeypatch.setattr(measure.Sides, "samples", quick)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    data = ("dataset=jsonl", f"dataset.path={file}", "dataset.reference_column=answer", "dataset.metric=f1")
    run(capsys, tmp_path / "warm", *data, "recipe.limit=2")  # what libraries keep is not the run's
    tracemalloc.start()
    config = specplug.load(*QUICK, *data)
    monkeypatch.setattr(evaluate, "write_reports", lambda folder: {"errors": [], "mismatches": []})
    monkeypatch.setattr(evaluate, "show", lambda summary: None)
    try:
        assert run_recipe(config, tmp_path / "run") == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "run" / "samples.jsonl").stat().st_size > count * length
    assert peak < 2 * count * length / 10, f"{peak / 1e6:.1f} MB"


def test_repeats(tmp_path, capsys, monkeypatch):
    code, summary = run(capsys, tmp_path / "a", "recipe.limit=1", "recipe.repeats=3")
    assert code == 0 and summary["exactness"]["identical"] == 1
    for sample in each_sample(tmp_path / "a" / "samples.jsonl"):
        for side in ("plain", "speculative"):
            assert sample[side]["seconds"] == sorted(sample[side]["seconds_of_repeats"])[1]
    assert "Each was run 3 times" in (tmp_path / "a" / "report.md").read_text()
    # A side that says something else the second time is no exact one, whichever of its times is the median.
    generate, calls = measure.timed_generate, []

    def unstable(*args, **kwargs):
        timed = generate(*args, **kwargs)
        calls.append(timed)
        if len(calls) % 6 == 4:  # of plain, assisted, ours: ours in the second of three
            timed.ids[3:4] = [timed.ids[3] + 1]
        return timed

    monkeypatch.setattr(measure, "timed_generate", unstable)
    code, summary = run(capsys, tmp_path / "b", "recipe.limit=1", "recipe.repeats=3")
    assert code == 1 and summary["mismatches"] == ["story-0"]


def test_batches_count_tokens_and_judge_by_row(tmp_path, capsys):
    batch = ("recipe.limit=3", "sampling.max_new_tokens=60", "dataset.categories=[qa,arithmetic]")
    run(capsys, tmp_path / "one", *batch)
    code, summary = run(capsys, tmp_path / "two", *batch, "recipe.batch_size=2")
    assert code == 0 and summary["exactness"]["identical"] + summary["exactness"]["tie"] == 3
    alone, together = done(tmp_path / "one"), done(tmp_path / "two")
    assert {name: ids[0] for name, ids in alone.items()} == {name: ids[0] for name, ids in together.items()}
    assert len({len(ids[0]) for ids in together.values()}) > 1, "no row ended before its batch did"
    assert summary["num_new_tokens"] == sum(len(ids[1]) for ids in together.values())
    assert summary["environment"]["batch_size"] == 2 and summary["speedup_decode"] is None
    assert "batch 2" in (tmp_path / "two" / "report.md").read_text()
    shares = [sample["plain"]["seconds"] for sample in each_sample(tmp_path / "two" / "samples.jsonl")]
    assert shares[0] == shares[1] != shares[2]


def test_later_turns_are_not_in_the_batch_of_those_they_follow(tmp_path, capsys, monkeypatch):
    file = tmp_path / "d.jsonl"
    turns = [["Who is Mia?", "And Ben?"], ["Where?"], ["A kite?"]]
    file.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in turns))
    groups, samples = [], measure.Sides.samples

    def noted(self, rows, prompts, seed):
        groups.append(([row.id for row in rows], seed))
        return samples(self, rows, prompts, seed)

    monkeypatch.setattr(measure.Sides, "samples", noted)
    run(capsys, tmp_path / "run", "dataset=jsonl", f"dataset.path={file}", "recipe.batch_size=3")
    assert groups == [(["0"], 0), (["0.2", "1", "2"], 1)]


def test_the_end_of_a_row():
    assert until_end([5, 6, 2, 0, 0], [2]) == [5, 6, 2] and until_end([5, 2, 2], [2, None]) == [5, 2]
    assert until_end([5, 6], [None]) == [5, 6]


def test_figures_by_length():
    from test_report import sample

    samples = [sample("1") | {"prompt_tokens": n} for n in (1, 2, 3, 4, 5, 8, 9, 16, 17)]
    found = by_length(samples)
    assert [(each["from"], each["to"], each["num_samples"]) for each in found["prompt_tokens"]] == [
        (1, 2, 2),
        (3, 4, 2),
        (5, 8, 2),
        (9, 16, 2),
        (17, 32, 1),
    ]
    assert [(each["to"], each["speedup"]) for each in found["new_tokens"]] == [(16, 2.0)]
    assert by_length([]) == {"prompt_tokens": [], "new_tokens": []}


@pytest.mark.parametrize("override", ["recipe.repeats=0", "recipe.batch_size=0"])
def test_counts_that_cannot_be(override):
    with pytest.raises(ConfigError, match="must be 1 or more"):
        specplug.load(override)
