"""Random sampled calls have the law of plain `generate`; see fuzz_law.py, which is a command too."""

import random

import fuzz_law
import pytest

from specplug import verify

SEED, CASES = 5, 6


pytestmark = pytest.mark.usefixtures("quiet")


def test_random_calls_have_the_law_of_the_target():
    failures, served = fuzz_law.run(SEED, range(CASES), calls=150)
    assert not failures, "\n".join(failures)
    assert "failed" not in served


def test_a_residual_that_is_not_one_is_found(monkeypatch):
    """The negative control, in a case that otherwise has the law."""
    case = fuzz_law.draw_case(random.Random("0-0")) | {
        "architecture": "Llama", "drafter": "model", "noise": 0.3, "schedule": "fixed", "gamma": 2, "verify": "token", "engine": "auto",
        "lengths": [4, 2], "returns": 2, "more": 1, "eos": None, "seeded": False, "warpers": {}, "processors": {},
    }  # fmt: skip
    target = fuzz_law.build("Llama")
    laws = fuzz_law.exact_law(case, target)
    assert fuzz_law.pvalue(fuzz_law.counted(case, target, 250, seed=1)[0], laws) > fuzz_law.WRONG
    monkeypatch.setattr(verify, "residual", lambda tokens, draft, target: target[:, : tokens.shape[1]])
    assert fuzz_law.pvalue(fuzz_law.counted(case, target, 250, seed=1)[0], laws) < fuzz_law.WRONG
