"""Sampling with the plugin has the target's distribution.

The law of the first tokens is computed from the target by enumeration, and 500 sampled answers are compared with it by
chi-square tests; where they look odd, 2,000 others decide (laws.py). Each test fails by chance with probability below 1e-7;
the negative controls fail with certainty.
"""

from functools import partial

import pytest
import torch
from conftest import make_model, noisy_copy
from laws import AGAIN, PROMPT, SETTINGS, WRONG, exact_law, has_the_law, pvalue, sampled_counts
from scipy.stats import chi2_contingency

import specplug
from specplug.drafters import Proposal
from specplug.drafters.chain import ChainDrafter
from specplug.drafters.lookup import LookupDrafter
from specplug.drafters.model import ModelDrafter, ModelSession
from specplug.schedule import AdaptiveSchedule, ConfidenceSchedule


@pytest.mark.parametrize(
    "drafter, settings",
    [*(("model", name) for name in SETTINGS), ("lookup", "plain"), ("lookup", "top-p"), ("lookup", "custom processor")],
)
def test_samples_have_the_law_of_the_target(six_tokens, drafter, settings):
    law = exact_law(six_tokens, SETTINGS[settings])
    assert law.sum().item() == pytest.approx(1)
    draft = noisy_copy(six_tokens, scale=0.1) if drafter == "model" else LookupDrafter(min_ngram=1)
    assert has_the_law(partial(sampled_counts, six_tokens, draft, SETTINGS[settings]), law)


class Timed(AdaptiveSchedule):
    """Each draft takes a fifth of a pass, whatever the machine does meanwhile: some pay, and where the draft is unsure some do not."""

    def start(self, num_rows, costs_nothing):
        plan = super().start(num_rows, costs_nothing)
        observe = plan.observe
        plan.observe = lambda rounds, num_tokens, seconds: observe(
            rounds, num_tokens, 1 + 0.2 * max(each.num_drafts for each in rounds)
        )
        return plan


@pytest.mark.parametrize("schedule", [ConfidenceSchedule(2, 0.45), Timed(2)])
def test_a_schedule_does_not_change_the_law(six_tokens, schedule):
    draft = noisy_copy(six_tokens, scale=0.1)
    assert has_the_law(partial(sampled_counts, six_tokens, draft, {}, schedule=schedule), exact_law(six_tokens, {}))


def test_a_chain_keeps_the_law_where_its_first_member_is_unsure(six_tokens):
    """How many tokens a draft draws before it is unsure depends on what they are; so they must not be left out for being few."""
    settings = {"temperature": 1.5}
    draft = ChainDrafter([ModelDrafter(noisy_copy(six_tokens, scale=0.1)), LookupDrafter(min_ngram=1)])
    count = partial(sampled_counts, six_tokens, draft, settings, schedule=ConfidenceSchedule(2, 0.6), more=2)
    assert has_the_law(count, exact_law(six_tokens, settings))
    assert all(each["kept"] for each in draft.counts)


@pytest.mark.parametrize("settings", ["plain", "temperature 0.7", "repetition penalty"])
def test_the_token_rule_too(six_tokens, settings):
    """The other tests take the default, the block rule."""
    draft = noisy_copy(six_tokens, scale=0.1)
    count = partial(sampled_counts, six_tokens, draft, SETTINGS[settings], rule="token")
    assert has_the_law(count, exact_law(six_tokens, SETTINGS[settings]))


class StatesWrongProbs(ModelDrafter):
    """Negative control: draws from its distribution and states another, as the incumbent once did."""

    def start(self, request):
        session = ModelSession(self, request)
        propose = session.propose

        def lying(ids, gamma):
            proposal = propose(ids, gamma)
            return Proposal(
                proposal.tokens,
                None if proposal.probs is None else proposal.probs.sqrt() / proposal.probs.sqrt().sum(-1, keepdim=True),
            )

        session.propose = lying
        return session


class ArgmaxAsSample(ModelDrafter):
    """Negative control: drafts the argmax and states the distribution (the fault of the incumbent's Gemma 4 drafter)."""

    def start(self, request):
        session = ModelSession(self, request)
        propose = session.propose

        def argmax(ids, gamma):
            probs = propose(ids, 1).probs
            return Proposal(probs.argmax(-1), probs)

        session.propose = argmax
        return session


@pytest.mark.parametrize("broken", [StatesWrongProbs, ArgmaxAsSample])
def test_a_draft_that_states_another_distribution_is_caught(six_tokens, broken):
    draft = broken(noisy_copy(six_tokens, scale=0.1))
    assert pvalue(sampled_counts(six_tokens, draft, {}, AGAIN // 2), exact_law(six_tokens, {})) < WRONG


def test_a_residual_that_is_not_one_is_caught(six_tokens, monkeypatch):
    import specplug.verify

    law = exact_law(six_tokens, {})
    monkeypatch.setattr(specplug.verify, "residual", lambda tokens, draft, target: target[:, : tokens.shape[1]])
    draft = noisy_copy(six_tokens, scale=0.1)
    assert pvalue(sampled_counts(six_tokens, draft, {}, AGAIN // 2, rule="token"), law) < WRONG


DEFAULTS = {
    "pipeline": {"temperature": 0.7},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "repetition penalty 1.05": {"repetition_penalty": 1.05},
}


def least_pvalue(settings, kind=ModelDrafter) -> float:
    """Two samples from a vocabulary of 64, 20,000 texts of plain generate and 600 of ours: the lesser of the chi-square tests of
    their first two tokens and of the next two, times two."""
    model = make_model(seed=6)
    model.generation_config.eos_token_id = None
    model.generation_config.top_k = 0
    # One more token than is looked at, so that two drafts have room.
    call = {"do_sample": True, "max_new_tokens": 4, **DEFAULTS[settings]}
    torch.manual_seed(0)
    plain = model.generate(PROMPT.expand(20_000, -1), **call)[:, -4:]
    with specplug.attach(model, kind(noisy_copy(model, scale=0.02)), gamma=2, engine="rounds") as plugin:
        plugin.record_after = 0  # as in laws.py
        model.generate(PROMPT, **call | {"max_new_tokens": 30})
        ours = torch.cat([model.generate(PROMPT, **call)[:, -4:] for _ in range(600)])
    assert 0.1 < plugin.stats.alpha < 0.95, "accepted and recovered tokens have both to count"
    found = []
    for place in (0, 1):
        counts = torch.stack(
            [(64 * texts[:, place] + texts[:, place + 1]).bincount(minlength=64**2) for texts in (plain, ours)]
        )
        common = counts[0] * len(ours) / len(plain) >= 5
        table = torch.cat([counts[:, common], counts[:, ~common].sum(1, keepdim=True)], dim=1)
        found.append(chi2_contingency(table[:, table.sum(0) > 0]).pvalue)
    return 2 * min(found)


@pytest.mark.parametrize("settings", DEFAULTS)
def test_samples_are_those_of_plain_generate(settings):
    assert least_pvalue(settings) > 1e-6


@pytest.mark.parametrize("broken", [StatesWrongProbs, ArgmaxAsSample])
def test_samples_that_are_others_are_caught(broken):
    assert least_pvalue("pipeline", broken) < 1e-6
