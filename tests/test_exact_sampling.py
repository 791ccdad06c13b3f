"""Sampling with the plugin has the target's distribution.

The law of the first tokens is computed from the target by enumeration, and 1,500 sampled answers are compared with it by
a chi-square test. Each test fails by chance with probability below 1e-6; the negative controls fail with certainty.
"""

import itertools

import pytest
import torch
from conftest import make_model, noisy_copy
from scipy.stats import chisquare
from transformers import LogitsProcessor, LogitsProcessorList

import specplug
from specplug.drafters import Proposal
from specplug.drafters.chain import ChainDrafter
from specplug.drafters.lookup import LookupDrafter
from specplug.drafters.model import ModelDrafter, ModelSession
from specplug.schedule import AdaptiveSchedule, ConfidenceSchedule, FixedSchedule

V, TOKENS, SAMPLES = 6, 3, 1500
PROMPT = torch.tensor([[3, 4, 5, 3, 4]])
SETTINGS = {
    "plain": {},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.5, top-k": {"temperature": 1.5, "top_k": 3},
    "top-p": {"top_p": 0.9, "temperature": 1.3},
    "min-p": {"min_p": 0.2},
    "repetition penalty": {"repetition_penalty": 1.4, "temperature": 0.7},
    "custom processor": {"custom": True},
}


class EvenTokensLikelier(LogitsProcessor):
    """Not one that specplug knows: goes the way of stateful ones, and not to the draft."""

    def __call__(self, input_ids, scores):
        return scores + (torch.arange(V) % 2 == input_ids.shape[1] % 2) * 1.5


@pytest.fixture(scope="module")
def target():
    model = make_model(vocab_size=V, seed=3)
    model.generation_config.eos_token_id = None
    model.generation_config.top_k = 0
    return model


def arguments(settings: dict) -> dict:
    settings = dict(settings)
    custom = settings.pop("custom", False)
    extra = {"logits_processor": LogitsProcessorList([EvenTokensLikelier()])} if custom else {}
    return {"do_sample": True, "max_new_tokens": TOKENS, **settings, **extra}


def exact_law(target, settings) -> torch.Tensor:
    """Probability of each text of TOKENS tokens, from the scores that plain generate computes."""

    class Force(LogitsProcessor):
        """Leads plain generate down one text; it comes last, so the scores it sees are the processed ones."""

        def __init__(self, text):
            self.text, self.probability = text, 1.0

        def __call__(self, input_ids, scores):
            token = self.text[input_ids.shape[1] - PROMPT.shape[1]]
            self.probability *= scores.double().softmax(-1)[0, token].item()
            return torch.full_like(scores, float("-inf")).index_fill_(1, torch.tensor([token]), 0.0)

    law = []
    original = target._get_logits_processor
    for text in itertools.product(range(V), repeat=TOKENS):
        force = Force(text)
        target._get_logits_processor = lambda *a, force=force, **k: LogitsProcessorList([*original(*a, **k), force])
        target.generate(PROMPT, **arguments(settings))
        del target._get_logits_processor
        law.append(force.probability)
    return torch.tensor(law, dtype=torch.float64)


def sampled_counts(target, draft, settings, gamma=2, schedule=None, rule="block", more=1) -> torch.Tensor:
    """`more` tokens than are looked at: without one the first round has no room for two drafts."""
    torch.manual_seed(0)
    counts = torch.zeros(V**TOKENS, dtype=torch.float64)
    schedule = schedule or FixedSchedule(gamma)
    with specplug.attach(target, draft, schedule=schedule, engine="rounds", verify=rule) as plugin:
        for _ in range(SAMPLES):
            call = arguments(settings) | {"max_new_tokens": TOKENS + more}
            a, b, c = target.generate(PROMPT, **call)[0, PROMPT.shape[1] :][:TOKENS].tolist()
            counts[(a * V + b) * V + c] += 1
    assert 0.02 < plugin.stats.alpha < 1, "a draft that always or never agrees tests nothing"
    return counts


def pvalue(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Rare texts, below 5 expected, are put together in one class. A text of probability 0 must not occur."""
    if counts[law == 0].sum() > 0:
        return 0.0
    rare = law * SAMPLES < 5
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([law[~rare], law[rare].sum()[None]]) * SAMPLES
    return chisquare(seen[expected > 0], expected[expected > 0] * (seen.sum() / expected.sum())).pvalue


@pytest.mark.parametrize(
    "drafter, settings",
    [*(("model", name) for name in SETTINGS), ("lookup", "plain"), ("lookup", "top-p"), ("lookup", "custom processor")],
)
def test_samples_have_the_law_of_the_target(target, drafter, settings):
    law = exact_law(target, SETTINGS[settings])
    assert law.sum().item() == pytest.approx(1)
    draft = noisy_copy(target, scale=0.1) if drafter == "model" else LookupDrafter(min_ngram=1)
    assert pvalue(sampled_counts(target, draft, SETTINGS[settings]), law) > 1e-6


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
def test_a_schedule_does_not_change_the_law(target, schedule):
    law = exact_law(target, {})
    assert pvalue(sampled_counts(target, noisy_copy(target, scale=0.1), {}, schedule=schedule), law) > 1e-6


def test_a_chain_keeps_the_law_where_its_first_member_is_unsure(target):
    """How many tokens a draft draws before it is unsure depends on what they are; so they must not be left out for being few."""
    settings = {"temperature": 1.5}
    draft = ChainDrafter([ModelDrafter(noisy_copy(target, scale=0.1)), LookupDrafter(min_ngram=1)])
    counts = sampled_counts(target, draft, settings, schedule=ConfidenceSchedule(2, 0.6), more=2)
    assert pvalue(counts, exact_law(target, settings)) > 1e-6
    assert all(each["kept"] for each in draft.counts)


@pytest.mark.parametrize("settings", ["plain", "temperature 0.7", "repetition penalty"])
def test_the_token_rule_too(target, settings):
    """The other tests take the default, the block rule."""
    law = exact_law(target, SETTINGS[settings])
    assert pvalue(sampled_counts(target, noisy_copy(target, scale=0.1), SETTINGS[settings], rule="token"), law) > 1e-6


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
def test_a_draft_that_states_another_distribution_is_caught(target, broken):
    law = exact_law(target, {})
    assert pvalue(sampled_counts(target, broken(noisy_copy(target, scale=0.1)), {}), law) < 1e-6


def test_a_residual_that_is_not_one_is_caught(target, monkeypatch):
    import specplug.verify

    law = exact_law(target, {})
    monkeypatch.setattr(specplug.verify, "residual", lambda tokens, draft, target: target[:, : tokens.shape[1]])
    assert pvalue(sampled_counts(target, noisy_copy(target, scale=0.1), {}, rule="token"), law) < 1e-6


DEFAULTS = {
    "pipeline": {"temperature": 0.7},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "repetition penalty 1.05": {"repetition_penalty": 1.05},
}


@pytest.mark.parametrize("settings", DEFAULTS)
def test_samples_are_those_of_plain_generate(settings):
    """Two samples, of plain generate and of ours, from a vocabulary of 64; false alarms below 1e-6 (chi-square).

    The draft is a model whose alpha is about a half, so that accepted and recovered tokens both count.
    """
    from scipy.stats import chi2_contingency

    model = make_model(seed=6)
    model.generation_config.eos_token_id = None
    model.generation_config.top_k = 0
    call = {"do_sample": True, "max_new_tokens": 3, **DEFAULTS[settings]}
    counts = torch.zeros(2, 64, 3)
    torch.manual_seed(0)
    for side in (0, 1):
        plugin = specplug.attach(model, noisy_copy(model, scale=0.1), gamma=2, engine="rounds") if side else None
        for _ in range(1200):
            for position, token in enumerate(model.generate(PROMPT, **call)[0, -3:].tolist()):
                counts[side, token, position] += 1
        if plugin is not None:
            assert 0.1 < plugin.stats.alpha < 0.95
            plugin.detach()
    for position in range(3):
        common = counts[:, :, position].sum(0) >= 10
        table = torch.cat([counts[:, common, position], counts[:, ~common, position].sum(1, keepdim=True)], dim=1)
        assert chi2_contingency(table[:, table.sum(0) > 0]).pvalue > 1e-6 / 12
