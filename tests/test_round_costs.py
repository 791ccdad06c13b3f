"""Costs of passes are taken from simulated rounds: drafts, then the target, each as wide as rounds have them."""

import pytest
from conftest import make_model, noisy_copy, prompt
from stand_in import Replayed

import specplug
from specplug import capture, fixed
from specplug.cli import run_recipe
from specplug.config import ConfigError
from specplug.drafters.build import make_drafter
from specplug.drafters.lookup import LookupDrafter
from specplug.drafters.model import ModelDrafter
from specplug.round_costs import IN_A_TURN, MOST_DRAFTS, RoundCosts, measure_rounds


def test_costs_are_positive_and_a_lookup_is_nearly_free(llama, llama_draft):
    for drafter in (ModelDrafter(llama_draft), LookupDrafter()):
        costs = measure_rounds(llama, drafter, prompt(20), [2, 4], repeats=5)
        assert sorted(costs.target) == [0, 2, 4] and all(seconds > 0 for seconds in costs.target.values())
        assert costs.plain_step > 0 and costs.first_draft > 0
        assert (costs.later_draft > 0) == isinstance(drafter, ModelDrafter)
    assert costs.cost_coefficient(4) < 0.5 and costs.drafting(4) == costs.first_draft and costs.drafting(0) == 0


@pytest.mark.parametrize("gamma", [1, 2, 8])
def test_passes_come_as_in_rounds(llama, llama_draft, gamma, monkeypatch):
    """By the widths that the models are given: so many drafts, at most MOST_DRAFTS, then all of the round's positions."""
    seen = []
    for name, model in (("target", llama), ("draft", llama_draft)):
        forward = model.forward

        def noted(*args, name=name, forward=forward, **kwargs):
            seen.append((name, kwargs["input_ids"].shape[1]))
            return forward(*args, **kwargs)

        monkeypatch.setattr(model, "forward", noted)
    measure_rounds(llama, ModelDrafter(llama_draft), prompt(20), [gamma], graph="off", repeats=1)
    simulated = [("draft", 1)] * min(gamma, MOST_DRAFTS) + [("target", gamma + 1)]
    assert seen[-2 * len(simulated) :] == 2 * simulated
    assert [each for each in seen if each == ("target", 20)] and ("target", 1) in seen


@pytest.mark.parametrize("length", [3, 250, 256])
def test_a_text_as_long_as_the_context(length):
    """Passes stay within the positions that a model has, and where they have been recorded they are replayed."""
    model = make_model("gpt2")
    draft = noisy_copy(model)
    costs = measure_rounds(model, ModelDrafter(draft), prompt(length), [8], repeats=8)
    assert costs.target[8] > 0
    assert all(each.ready for each in capture._KNOWN[model][1].values()) and capture._KNOWN[draft][1]


def ready(model):
    """Numbers of rows and widths that are replayed."""
    _, recordings = capture._KNOWN.get(model, (None, {}))
    return {shape for each in recordings.values() for shape in each.ready}


@pytest.mark.parametrize("length, within", [(3, True), (40, False)])
def test_windows_are_timed_by_the_passes_that_rounds_have(length, within):
    """Up to two windows of 8 positions by recordings of ragged passes, behind that as transformers makes them."""
    model = make_model("mistral")
    draft = noisy_copy(model)
    costs = measure_rounds(model, ModelDrafter(draft), prompt(length), [2, 4], repeats=8)
    assert all(seconds > 0 for seconds in costs.target.values()) and costs.later_draft > 0
    assert ready(model) == ({(1, 1), (1, 3), (1, 5)} if within else set())
    assert ready(draft) == ({(1, 1)} if within else set())


def test_where_a_device_has_graphs_it_is_their_passes_that_are_timed(llama, llama_draft, monkeypatch):
    monkeypatch.setitem(fixed.GRAPHS, "cpu", Replayed)
    Replayed.made = Replayed.replays = 0
    costs = measure_rounds(llama, ModelDrafter(llama_draft), prompt(20), [4], repeats=1)
    assert costs.target[4] > 0 and costs.later_draft > 0
    # The first use of each width is one that captures: one and five positions of the target, one of the draft.
    assert Replayed.made == 3 and Replayed.replays == 2 * IN_A_TURN * (1 + 1 + MOST_DRAFTS)
    for model in (llama, llama_draft):
        assert fixed._IDLE.get(model)  # given back
        fixed.release(model)


def test_sums():
    costs = RoundCosts(10.0, {0: 8.0, 4: 12.0}, 3.0, 2.0)
    assert costs.drafting(4) == 9 and costs.seconds(4) == 21 and costs.seconds(0) == 8
    assert costs.cost_coefficient(4) == pytest.approx(0.225) and costs.width_cost(4) == 1.2
    lookup = RoundCosts(10.0, {0: 8.0, 4: 12.0}, 3.0, 0.0)
    assert lookup.drafting(4) == 3 and lookup.cost_coefficient(4) == pytest.approx(0.3)
    assert lookup.to_dict(4)["seconds_draft_step"] == pytest.approx(3.0)


def test_a_chain_behind_a_text_of_one_token(llama, llama_draft):
    """Its second member is a model, which needs a token to stand on, and then one to read."""
    chain = make_drafter(["lookup", llama_draft], llama, None)
    costs = measure_rounds(llama, chain, prompt(1), [2], repeats=2)
    assert costs.first_draft > 0 and costs.target[2] > 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("recipe=bench recipe.gammas=[2,100000]", "recipe.gammas or schedule.gamma: a round of 100000 drafts"),
        ("recipe=calibrate recipe.max_gamma=100000", "recipe.max_gamma=100000: a round of 100000 drafts"),
    ],
)
def test_rounds_that_are_longer_than_the_context_are_one_line(override, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run_recipe(specplug.load(*override.split(), "recipe.limit=1"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
