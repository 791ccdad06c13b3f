"""Run folders: flushed samples, half a line, going on, and refusing another configuration."""

import json
import subprocess
import sys

import pytest

import specplug
from specplug.config import ConfigError
from specplug.runs import Run, claim, read_samples


def config(*overrides):
    return specplug.load(*overrides)


def test_samples_are_on_disk_at_once_and_a_run_goes_on(tmp_path):
    run = Run(tmp_path / "run", config(), {})
    run.append({"id": "a", "text": "é"})
    assert read_samples(run.samples_file) == [{"id": "a", "text": "é"}]
    run.samples.write(b'{"id": "b", "te')  # as a kill in the middle of writing leaves it
    run.close()
    again = Run(tmp_path / "run", config(f"resume={tmp_path / 'run'}"), {})
    assert list(again.done) == ["a"]
    again.append({"id": "b"})
    again.close()
    assert [sample["id"] for sample in read_samples(again.samples_file)] == ["a", "b"]


@pytest.mark.parametrize("line", ["{broken", "[1]", "null", "\x00\x00", '{"idx": "b"}', ""])
def test_a_line_that_is_no_sample_is_said_in_one_line(tmp_path, line):
    Run(tmp_path, config(), {}).close()
    (tmp_path / "samples.jsonl").write_text(f'{{"id": "a"}}\n{line}\n{{"id": "c"}}\n')
    with pytest.raises(ConfigError, match=r"samples\.jsonl, line 2: .*remove the line") as caught:
        Run(tmp_path, config(f"resume={tmp_path}"), {})
    assert "\n" not in str(caught.value)
    if line and "idx" not in line:
        with pytest.raises(ConfigError, match="line 2: not a JSON object"):
            read_samples(tmp_path / "samples.jsonl")


@pytest.mark.parametrize("content", ["", "[1]", "3", '"text"', "null"])
def test_a_configuration_that_is_none_is_no_run_to_go_on_with(tmp_path, content):
    Run(tmp_path, config(), {}).close()
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="holds no run to go on with"):
        Run(tmp_path, config(f"resume={tmp_path}"), {})


def test_more_samples_may_be_added_but_nothing_else_may_differ(tmp_path):
    Run(tmp_path, config("recipe.limit=3"), {}).close()
    Run(tmp_path, config("recipe.limit=5", f"resume={tmp_path}"), {}).close()
    with pytest.raises(ConfigError) as caught:
        Run(tmp_path, config("schedule.max_gamma=2", "seed=4", f"resume={tmp_path}"), {})
    text = str(caught.value)
    with pytest.raises(ConfigError, match=r"schedule\.name=fixed \(the run has adaptive\)"):
        Run(tmp_path, config("schedule=fixed", f"resume={tmp_path}"), {})
    assert "schedule.max_gamma=2 (the run has 16)" in text and "seed=4 (the run has 0)" in text and "limit" not in text


def test_a_folder_with_a_run_is_not_written_over(tmp_path):
    Run(tmp_path, config(), {}).close()
    with pytest.raises(ConfigError, match="holds a run already"):
        Run(tmp_path, config(), {})


def test_folders_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Run(tmp_path / "file" / "run", config(), {})
    with pytest.raises(ConfigError, match="holds no run"):
        Run(tmp_path / "empty", config(f"resume={tmp_path / 'empty'}"), {})


def test_what_is_written_down(tmp_path):
    from specplug.runs import describe_environment

    environment = describe_environment("cpu", "float32")
    Run(tmp_path, config("seed=7"), environment).close()
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 7
    saved = json.loads((tmp_path / "environment.json").read_text())
    assert saved["versions"]["transformers"] and saved["threads"] >= 1 and saved["command"][0] == "specplug"


def test_another_process_in_the_same_folder_is_refused(tmp_path):
    folder = tmp_path / "run"
    hold = "import sys, pathlib; from specplug.runs import claim; claim(pathlib.Path(sys.argv[1])); print('held', flush=True); input()"
    folder.mkdir()
    other = subprocess.Popen(
        [sys.executable, "-c", hold, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match="another process is at work in it"):
        claim(folder)
    other.kill()
    other.communicate()
    claim(folder)  # a process that was killed holds nothing
    claim(folder)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    """As the command meets it, in a file system of a few kilobytes; where none can be had, a write that fails alike."""
    code = (
        "import errno, sys\n"
        "from specplug import cli, runs\n"
        "def full(*_): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "runs.Run.append = full\n"
        "cli.main()\n"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "recipe.limit=1",
        "recipe.warmup=0",
        "sampling.max_new_tokens=8",
        "draft=lookup",
    ]
    done = subprocess.run([*command, f"hydra.run.dir={tmp_path / 'run'}"], check=False, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"No space left on device; make room, then go on with: specplug resume={tmp_path / 'run'}" in done.stderr
