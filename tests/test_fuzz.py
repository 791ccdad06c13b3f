"""Random calls with and without the plugin; see fuzz.py, which is a command too."""

import random

import fuzz
import pytest

import specplug.lookahead

CASES = 500


pytestmark = pytest.mark.usefixtures("quiet")


def test_random_calls_agree(capsys):
    seed = random.SystemRandom().randrange(10**6)
    with capsys.disabled():
        print(f" [fuzz seed {seed}]", end="", flush=True)
    failures, served = fuzz.run(seed, range(CASES))
    assert not failures, f"python tests/fuzz.py --seed {seed}:\n" + "\n".join(failures)
    assert served["rounds"] > CASES / 10 and served["lookahead"] > CASES / 10, served


@pytest.mark.parametrize("name", ["align", "crop"])
def test_a_wrong_roll_back_is_found_and_shrunk(name, monkeypatch):
    right = getattr(specplug.lookahead.caches, name)

    def one_too_few(cache, remove, *length):
        return right(cache, (remove - 1).clamp(min=0) if length else max(remove - 1, 0), *length)

    monkeypatch.setattr(specplug.lookahead.caches, name, one_too_few)
    failures, _ = fuzz.run(3, range(60))
    assert failures and all("python tests/fuzz.py --json" in failure for failure in failures)
