"""Sampled texts against the law of the target: all of it by enumeration, and what calls with the plugin drew, by chi-square."""

import itertools
from collections.abc import Callable

import torch
from scipy.stats import chisquare
from transformers import LogitsProcessor, LogitsProcessorList

import specplug
from specplug.schedule import FixedSchedule

V, TOKENS = 6, 3  # V: of conftest.six_tokens
FIRST, AGAIN = 500, 2000  # texts
ODD, WRONG = 1 / 10, 1e-6  # p-values
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


def counted(texts: torch.Tensor) -> torch.Tensor:
    """How often each text came, of (N, TOKENS) or more tokens a text, of which the first count."""
    numbers = texts[:, :TOKENS] @ V ** torch.arange(TOKENS - 1, -1, -1)
    return numbers.bincount(minlength=V**TOKENS).double()


def sampled_counts(target, draft, settings, samples=FIRST, seed=0, gamma=2, schedule=None, rule="block", more=1):
    """`more` tokens than are looked at: without one the first round has no room for two drafts.

    Passes are recorded at once, in a longer text, as they are after a while in any other: with the same results, see
    test_capture.py, in half the time.
    """
    torch.manual_seed(seed)
    call = arguments(settings) | {"max_new_tokens": TOKENS + more}
    schedule = schedule or FixedSchedule(gamma)
    with specplug.attach(target, draft, schedule=schedule, engine="rounds", verify=rule) as plugin:
        plugin.record_after = 0
        target.generate(PROMPT, **call | {"max_new_tokens": 30})
        plugin.reset_stats()
        texts = torch.cat([target.generate(PROMPT, **call)[:, PROMPT.shape[1] :] for _ in range(samples)])
    assert 0.02 < plugin.stats.alpha < 1, "a draft that always or never agrees tests nothing"
    return counted(texts)


def pvalue(counts: torch.Tensor, law: torch.Tensor) -> float:
    """The least of three tests, times three: of whole texts, of their first two tokens, and of their last two.

    What is rare, below 5 expected, is put together in one class. A text of probability 0 must not occur.
    """
    if counts[law == 0].sum() > 0:
        return 0.0
    least = 1.0
    for dims in ((), (2,), (0,)):
        seen, expected = (each.reshape(V, V, V).sum(dims) if dims else each for each in (counts, law * counts.sum()))
        rare = expected < 5
        seen, expected = (torch.cat([each[~rare], each[rare].sum()[None]]) for each in (seen, expected))
        seen, expected = seen[expected > 0], expected[expected > 0]
        least = min(least, chisquare(seen, expected * (seen.sum() / expected.sum())).pvalue)
    return min(1.0, 3 * least)


def has_the_law(count: Callable[[int, int], torch.Tensor], law: torch.Tensor) -> bool:
    """Do texts have this law? `count(samples, seed)` draws so many and counts them.

    One sample in ten looks odd by chance; then another one is drawn, larger, which alone decides. A false alarm has a probability
    below 1e-7. By simulation faults in one token or two are found more often than by one test of 1,500 whole texts, and faults
    that are spread over whole texts a little less often (at worst 89 times in a hundred, not 98).
    """
    return pvalue(count(FIRST, 0), law) >= ODD or pvalue(count(AGAIN, 1), law) >= WRONG
