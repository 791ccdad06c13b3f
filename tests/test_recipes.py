"""The recipes, run as the command runs them, on the embedded pair."""

import json

import pytest
import torch
from conftest import keep_everything
from test_cli import forked_command

import specplug
from specplug.cli import run_recipe

# On a machine that is busy an adaptive schedule may find that nothing pays, and draft nothing.
DRAFTS = ("schedule=fixed", "schedule.gamma=4")
QUICK = ("recipe.limit=4", "recipe.bootstrap=50", "recipe.warmup=0", "sampling.max_new_tokens=40")
quick_reports = pytest.mark.usefixtures("quick_reports")


def run(capsys, folder, *overrides):
    threads = torch.get_num_threads()
    try:
        code = run_recipe(specplug.load(*overrides), folder)
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out.splitlines()
    return code, json.loads(out[-1]) if out and out[-1].startswith("{") else None


def test_evaluate(tmp_path, capsys):
    code, summary = run(capsys, tmp_path / "run", *QUICK, *DRAFTS)
    assert code == 0
    assert summary["exactness"] == {"identical": 4, "tie": 0, "mismatch": 0, "not_compared": 0}
    for key in ("speedup", "speedup_vs_assisted", "alpha", "draft_acceptance_rate", "mean_acceptance_length"):
        assert summary[key] > 0
    for key in ("cost_coefficient", "predicted_speedup", "overhead", "width_cost"):
        assert summary[key] > 0
    assert set(summary["tokens_per_second"]) == {"plain", "assisted", "speculative"}
    assert summary["task_score"]["baseline"] == summary["task_score"]["speculative"]
    assert set(summary["categories"]) == {"story", "qa", "rewrite", "arithmetic"}
    assert summary["environment"]["threads"] == 1
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        assert sample["plain"]["token_ids"] == sample["speculative"]["token_ids"]
        assert sample["speculative"]["stats"]["num_new_tokens"] == sample["speculative"]["new_tokens"]
        assert sample["speculative"]["engine"] == "rounds"
        assert sample["speculative"]["speculative_decoding"]["num_spec_steps"] > 0
    for name in ("report.md", "report.html", "plots/speedup.svg"):
        assert (tmp_path / "run" / name).exists()
    traces = [json.loads(line) for line in (tmp_path / "run" / "trace.jsonl").read_text().splitlines()]
    assert [trace["category"] for trace in traces] == ["story", "qa", "rewrite"]
    for trace, sample in zip(traces, samples, strict=False):
        assert trace["id"] == sample["id"] and trace["same_text"]
        assert trace["token_ids"] == sample["speculative"]["token_ids"]
        following = [each["following"]["token"] for each in trace["rounds"] if each["following"]]
        kept = [d["token"] for each in trace["rounds"] for d in each["drafts"] if d["decision"] == "accepted"]
        assert sorted(kept + following) == sorted(trace["token_ids"]) and len(kept) == trace["stats"]["num_accepted"]
        assert len(trace["rounds"]) - 1 == trace["stats"]["num_rounds"]


@quick_reports
def test_evaluate_sampled(tmp_path, capsys):
    code, summary = run(capsys, tmp_path, *QUICK, "sampling.temperature=0.7", "recipe.compare_assisted=false")
    assert code == 0 and summary["exactness"]["not_compared"] == 4 and summary["alpha"] > 0
    assert summary["speedup_vs_assisted"] is None


@quick_reports
@pytest.mark.parametrize(
    "overrides", [("pair=lookup", "threads=1"), ("sampling.repetition_penalty=1.2",), ("engine=plain",)]
)
def test_evaluate_other_ways(tmp_path, capsys, overrides):
    code, summary = run(capsys, tmp_path, *QUICK, *overrides)
    assert code == 0 and summary["exactness"]["identical"] == 4
    assert (summary["alpha"] is None) == (overrides == ("engine=plain",))


@quick_reports
def test_interrupted_and_resumed(tmp_path, capsys, monkeypatch):
    from specplug.runs import Run

    append = Run.append
    quick = [*QUICK, "schedule=fixed"]  # counts that no measurement decides

    def interrupt_after_two(self, sample):
        append(self, sample)
        if len(self.done) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "append", interrupt_after_two)
    folder = tmp_path / "run"
    code, summary = run(capsys, folder, *quick)
    assert code == 130 and summary is None
    assert json.loads((folder / "summary.json").read_text())["num_samples"] == 2
    monkeypatch.setattr(Run, "append", append)
    code, summary = run(capsys, folder, *quick, f"resume={folder}")
    assert code == 0 and summary["num_samples"] == 4
    identifiers = [json.loads(line)["id"] for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert identifiers == ["story-0", "qa-0", "rewrite-0", "arithmetic-0"]
    _, whole = run(capsys, tmp_path / "whole", *quick)
    for key in ("alpha", "num_rounds", "acceptance_histogram", "task_score", "num_new_tokens"):
        assert summary[key] == whole[key]


@quick_reports
def test_more_can_be_traced_later_and_nothing_is_traced_when_off(tmp_path, capsys):
    def traced():
        return [json.loads(line)["id"] for line in (tmp_path / "trace.jsonl").read_text().splitlines()]

    run(capsys, tmp_path, *QUICK, "recipe.limit=2", "recipe.trace=0")
    assert not (tmp_path / "trace.jsonl").exists() and 'id="inspector"' not in (tmp_path / "report.html").read_text()
    run(capsys, tmp_path, *QUICK, "recipe.limit=2", "recipe.trace=1", f"resume={tmp_path}")
    assert traced() == ["story-0"] and 'id="inspector"' in (tmp_path / "report.html").read_text()
    with (tmp_path / "trace.jsonl").open("a") as lines:
        lines.write('{"id": "qa-0", "ro')  # as a kill in the middle of writing leaves it
    run(capsys, tmp_path, *QUICK, "recipe.trace=3", f"resume={tmp_path}")
    assert traced() == ["story-0", "qa-0", "rewrite-0"]


def test_traces_are_spread_over_the_categories():
    from specplug.recipes.evaluate import one_of_each

    assert one_of_each(["a", "a", "a", "b", "c", "b"]) == [0, 3, 4, 1, 5, 2]


@quick_reports
def test_a_mismatch_ends_with_exit_code_1_and_names_the_prompts(tmp_path, capsys, monkeypatch):
    import specplug.round

    monkeypatch.setattr(specplug.round, "verify_walk", keep_everything)
    drafting = ("pair=lookup", "schedule=fixed", "schedule.gamma=4", "threads=1")  # also where drafts do not pay
    code, summary = run(capsys, tmp_path, *QUICK, *drafting)
    assert code == 1 and summary["exactness"]["mismatch"] == len(summary["mismatches"]) > 0


def test_generate(tmp_path, capsys):
    prompt = "Write a short story about Mia, a red kite and the lake. There should be cake in it."
    assert run_recipe(specplug.load("recipe=generate", f'recipe.prompt="{prompt}"'), tmp_path) == 0
    captured = capsys.readouterr()
    assert "Mia" in captured.out and "|" not in captured.out
    assert "tokens per pass" in captured.err


def test_theory(tmp_path, capsys):
    code, result = run(capsys, tmp_path, "recipe=theory")
    assert code == 0 and result["expected_tokens"] == pytest.approx(3.3616) and result["best_gamma"] == 8


def test_pipeline_from_overrides():
    pipe = specplug.pipeline("pair=tiny", "sampling.max_new_tokens=20")
    answer = pipe([{"role": "user", "content": "Ben has 3 coins."}], return_full_text=False)
    assert isinstance(answer[0]["generated_text"], str)
    assert specplug.attached(pipe).last.num_new_tokens <= 20
    specplug.detach(pipe)


WRONG = {
    "no draft": (["draft=none"], "draft=none"),
    "too long": (["sampling.max_new_tokens=600"], "context of 512"),
    "nothing embedded": (["target.name_or_path=asset:tiny/nothing"], "asset:tiny/target"),
    "no such folder": (["target=custom", "target.name_or_path=./nothing"], "no such folder"),
    "no such gguf": (["target=custom", "target.name_or_path=./nothing.gguf"], "no such file"),
    "no such model": (["draft=custom", "draft.name_or_path=org/nothing"], "cannot be loaded"),
    "no draft named": (["draft=custom"], "draft.name_or_path"),
    "nothing to quantize": (["draft=lookup", "draft/quantization=nf4"], "draft/quantization=nf4"),
    "no such device": (["target.device=quantum:0"], "target.device=quantum:0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line(tmp_path, name):
    overrides, answer = WRONG[name]
    with pytest.raises(specplug.ConfigError) as caught:
        run_recipe(specplug.load(*overrides), tmp_path / "run")
    assert answer in str(caught.value) and "\n" not in str(caught.value)


@quick_reports
def test_quantized_copy_of_the_target_as_draft(tmp_path, capsys):
    """bitsandbytes on this device; a head and embeddings that stay in fp32."""
    for method in ("nf4", "int8"):
        overrides = ["draft=same_as_target", f"draft/quantization={method}", "recipe.compare_assisted=false"]
        code, summary = run(capsys, tmp_path / method, *QUICK, *overrides, "recipe.limit=2")
        assert code == 0 and summary["exactness"]["identical"] == 2
        assert summary["alpha"] > 0.5
        assert summary["environment"]["bytes_draft"] < 0.6 * summary["environment"]["bytes_target"]


def test_calibrate_measures_what_theory_needs(tmp_path, capsys):
    arguments = ("recipe=calibrate", "recipe.limit=2", "recipe.max_gamma=3", "recipe.repeats=2", "recipe.gamma=3")
    assert run_recipe(specplug.load(*arguments, "sampling.max_new_tokens=24"), tmp_path / "run") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((tmp_path / "run" / "calibration.json").read_text())
    assert 0.8 < result["alpha"] <= 1 and 0 < result["cost_coefficient"] < 1 and result["num_calls"] == 2
    assert [each["gamma"] for each in result["by_gamma"]] == [0, 1, 2, 3]
    assert result["expected_speedup"] == max(each["speedup"] for each in result["by_gamma"])


def test_calibration_is_the_formula():
    from specplug import theory
    from specplug.recipes.calibrate import calibration
    from specplug.round_costs import RoundCosts
    from specplug.stats import Stats

    stats = Stats(num_rounds=10, num_accepted=8, num_tested=10)
    stats.drafted[4] = 10
    flat = calibration(stats, RoundCosts(2.0, dict.fromkeys(range(5), 2.0), 0.1, 0.1), 4)
    for each in flat["by_gamma"]:  # where width costs nothing, both are the paper's
        assert each["speedup"] == pytest.approx(theory.speedup(0.8, each["gamma"], 0.05)) == each["speedup_of_paper"]
    wide = calibration(stats, RoundCosts(2.0, {gamma: 2.0 * (gamma + 1) for gamma in range(5)}, 0.1, 0.1), 4)
    assert wide["best_gamma"] == 0 and wide["expected_speedup"] == 1  # on such a machine nothing pays
    # A lookup that has something to propose in a quarter of the rounds only.
    stats.drafted[4], stats.drafted[0], stats.num_rounds = 5, 15, 20
    lookup = calibration(stats, RoundCosts(2.0, dict.fromkeys(range(5), 2.0), 0.0, 0.0), 4)
    assert lookup["rounds_with_drafts"] == 0.25
    assert lookup["by_gamma"][4]["speedup"] == pytest.approx(0.75 + 0.25 * theory.expected_tokens(0.8, 4))


def test_a_sweep_draws_curves_and_goes_on(tmp_path):
    def sweep(gammas):
        command = ["-m", "recipe=sweep", "schedule=fixed", f"schedule.gamma={gammas}", "hydra.sweep.dir=sweep"]
        command += ["recipe.bootstrap=0", "recipe.limit=2", "recipe.warmup=0", "recipe.trace=0"]
        command += ["recipe.compare_assisted=false", "sampling.max_new_tokens=16"]
        code, _, said = forked_command(*command, cwd=tmp_path)
        assert code == 0, said

    sweep("0")
    samples = (tmp_path / "sweep" / "0" / "samples.jsonl").read_text()
    sweep("0,4")
    assert (tmp_path / "sweep" / "0" / "samples.jsonl").read_text() == samples, "measured again"
    points = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]
    assert [each["gamma"] for each in points] == [0, 4]
    assert [each["mean_gamma"] for each in points] == sorted(each["mean_gamma"] for each in points)
    assert all(each["mismatches"] == 0 and each["speedup"] > 0 for each in points)
    assert points[0]["predicted"] is None and points[1]["predicted"] > 1
    assert "sweep.svg" in (tmp_path / "sweep" / "sweep.md").read_text()
    svg = (tmp_path / "sweep" / "sweep.svg").read_text()
    assert "times plain decoding" in svg and "asset:tiny/draft" in svg


@quick_reports
def test_later_turns_stand_behind_the_targets_own_answers(tmp_path, capsys):
    from specplug.config import Dataset
    from specplug.data import Row, load_rows

    file = tmp_path / "chats.jsonl"
    turns = [["What is the kite?", "And the lake?", "Again?"], ["Who is Mia?"]]
    file.write_text("".join(json.dumps({"turns": each}) + "\n" for each in turns))
    dataset = ["dataset=jsonl", f"dataset.path={file}", "dataset.prompt_column=turns"]
    rows = load_rows(Dataset(name="d", path=str(file), prompt_column="turns"), all_turns=True)
    assert [(row.id, row.follows) for row in rows] == [("0", None), ("0.2", "0"), ("0.3", "0.2"), ("1", None)]
    assert len(load_rows(Dataset(name="d", path=str(file), prompt_column="turns"))) == 2
    arguments = [*dataset, "recipe.warmup=0", "recipe.compare_assisted=false", "sampling.max_new_tokens=12"]
    assert run_recipe(specplug.load(*arguments), tmp_path / "run") == 0
    capsys.readouterr()
    done = {s["id"]: s for s in map(json.loads, (tmp_path / "run" / "samples.jsonl").read_text().splitlines())}
    assert list(done) == ["0", "0.2", "0.3", "1"]
    traces = {t["id"]: t for t in map(json.loads, (tmp_path / "run" / "trace.jsonl").read_text().splitlines())}
    assert traces["0.2"]["same_text"], "the trace went on with another conversation"

    from specplug.data import prompt_ids
    from specplug.models import load_tokenizer

    config = specplug.load(*dataset)
    tokenizer = load_tokenizer(config.target, "target")
    history = [(turns[0][0], done["0"]["plain"]["text"]), (turns[0][1], done["0.2"]["plain"]["text"])]
    ids = prompt_ids(tokenizer, Row("0.3", turns[0][2], None), config.dataset, history)
    assert done["0.3"]["prompt_tokens"] == len(ids)
    text = tokenizer.decode(ids)
    assert text.index(turns[0][0]) < text.index(history[0][1]) < text.index(turns[0][1]) < text.index(turns[0][2])


@quick_reports
def test_a_conversation_that_becomes_too_long_is_left_out(tmp_path, capsys, caplog):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"turns": ["Who is Mia?", "word " * 600, "Again?"]}) + "\n")
    arguments = ["dataset=jsonl", f"dataset.path={file}", "dataset.prompt_column=turns", "sampling.max_new_tokens=8"]
    assert run_recipe(specplug.load(*arguments, "recipe.trace=0"), tmp_path / "run") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["num_samples"] == 1 and caplog.text.count("left out") == 2
    assert [each["id"] for each in summary["errors"]] == ["0.2", "0.3"]
    assert "context of 512" in summary["errors"][0]["reason"] and "turn before" in summary["errors"][1]["reason"]


@quick_reports
def test_a_report_counts_the_members_of_a_chain(tmp_path, capsys):
    arguments = ("recipe.limit=2", "recipe.warmup=1", "recipe.compare_assisted=false", "draft.before=suffix")
    fixed = ("schedule=fixed", "schedule.gamma=3", "sampling.max_new_tokens=48", "recipe.trace=0")
    assert run_recipe(specplug.load(*arguments, *fixed), tmp_path / "run") == 0
    said = capsys.readouterr()
    summary = json.loads(said.out.splitlines()[-1])
    assert list(summary["members"]) == ["1 suffix", "2 model"]
    assert sum(each["drafts"] for each in summary["members"].values()) == summary["num_draft_tokens"]
    assert sum(each["kept"] for each in summary["members"].values()) == summary["num_accepted"]
    assert "1 suffix: " in said.err and "of them kept" in said.err
