"""Each metric on answers as models write them, programs that misbehave, and what is said where a metric does not fit."""

import builtins
import json
import re
import sys

import numpy as np
import pytest

import specplug
from specplug import scores
from specplug.config import Answer, ConfigError, Dataset, Metric
from specplug.data import Row
from specplug.metrics.exact_match import exact_match
from specplug.metrics.f1 import f1
from specplug.metrics.guard import run_program
from specplug.metrics.multiple_choice import multiple_choice
from specplug.metrics.numeric import numeric
from specplug.metrics.pass_at_k import pass_at_k, passes, program
from specplug.metrics.scoring import Scorer


def test_exact_match():
    assert exact_match(" a  b\n\n", "a b") == 1 and exact_match("a", "A") == 0


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("So 40 + 2 = 42.", "6 * 7\n#### 42", 1),
        ("#### 1,042 coins", "#### 1042", 1),
        ("It is $41.", "#### 42", 0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1),
        ("Thus \\boxed{\\dfrac12}, as 3 shows.", "\\frac{1}{2}", 1),
        ("\\boxed{x^{2} + 1}", "x^{2}+1", 1),
        ("The answer is \\boxed{\\text{Evelyn}}.", "Evelyn", 1),
        ("\\boxed{3\\sqrt{13}}", "3\\sqrt{13}", 1),
        ("\\boxed{p - q}", "p - q", 1),
        ("\\boxed{14", "14", 1),
        ("-3", "#### -3", 1),
        ("ten", "10", 0),
        ("", "10", 0),
        ("7", "The answer is 7", 1),
        ("1/0", "10", 0),
        ("\\boxed{90^\\circ}", "90", 1),
        ("\\boxed{x = 5}", "5", 1),
        ("\u22125", "-5", 1),
        ("1" * 5000, "10", 0),
        ("\\boxed{1" + ",000" * 2000 + "}", "10", 0),
        ("1" * 5000 + "/3", "10", 0),
    ],
)
def test_numeric(answer, reference, score):
    assert numeric(answer, reference) == score


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("The answer is (B).", "B", 1),
        ("Answer: C", "(C)", 1),
        ("A dog is an animal, so B", "B", 1),
        ("B. because A is wrong", "B", 1),
        ("\\boxed{\\text{D}}", "d", 1),
        ("A", "0", 1),
        ("c", "2", 1),
        ("I do not know", "B", 0),
        ("", "A", 0),
    ],
)
def test_multiple_choice(answer, reference, score):
    assert multiple_choice(answer, reference) == score


def test_f1_is_that_of_squad():
    assert f1("The cat sat.", "a cat sat") == 1 and f1("dog", "cat") == 0 and f1("", "") == 1
    assert f1("the big cat", "cat on mat") == pytest.approx(2 * 1 / (2 + 3))
    scorer = Scorer(Dataset(name="d", metric=Metric.f1))
    assert scorer("Mia", Row("0", "", "a girl", others=("Mia",))) == {"score": 1.0}


def test_overlap_metrics_are_those_of_their_libraries():
    sacrebleu = pytest.importorskip("sacrebleu")
    text, reference = "the cat sat on the mat today", "the cat sat on a mat today"
    bleu, chrf, rouge = (
        Scorer(Dataset(name="d", metric=each))(text, Row("0", "", reference))
        for each in (Metric.bleu, Metric.chrf, Metric.rouge)
    )
    assert bleu["score"] == pytest.approx(sacrebleu.sentence_bleu(text, [reference]).score / 100)
    assert chrf["score"] == pytest.approx(sacrebleu.sentence_chrf(text, [reference]).score / 100)
    assert rouge["score"] == rouge["rougeL"] == pytest.approx(6 / 7) and rouge["rouge2"] == pytest.approx(4 / 6)
    from specplug.metrics.overlap import corpus_score

    many = corpus_score(Metric.bleu, [text, reference], [[reference], [reference, text]])
    assert many == pytest.approx(sacrebleu.corpus_bleu([text, reference], [[reference] * 2, [None, text]]).score / 100)


def test_the_last_line_alone():
    scorer = Scorer(Dataset(name="d", metric=Metric.numeric, answer=Answer.last_line))
    assert scorer("9 apples\nAnswer: 5\n\n", Row("0", "", "8 of 9\nAnswer: 5"))["score"] == 1


def test_pass_at_k_is_the_unbiased_estimate():
    """By enumeration of all choices of k out of n."""
    from itertools import combinations

    for n, c, k in [(1, 1, 1), (1, 0, 1), (5, 2, 1), (5, 2, 3), (6, 4, 3)]:
        draws = list(combinations(range(n), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(any(i < c for i in draw) for draw in draws) / len(draws))
    with pytest.raises(ValueError, match="1 <= k <= n"):
        pass_at_k(1, 0, 2)


HEAD = 'from typing import List\n\n\ndef double(x: int) -> List[int]:\n    """Twice."""\n'
TESTS = "def check(f):\n    assert f(2) == [2, 2]\n\ncheck(double)"


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        ("    return [x, x]\n", True),
        ("    return [x, x]\n\ndef other():\n    cut of", True),
        ("Sure:\n```python\ndef double(x):\n    return [x, x]\n```\nIt returns\n```\n[2, 2]\n```", True),
        ("```python\n    return [x] * 2\n```", True),
        ("```\ndef double(x):\n    return [x]\n```", False),
        ("    return x x", False),
        ("", False),
    ],
)
def test_programs(answer, passed):
    assert passes(answer, HEAD, TESTS).passed is passed


def test_a_program_without_a_head():
    assert program("def f(): pass", "", "f()") == "\ndef f(): pass\n\nf()\n"
    assert passes("Here:\n```python\ndef f():\n    return 1\n```", "", "assert f() == 1").passed


HOSTILE = {
    "an endless loop": ("while True: pass", "stopped"),
    "forks": ("import os\nwhile True: os.fork()", "os.fork is not allowed"),
    "another process": ("import subprocess\nsubprocess.run(['true'])", "PermissionError"),
    "writes outside": ("open('{outside}', 'w').write('x')", "open is not allowed"),
    "deletes outside": ("import os\nos.remove('{kept}')", "os.remove is not allowed"),
    "deletes a folder": ("import shutil\nshutil.rmtree('{folder}')", "not allowed"),
    "a large file": ("open('a', 'w').write('x' * 5_000_000)", "File too large"),
    "a memory hog": ("x = []\nwhile True: x.append(bytearray(1 << 22))", "MemoryError"),
    "an early end": ("import sys\nsys.exit(0)", "ended itself"),
    "an early end by the system": ("import os\nos._exit(0)", "ended itself"),
    "a guess at the result": ("import os\nos.write(3, b'passed')\nos.write(4, b'passed')\nos._exit(0)", "ended itself"),
    "a flood on every pipe": (
        "import os\nwhile True:\n  for d in range(3, 9):\n    try: os.write(d, b'x' * 4096)\n    except OSError: pass",
        "stopped",
    ),
    "the network": ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "not allowed"),
    "its parent": ("import os\nos.kill(os.getppid(), 9)", "os.kill is not allowed"),
    "other limits": ("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "not allowed"),
    "no memory of its own": ("import ctypes\nctypes.string_at(0)", "not allowed"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_programs_that_misbehave(tmp_path, name):
    source, reason = HOSTILE[name]
    (tmp_path / "kept").write_text("x")
    source = source.replace("{outside}", str(tmp_path / "new")).replace("{kept}", str(tmp_path / "kept"))
    outcome = run_program(
        source.replace("{folder}", str(tmp_path)), seconds=0.7 if reason == "stopped" else 10, memory=256 << 20
    )
    assert not outcome.passed and reason in outcome.reason
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_a_flood_of_output_is_nothing_and_the_standard_library_is_there():
    assert run_program("for _ in range(100_000): print('x' * 100)\nimport math, re, collections, typing, heapq").passed


def test_programs_run_only_if_that_is_said():
    with pytest.raises(
        ConfigError,
        match=r"dataset\.metric=pass_at_1: runs programs that the model wrote; allow it with dataset.allow_code_execution=true",
    ):
        specplug.load("dataset=humaneval")
    assert specplug.load("dataset=humaneval", "dataset.metric=none").dataset.metric is Metric.none
    assert specplug.load("dataset=humaneval", "dataset.allow_code_execution=true").dataset.allow_code_execution


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["dataset=jsonl", "dataset.path=x", "dataset.metric=numeric"], "needs dataset.reference_column=NAME"),
        (["dataset.allow_code_execution=true"], "nothing reads it without dataset.metric=pass_at_1"),
        (["dataset.metric=pass_at_1", "dataset.allow_code_execution=true"], "needs dataset.tests"),
        (["dataset.metric=nonsense"], "exact_match"),
    ],
)
def test_metrics_that_cannot_be(overrides, answer):
    with pytest.raises(ConfigError, match=re.escape(answer)):
        specplug.load(*overrides)


def test_a_metric_that_does_not_fit_its_references_and_one_without_its_library(monkeypatch):
    prose = Row("7", "x", "Once upon a time there was a red kite that nobody could ever find again by the lake.")
    for metric in (Metric.numeric, Metric.multiple_choice):
        with pytest.raises(
            ConfigError, match=f"dataset.metric={metric.name}: the reference of row 7, 'Once .* take another"
        ):
            Scorer(Dataset(name="d", metric=metric)).scores(prose)
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith(("sacrebleu", "rouge_score")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith(("sacrebleu", "rouge_score"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", missing)
    for metric, package in ((Metric.bleu, "sacrebleu"), (Metric.chrf, "sacrebleu"), (Metric.rouge, "rouge-score")):
        with pytest.raises(ConfigError, match=f"needs the package {package}; pip install"):
            Scorer(Dataset(name="d", metric=metric))


def sample(baseline, ours, kind="not_compared"):
    return {"score": {"baseline": baseline, "speculative": ours}, "exactness": {"kind": kind}}


def test_the_verdict_on_scores():
    same = scores.task_score([sample(1.0, 1.0, "identical"), sample(0.0, 0.0, "identical")], 200, 0)
    assert same["verdict"] == "equal" and same["interval"] is None and same["baseline"] == 0.5
    noise = scores.task_score([sample(k % 2, (k // 2) % 2) for k in range(40)], 500, 0)
    assert noise["verdict"] == "no difference shown" and noise["interval"][0] <= 0 <= noise["interval"][1]
    worse = scores.task_score([sample(1.0, float(k % 3 == 0)) for k in range(40)], 500, 0)
    assert worse["verdict"] == "differ" and worse["interval"][1] < 0
    assert scores.task_score([], 10, 0)["verdict"] is None
    assert "differ: -0.650" in scores.line(worse) and "equal, since the token ids are" in scores.line(same)


def test_the_interval_covers_the_mean_as_often_as_it_says():
    """400 intervals of 95 %: fewer than 360 that cover come by chance with probability 4e-5 where it holds (the percentile
    bootstrap of 60 prompts covers a little less, about 94 %: 1e-3)."""
    rng = np.random.default_rng(0)
    covered = 0
    for k in range(400):
        low, high = scores.paired_interval(rng.integers(-1, 2, 60).astype(float), 200, k)
        covered += low <= 0 <= high
    assert covered >= 360


def test_scored_by_an_evaluation(tmp_path, capsys, monkeypatch):
    from specplug import plots
    from specplug.cli import run_recipe

    monkeypatch.setattr(plots, "of_run", lambda *_: [])  # they take most of such a short run's time
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"prompt": "Ben has 3 coins. How many?", "answer": "the cat sat on a mat"}) + "\n")
    data = ["dataset=jsonl", f"dataset.path={file}", "dataset.reference_column=answer"]
    quick = ["recipe.warmup=0", "recipe.trace=0", "recipe.compare_assisted=false", "sampling.max_new_tokens=12"]
    assert run_recipe(specplug.load(*data, *quick, "dataset.metric=chrf"), tmp_path / "a") == 0
    score = json.loads(capsys.readouterr().out.splitlines()[-1])["task_score"]
    assert score["metric"] == "chrf" and score["verdict"] == "equal" and score["corpus"]["baseline"] > 0
    assert "chrf: " in (tmp_path / "a" / "report.md").read_text()
    code = ["dataset.metric=pass_at_1", "dataset.allow_code_execution=true", "dataset.tests=assert 0"]
    assert run_recipe(specplug.load(*data, *quick, *code), tmp_path / "b") == 0
    done = json.loads((tmp_path / "b" / "samples.jsonl").read_text())
    assert done["score"]["baseline"] == 0 and "Error" in done["score"]["details"]["baseline"]["reason"]
    with pytest.raises(ConfigError, match="no row has a reference"):
        run_recipe(
            specplug.load(*data, *quick, "dataset.metric=f1", f"dataset.path={write_none(tmp_path)}"), tmp_path / "c"
        )


def write_none(folder) -> str:
    file = folder / "none.jsonl"
    file.write_text(json.dumps({"prompt": "x", "answer": None}) + "\n")
    return str(file)


def test_a_program_finds_its_own_names():
    """Type hints, dataclasses and pickle look them up in the module that is called __main__."""
    source = """
from __future__ import annotations
import pickle
from dataclasses import dataclass, fields
from typing import ClassVar, get_type_hints

@dataclass
class Coin:
    kind: ClassVar[str] = "gold"
    value: int = 5

assert get_type_hints(Coin)["value"] is int and [each.name for each in fields(Coin)] == ["value"]
assert pickle.loads(pickle.dumps(Coin(7))) == Coin(7)
"""
    assert run_program(source).reason == "passed"
