"""The command as a user types it: one line for a mistake, stdout for the result, completion, a wheel elsewhere."""

import json
import multiprocessing
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent


def specplug_command(*arguments, cwd, **env):
    command = [sys.executable, "-m", "specplug.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **env}, check=False)


def main_in(folder, arguments):
    """The command, in a process that is there already: stdout and stderr go to files in the folder."""
    from specplug.cli import main

    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(folder)
    sys.argv = ["specplug", *arguments]
    main()


def forked_command(*arguments, cwd):
    """As `specplug_command`, in a fork of a process that has imported what takes seconds to import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["specplug.cli", "specplug.recipes.evaluate", "transformers"])
    process = context.Process(target=main_in, args=(cwd, arguments))
    process.start()
    process.join()
    return process.exitcode, *((cwd / name).read_text() for name in ("stdout", "stderr"))


@pytest.mark.parametrize(
    "arguments, answer",
    [
        (["draft.gama=5"], "gama"),
        (["+draft.gama=5"], "draft.gama: unknown key"),
        (["pair=nope"], "pair/nope"),
        (["schedule=fixed", "schedule.gamma=-1"], "schedule.gamma=-1: must be 0"),
        (["schedule=fixed", "schedule.gamma=two"], "two"),
        (["schedule.gamma=3"], "schedule=fixed has it"),
        (["draft=lookup", "schedule=confidence"], "lookup is none"),
        (["schedule.frozen=README.md"], "README.md"),
        (["draft=early_exit", "draft.num_layers=99"], "takes 1 to 9"),
        (["sampling.num_beams=2"], "beam search"),
        (["dataset=jsonl", "dataset.path=missing.jsonl"], "missing.jsonl: no such file"),
        (["dataset=jsonl", "dataset.path=bad.jsonl"], "bad.jsonl, line 2: not JSON"),
        (["dataset=jsonl", "dataset.path=empty.jsonl"], "has no rows"),
        (["dataset=jsonl", "dataset.path=good.jsonl", "dataset.prompt_column=text"], "dataset.prompt_column=text"),
        (["hydra.run.dir=good.jsonl/run"], "Not a directory"),
        (["resume=nothing"], "resume=nothing: holds no run"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(tmp_path, arguments, answer):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "good.jsonl").write_text('{"prompt": "a"}\n')
    code, out, said = forked_command(*arguments, cwd=tmp_path)
    assert code == 1 and out == ""
    assert answer in said and "Traceback" not in said
    assert len(said.splitlines()) == 1, said


def test_version_help_and_configuration(tmp_path):
    assert specplug_command("--version", cwd=tmp_path).stdout == "specplug 0.1.0\n"
    assert "pair: " in specplug_command("--help", cwd=tmp_path).stdout
    assert "asset:tiny/target" in specplug_command("--cfg", "job", cwd=tmp_path).stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("text", ["a, b", 'say "hi", {x: [1', "back\\slash", "end\\", 'odd\\"quote', "it's, so"])
def test_a_prompt_is_text(text):
    from specplug import load
    from specplug.cli import quote_prompt

    assert load("recipe=generate", quote_prompt(f"recipe.prompt={text}")).recipe.prompt == text
    assert quote_prompt("recipe.prompt='a, b'") == "recipe.prompt='a, b'"


def test_completion(tmp_path):
    query = {"COMP_LINE": "specplug pair=", "COMP_POINT": "14"}
    offered = specplug_command("-sc", "query=bash", cwd=tmp_path, **query).stdout
    assert "pair=tiny" in offered and "pair=lookup" in offered


def test_stdout_is_the_result_alone_and_a_sweep_runs(tmp_path):
    done = specplug_command("-m", "recipe=theory", "recipe.alpha=0.5,0.9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["alpha"] for line in done.stdout.splitlines()] == [0.5, 0.9]


def test_resume_alone_takes_the_overrides_of_the_run(tmp_path):
    quick = [
        "recipe.limit=1",
        "recipe.warmup=0",
        "recipe.bootstrap=0",
        "recipe.trace=0",
        "recipe.compare_assisted=false",
    ]
    quick += ["sampling.max_new_tokens=8", "hydra.run.dir=run"]
    code, _, said = forked_command(*quick, cwd=tmp_path)
    assert code == 0, said
    code, out, said = forked_command("resume=run", cwd=tmp_path)
    assert code == 0, said
    assert json.loads(out.splitlines()[-1])["num_samples"] == 1
    code, _, said = forked_command("resume=run", *quick, "schedule.max_gamma=2", cwd=tmp_path)
    assert code == 1 and "schedule.max_gamma=2 (the run has 16)" in said
    assert {path.name for path in tmp_path.iterdir()} == {"run", "stdout", "stderr"}


@pytest.mark.slow
def test_a_wheel_works_elsewhere(tmp_path):
    """Built, installed into an environment that sees this one's libraries, and run in an empty folder."""
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", str(PROJECT), str(source)], check=True)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    site = next(environment.glob("lib/python*/site-packages"))
    wheel = next(tmp_path.glob("*.whl"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True
    )
    libraries = next(path for path in sys.path if path.endswith("site-packages"))
    (tmp_path / "empty").mkdir()
    run = [str(environment / "bin" / "python"), "-m", "specplug.cli", "recipe.limit=1", "sampling.max_new_tokens=8"]
    done = subprocess.run(
        run,
        cwd=tmp_path / "empty",
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{site}:{libraries}"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["exactness"]["identical"] == 1
    names = {path.name for path in site.iterdir()}
    assert "conf" not in names and "recipes" not in names, "nothing of ours beside specplug at the top level"
