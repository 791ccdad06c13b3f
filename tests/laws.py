"""Sampled texts against the law of the target: all of it by enumeration, and what calls with the plugin drew, by chi-square."""

import itertools

import torch
from scipy.stats import chisquare
from transformers import LogitsProcessor, LogitsProcessorList

import specplug
from specplug.schedule import FixedSchedule

V, TOKENS, SAMPLES = 6, 3, 1500  # V: of conftest.six_tokens
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


def arguments(settings: dict) -> dict:
    settings = dict(settings)
    custom = settings.pop("custom", False)
    extra = {"logits_processor": LogitsProcessorList([EvenTokensLikelier()])} if custom else {}
    return {"do_sample": True, "max_new_tokens": TOKENS, **settings, **extra}


class Force(LogitsProcessor):
    """Leads plain generate down all texts at once, one a row; it comes last, so the scores it sees are the processed ones."""

    def __init__(self):
        self.texts = torch.tensor(list(itertools.product(range(V), repeat=TOKENS)))
        self.probability = torch.ones(len(self.texts), dtype=torch.float64)

    def __call__(self, input_ids, scores):
        tokens = self.texts[:, input_ids.shape[1] - PROMPT.shape[1], None]
        self.probability *= scores.double().softmax(-1).gather(1, tokens)[:, 0]
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens, 0.0)


def exact_law(target, settings) -> torch.Tensor:
    """Probability of each text of TOKENS tokens, from the scores that plain generate computes."""
    force, original = Force(), target._get_logits_processor
    target._get_logits_processor = lambda *a, **k: LogitsProcessorList([*original(*a, **k), force])
    try:
        target.generate(PROMPT.expand(len(force.texts), -1), **arguments(settings))
    finally:
        del target._get_logits_processor
    return force.probability


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
