"""Runs side by side: the figures of each, what keeps them from being compared, and folders that hold none."""

import json
import shutil

import pytest

import specplug
from specplug.cli import run_recipe
from specplug.compare import labels
from specplug.runs import read_samples


def compared(capsys, folder, *runs):
    config = specplug.load("recipe=compare", f"recipe.runs=[{','.join(map(str, runs))}]", "recipe.bootstrap=50")
    assert run_recipe(config, folder) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out.splitlines()[-1]), captured.err


def changed(small_run, folder, file="config.json", **sections):
    shutil.copytree(small_run, folder)
    content = json.loads((folder / file).read_text())
    for name, values in sections.items():
        content[name] = content[name] | values if isinstance(values, dict) else values
    (folder / file).write_text(json.dumps(content))
    return folder


def test_two_runs_that_can_be_compared(small_run, tmp_path, capsys):
    other = changed(small_run, tmp_path / "other", draft={"drafter": "lookup"}, schedule={"gamma": 7})
    before = {file: file.read_bytes() for folder in (small_run, other) for file in folder.rglob("*") if file.is_file()}
    result, told = compared(capsys, tmp_path / "compared", small_run, other)
    assert {file: file.read_bytes() for file in before} == before
    assert result["comparable"] and result["reasons"] == [] and "not comparable" not in told
    assert result["differences"] == {"draft.drafter": ["model", "lookup"], "schedule.gamma": [3, 7]}
    assert list(result["runs"]) == ["run", "other"]
    summary = json.loads((small_run / "summary.json").read_text())
    for key in ("speedup", "alpha", "acceptance_histogram", "task_score", "exactness"):
        assert result["runs"]["run"][key] == summary[key]
    assert json.loads((tmp_path / "compared" / "compare.json").read_text()) == result
    text = (tmp_path / "compared" / "compare.md").read_text()
    assert "| run | 3 |" in text and "| schedule.gamma | 3 | 7 |" in text and "Warning" not in text
    assert "![Speed-up](plots/speedup.svg)" in text and (tmp_path / "compared" / "plots" / "speedup.svg").exists()
    assert f"{summary['speedup']:.2f}x" in told and f"{summary['speedup']:.2f}x" in text
    assert "other" in (tmp_path / "compared" / "compare.html").read_text()


NOT_COMPARABLE = {
    "target": (dict(target={"name_or_path": "org/|x`"}), "targets differ (run: name_or_path asset:tiny/target; other:"),
    "quantization": (dict(target={"quantization": {"method": "nf4"}}), "targets differ (run: quantization.method none"),
    "data set": (dict(dataset={"name": "mine"}), "data sets differ (run: name tiny; other: name mine)"),
    "sampling": (dict(sampling={"top_k": 5}), "samplings differ (run: top_k None; other: top_k 5)"),
    "device": (dict(file="environment.json", device="another"), "machines differ"),
    "threads": (dict(file="environment.json", threads=64), "machines differ (run: threads 1; other: threads 64)"),
}


@pytest.mark.parametrize("name", NOT_COMPARABLE)
def test_what_cannot_be_compared_is_said_and_shown(small_run, tmp_path, capsys, name):
    changes, reason = NOT_COMPARABLE[name]
    other = changed(small_run, tmp_path / "other", **changes)
    result, told = compared(capsys, tmp_path / "compared", small_run, other)
    assert not result["comparable"] and len(result["reasons"]) == 1 and reason in result["reasons"][0]
    lines = [line for line in told.splitlines() if "not comparable" in line]
    assert len(lines) == 1 and lines[0].startswith("these runs are not comparable: ")
    assert list(result["runs"]) == ["run", "other"]
    text = (tmp_path / "compared" / "compare.md").read_text()
    assert text.count("**Warning:** these runs are not comparable") == 1 and "| other | 3 |" in text


def test_other_prompts(small_run, tmp_path, capsys):
    other = changed(small_run, tmp_path / "other")
    lines = (other / "samples.jsonl").read_text().splitlines(keepends=True)
    (other / "samples.jsonl").write_text("".join(lines[:2]))
    result, _ = compared(capsys, tmp_path / "compared", small_run, other)
    assert result["reasons"] == ["prompts differ (3, 2; 2 in common)"]


def test_folders_without_an_evaluation_are_one_line_each(small_run, tmp_path):
    (tmp_path / "empty").mkdir()
    broken = changed(small_run, tmp_path / "broken")
    (broken / "costs.json").write_text("{")
    trained = changed(small_run, tmp_path / "trained", recipe={"name": "distill"})
    begun = changed(small_run, tmp_path / "begun")
    (begun / "samples.jsonl").write_text("")
    folders = [small_run, tmp_path / "nothing", tmp_path / "empty", broken, trained, begun]
    with pytest.raises(specplug.ConfigError) as caught:
        run_recipe(
            specplug.load("recipe=compare", f"recipe.runs=[{','.join(map(str, folders))}]"), tmp_path / "compared"
        )
    lines = str(caught.value).splitlines()
    told = [
        "no readable config.json",
        "no readable config.json",
        "not those of a run",
        "recipe=distill",
        "has no sample yet",
    ]
    assert len(lines) == 5
    for line, folder, reason in zip(lines, folders[1:], told, strict=True):
        assert str(folder) in line and reason in line
    assert not (tmp_path / "compared").exists()


def test_wrong_values():
    for runs in ("[]", "[a]"):
        with pytest.raises(specplug.ConfigError, match="two run folders or more"):
            specplug.load("recipe=compare", f"recipe.runs={runs}")
    with pytest.raises(specplug.ConfigError, match=r"recipe\.trace=-1"):
        specplug.load("recipe.trace=-1")


def test_labels():
    assert labels(["runs/1/a", "runs/1/b"]) == ["a", "b"]
    assert labels(["runs/1/a", "runs/2/a"]) == ["1/a", "2/a"]
    assert labels(["a", "a", "b"]) == ["a", "a (2)", "b"]
    assert labels(["x/a", "a"]) == ["x/a", "a"]


def test_a_run_of_an_earlier_version_has_no_trace(small_run, tmp_path, capsys):
    other = changed(small_run, tmp_path / "other")
    (other / "trace.jsonl").unlink()
    assert read_samples(other / "trace.jsonl") == []
    assert compared(capsys, tmp_path / "compared", small_run, other)[0]["comparable"]
