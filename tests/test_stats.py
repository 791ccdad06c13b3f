"""Counts and the rates derived from them, on rounds worked out by hand."""

import json

import pytest

from specplug.stats import Call, Stats


def example() -> Stats:
    stats = Stats(num_calls=1, num_new_tokens=1, num_prefill_tokens=1)
    stats.count_round(num_drafted=4, num_accepted=4, rejected=False, num_tokens=5)
    stats.count_round(num_drafted=4, num_accepted=1, rejected=True, num_tokens=2)
    stats.count_round(num_drafted=4, num_accepted=0, rejected=True, num_tokens=1)
    stats.count_round(num_drafted=2, num_accepted=2, rejected=False, num_tokens=2)  # ended by the second draft
    stats.count_round(num_drafted=0, num_accepted=0, rejected=False, num_tokens=1)
    return stats


def test_rates():
    stats = example()
    assert (stats.num_new_tokens, stats.num_rounds, stats.num_draft_tokens, stats.num_accepted) == (12, 5, 14, 7)
    assert stats.num_tested == 9
    assert stats.alpha == 7 / 9
    assert stats.draft_acceptance_rate == 7 / 14
    assert stats.mean_acceptance_length == 11 / 5
    assert stats.acceptance_histogram == [2, 1, 1, 0, 1]
    assert stats.acceptance_by_position == [3 / 4, 2 / 4, 1 / 3, 1 / 3]


def test_without_data_there_is_no_rate():
    stats = Stats()
    assert stats.alpha is stats.draft_acceptance_rate is stats.mean_acceptance_length is stats.overhead is None
    assert stats.acceptance_histogram == stats.acceptance_by_position == []


def test_plain_rounds_have_length_one():
    stats = Stats(num_new_tokens=1, num_prefill_tokens=1)
    for _ in range(3):
        stats.count_round(0, 0, False, 1)
    assert stats.mean_acceptance_length == 1.0


def test_adding_and_saving():
    total = example() + Call(num_calls=1, engine="rounds", num_new_tokens=3)
    assert (total.num_calls, total.num_new_tokens, total.accepted[0]) == (2, 15, 2)
    assert Stats.from_dict(json.loads(json.dumps(total.to_dict()))) == total


def test_vllm_names_count_the_rounds_that_drafted():
    """The example of vLLM's pull request 48915, with two rounds without drafts that are no steps there."""
    stats = Stats(num_calls=1, num_new_tokens=1, num_prefill_tokens=1)
    for kept, rounds in enumerate([39, 1, 0, 3]):
        for _ in range(rounds):
            stats.count_round(3, kept, kept < 3, kept + 1)
    for _ in range(2):
        stats.count_round(0, 0, False, 1)
    assert stats.speculative_decoding() == {
        "mean_acceptance_length": pytest.approx(1.2325581395348837),
        "draft_acceptance_rate": pytest.approx(0.07751937984496124),
        "acceptance_histogram": [39, 1, 0, 3],
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
        "num_spec_tokens": 3,
    }
    nothing = Stats().speculative_decoding()
    assert nothing["mean_acceptance_length"] is None and nothing["acceptance_histogram"] == []
