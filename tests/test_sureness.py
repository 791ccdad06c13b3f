"""Stopping inside a round: what is learned about the draft's sureness, and when that says stop."""

import json

import pytest
import torch
from conftest import make_model, noisy_copy, prompt

import specplug
from specplug.schedule import AdaptiveSchedule, Round
from specplug.sureness import Judge, Sureness


def test_rates_are_learned_by_how_sure_the_draft_was():
    sureness = Sureness()
    low, high = 0, len(Sureness.EDGES)
    assert sureness.rate(low) == sureness.rate(high) == Sureness.PRIOR
    for _ in range(200):
        sureness.observe([high, low, high], 1)  # the second is refused, the third never looked at
    assert sureness.rate(high) > 0.95 and sureness.rate(low) < 0.05
    assert sureness.tested[high] == pytest.approx(sureness.tested[low])


def test_a_round_ends_where_the_next_draft_is_not_worth_its_price():
    sureness = Sureness()
    for _ in range(2000):
        sureness.observe([8, 8, 2], 2)  # kept when it is sure, refused when it is not
    judge = Judge(sureness)
    judge.begin(0.5)
    assert [judge(0.85), judge(0.85), judge(0.25)] == [True, True, False]
    assert judge.places == [8, 8]
    judge.begin(0.5)
    assert judge(0.25), "a round that drafts has one draft at least"
    assert not judge(0.85), "what stands behind an unlikely draft is unlikely to be reached"
    judge.begin(0.0)
    assert all(judge(0.05) for _ in range(20)), "a trial goes all the way"


def run(plan, gamma_of, rounds=400):
    """Rounds whose costs and acceptance are made up: even ones are easy, in odd ones the third draft fails and looks it."""
    made = []
    for number in range(rounds):
        gamma = plan.next_gamma()
        hard = number % 2
        drafts = 0
        while drafts < gamma and plan.judge(0.3 if hard and drafts >= 2 else 0.97):
            drafts += 1
        kept = min(drafts, 2) if hard else drafts
        made.append((hard, gamma, drafts))
        plan.observe([Round(drafts, kept, 0)], kept + 1, 1.0 + 0.15 * drafts)
    return made


def test_the_adaptive_schedule_stops_where_it_does_not_pay():
    plan = AdaptiveSchedule(8).start(1, False)
    plan.use_judge()
    late = run(plan, None)[-100:]
    easy = [drafts for hard, gamma, drafts in late if not hard and gamma]
    hard = [drafts for hard, gamma, drafts in late if hard and gamma]
    assert sum(easy) / len(easy) > 7 and sum(hard) / len(hard) < 3


def test_lookups_batches_and_trees_have_no_judge():
    assert AdaptiveSchedule().start(1, True).use_judge() is None
    assert AdaptiveSchedule(tree_depth=3).start(1, False).use_judge() is None
    assert AdaptiveSchedule().start(2, False).judge is None


def test_frozen_estimates_hold_it_too(tmp_path):
    schedule = AdaptiveSchedule(8)
    plan = schedule.start(1, False)
    plan.use_judge()
    run(plan, None)
    schedule.save(tmp_path / "schedule.json")
    frozen = AdaptiveSchedule(8, tmp_path / "schedule.json")
    again = frozen.start(1, False)
    again.use_judge()
    late = run(again, None)[-100:]
    assert {drafts for hard, _, drafts in late if hard} == {2} and {drafts for hard, _, drafts in late if not hard} == {
        8
    }
    saved = json.loads((tmp_path / "schedule.json").read_text())
    saved["1"]["sureness"]["kept"] = [1.0]
    (tmp_path / "schedule.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="not a file that an adaptive schedule wrote"):
        AdaptiveSchedule(8, tmp_path / "schedule.json")


@pytest.mark.parametrize("options", [dict(do_sample=False), dict(do_sample=True, temperature=0.5)])
def test_a_draft_is_asked_before_each_token(options):
    model = make_model("llama")
    schedule = AdaptiveSchedule(6)
    with specplug.attach(model, noisy_copy(model), schedule=schedule) as plugin:
        for seed in range(4):
            torch.manual_seed(seed)
            model.generate(prompt(seed=seed), max_new_tokens=50, **options)
        assert plugin.stats.num_draft_tokens > 0
    assert sum(schedule.states[1].sureness.tested) > 0


@pytest.mark.parametrize("draft", ["lookup", "chain"])
def test_who_does_not_ask_is_not_judged(draft):
    """A chain's lookup would propose as many as it may, and nobody would stop it."""
    model = make_model("llama")
    schedule = AdaptiveSchedule(6)
    named = "lookup" if draft == "lookup" else ["lookup", noisy_copy(model)]
    with specplug.attach(model, named, schedule=schedule):
        for seed in range(3):
            model.generate(prompt(seed=seed), max_new_tokens=50, do_sample=False)
    assert sum(schedule.states[1].sureness.tested) == 0
