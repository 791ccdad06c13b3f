"""The summary, on samples made by hand."""

import json
import re

import pytest

from specplug.report import headline, write_reports
from specplug.stats import Stats
from specplug.summary import summarize

COSTS = {"cost_coefficient": 0.1, "width_cost": 1.5}


def sample(identifier, category="a", plain=2.0, ours=1.0, assisted=1.5, kind="identical", tokens=10):
    stats = Stats(num_calls=1, num_new_tokens=1, num_prefill_tokens=1)
    stats.count_round(4, 4, False, 5)
    stats.count_round(4, 3, True, 4)

    def side(seconds):
        return {"new_tokens": tokens, "seconds": seconds, "seconds_first": 0.1, "token_ids": [], "text": ""}

    return {
        "id": identifier,
        "category": category,
        "prompt_tokens": 7,
        "plain": side(plain),
        "assisted": assisted and side(assisted),
        "speculative": side(ours) | {"stats": stats.to_dict()},
        "exactness": {"kind": kind},
        "score": {"baseline": 1.0, "speculative": 1.0},
    }


def test_totals_over_totals():
    samples = [sample("1"), sample("2", category="b", plain=4.0, tokens=30)]
    summary = summarize(samples, COSTS, bootstrap=200, seed=0)
    assert summary["tokens_per_second"] == {"plain": 40 / 6, "assisted": 40 / 3, "speculative": 40 / 2}
    assert summary["speedup"] == pytest.approx(3.0)
    assert summary["speedup_vs_assisted"] == pytest.approx(1.5)
    assert summary["speedup_median"] == pytest.approx(3.0)
    assert summary["speedup_decode"] == pytest.approx((38 / 1.8) / (38 / 5.8))
    low, high = summary["speedup_interval"]
    assert 2.0 <= low <= 3.0 <= high <= 4.0
    assert summary["alpha"] == pytest.approx(14 / 16) and summary["mean_acceptance_length"] == pytest.approx(18 / 4)
    assert summary["acceptance_histogram"] == [0, 0, 0, 2, 2]
    assert summary["exactness"]["identical"] == 2 and summary["mismatches"] == []
    score = summary["task_score"]
    assert (score["baseline"], score["speculative"], score["verdict"]) == (1.0, 1.0, "equal")
    assert list(summary["categories"]) == ["a", "b"] and summary["categories"]["b"]["speedup"] == pytest.approx(4.0)


def test_what_was_replayed_and_what_never_is():
    samples = [sample("1"), sample("2")]
    counts = dict(num_passes=20, num_replayed=13, seconds_capture=0.25, not_replayed={"GPT2LMHeadModel: graph=off": 5})
    for each in samples:
        each["speculative"]["stats"] |= counts
    summary = summarize(samples, COSTS, bootstrap=0, seed=0)
    assert summary["replayed"] == 0.65 and summary["not_replayed"] == {"GPT2LMHeadModel: graph=off": 10}
    lines = headline(summary | {"errors": []})
    assert "65.0 % of the passes were replays; recording them took 0.50 s" in lines
    assert "not replayed, 10 passes of GPT2LMHeadModel: graph=off" in lines


def test_a_run_that_was_made_before_replays_were_counted():
    one = sample("1")
    for name in ("num_passes", "num_replayed", "not_replayed"):
        del one["speculative"]["stats"][name]
    one["speculative"]["stats"]["seconds_capture"] = 0.5
    summary = summarize([one], COSTS, bootstrap=0, seed=0)
    assert summary["replayed"] is None and summary["not_replayed"] == {} and summary["num_accepted"] == 7
    assert not [line for line in headline(summary | {"errors": []}) if "replay" in line]


def test_prediction():
    from specplug import theory

    summary = summarize([sample("1"), sample("2")], COSTS, bootstrap=0, seed=0)
    assert summary["predicted_speedup"] == pytest.approx(theory.speedup(14 / 16, 4, 0.1))
    assert summary["predicted_speedup_with_width"] == pytest.approx(theory.speedup(14 / 16, 4, 0.1, 1.5))
    assert summary["speedup_interval"] is None


def test_prediction_over_rounds_that_differ():
    """Lookups: three rounds of four draft nothing, and cost what a pass over one position costs."""
    from specplug import theory

    one = sample("1")
    stats = Stats(num_rounds=8, num_accepted=9, num_tested=10, num_draft_tokens=8)
    stats.drafted.update({0: 6, 4: 2})
    one["speculative"]["stats"] = stats.to_dict()
    costs = {
        "gamma": 8,
        "cost_coefficient": 0.1,
        "width_cost": 1.5,
        "seconds_target_step": 0.6,
        "seconds_plain_step": 1.0,
    }
    summary = summarize([one], costs, bootstrap=0, seed=0)
    tokens = 6 + 2 * theory.expected_tokens(0.9, 4)
    assert summary["predicted_speedup"] == pytest.approx(tokens / (8 + 2 * 4 * 0.1))
    between = 0.6 + (1.5 - 0.6) * 4 / 8
    assert summary["predicted_speedup_with_width"] == pytest.approx(tokens / (6 * 0.6 + 2 * (between + 4 * 0.1)))


def test_a_side_that_failed_once_has_no_figure():
    summary = summarize([sample("1"), sample("2", assisted=None)], COSTS, bootstrap=50, seed=0)
    assert summary["speedup_vs_assisted"] is None and summary["speedup_vs_assisted_interval"] is None
    assert summary["speedup"] == pytest.approx(2.0)


def test_mismatches_are_named():
    summary = summarize([sample("1"), sample("2", kind="mismatch"), sample("3", kind="tie")], COSTS, 0, 0)
    assert summary["exactness"] == {"identical": 1, "tie": 1, "mismatch": 1, "not_compared": 0}
    assert summary["mismatches"] == ["2"]


def test_the_files_of_a_folder_are_enough(tmp_path):
    import specplug
    from specplug.config import to_dict
    from specplug.runs import describe_environment, write_json

    write_json(tmp_path / "config.json", to_dict(specplug.load()))
    write_json(tmp_path / "environment.json", describe_environment("cpu", "float32"))
    write_json(tmp_path / "costs.json", COSTS)
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(sample(str(k))) + "\n" for k in range(3)))
    hostile = "a|b`<img src=x>\nc"
    with (tmp_path / "samples.jsonl").open("a") as samples:
        samples.write(json.dumps(sample(hostile, category=hostile, kind="mismatch")) + "\n")
    environment = json.loads((tmp_path / "environment.json").read_text())
    write_json(tmp_path / "environment.json", environment | {"command": ["specplug", "recipe.prompt=it's\n```\n<b>"]})
    summary = write_reports(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    report = (tmp_path / "report.md").read_text()
    assert "| all | 4 |" in report and "3 identical, 0 tie, 1 mismatch of 4" in report and "2.00x" in report
    assert "| a\\|b\\`&lt;img src=x&gt; c | 1 |" in report and "Mismatch in: a\\|b\\`&lt;img src=x&gt; c." in report
    assert "````text\nspecplug 'recipe.prompt=it'\"'\"'s\n```\n<b>'\n````" in report  # to be pasted into a shell
    for link in re.findall(r"!\[[^]]+\]\(([^)]+)\)", report):
        assert (tmp_path / link).read_text().startswith("<svg ")
    assert report.count("](plots/") == len(list((tmp_path / "plots").iterdir())) >= 5
    page = (tmp_path / "report.html").read_text()
    assert "a|b`&lt;img src=x&gt;" in page and "<img" not in page
    assert 'id="inspector"' not in page  # nothing was traced
