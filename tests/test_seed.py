"""`generate(..., specplug={"seed": 1})`: the same text whatever drafted it, with the law of the target over seeds."""

from functools import partial

import numpy
import pytest
import torch
from conftest import PAD, make_model, noisy_copy, prompt
from laws import AGAIN, PROMPT, SETTINGS, TOKENS, WRONG, counted, exact_law, has_the_law, pvalue
from laws import arguments as law_arguments
from scipy.stats import chi2_contingency, kstest
from test_batch import padded
from test_replay import Counting
from transformers import LogitsProcessor, LogitsProcessorList

import specplug
from specplug import noise
from specplug.drafters.early_exit import EarlyExitDrafter
from specplug.noise import exponentials
from specplug.schedule import AdaptiveSchedule, ConfidenceSchedule, FixedSchedule

SAMPLED = {"do_sample": True, "max_new_tokens": 30, "temperature": 1.2, "eos_token_id": [2, 9, 17]}


@pytest.fixture(scope="module")
def target():
    return make_model(layers=3)


@pytest.fixture(scope="module")
def draft(target):
    return noisy_copy(target, scale=0.02)


def ways(target, draft):
    """Plugins that decode in every way there is; the first drafts nothing and leaves the loop to transformers."""
    yield specplug.SpeculativeProcessor("lookup", engine="plain")
    for engine in ("rounds", "lookahead"):
        for drafter in (draft, "lookup", EarlyExitDrafter(target, 2), ["suffix", draft]):
            yield specplug.SpeculativeProcessor(drafter, engine=engine, schedule=FixedSchedule(4))
        for schedule in (FixedSchedule(0), FixedSchedule(1), ConfidenceSchedule(6, 0.3), AdaptiveSchedule(8)):
            yield specplug.SpeculativeProcessor(draft, engine=engine, schedule=schedule)
    for rule in ("token", "walk"):
        yield specplug.SpeculativeProcessor(draft, verify=rule, schedule=FixedSchedule(4))


def assert_same_whatever_decodes(target, draft, call):
    texts, kept = [], 0
    for number, plugin in enumerate(ways(target, draft)):
        torch.manual_seed(number)  # which has no part in it
        before = torch.get_rng_state()
        with plugin.attach(target):
            texts.append(target.generate(**call()))
        assert torch.equal(torch.get_rng_state(), before), "a call with a seed has moved the global stream"
        assert torch.equal(texts[0], texts[-1]), (number, plugin.last.engine)
        kept += plugin.stats.num_accepted
    assert kept > 0
    return texts[0]


def test_one_sequence(target, draft):
    texts = [
        assert_same_whatever_decodes(
            target, draft, lambda seed=seed: {"inputs": prompt(), "specplug": {"seed": seed}, **SAMPLED}
        )
        for seed in (0, 1, 2**64 - 1)
    ]
    assert len({tuple(text[0].tolist()) for text in texts}) == 3


def test_a_batch_and_several_answers_to_one_prompt(target, draft):
    _, call = padded([3, 11, 7])
    texts = assert_same_whatever_decodes(
        target, draft, lambda: {**call, "num_return_sequences": 2, "specplug": {"seed": 8}, **SAMPLED}
    )
    assert len({tuple(text[-30:].tolist()) for text in texts}) == 6


def test_stateful_processors(target, draft):
    """One sequence goes on in rounds, a batch in lookahead."""
    for ids in (prompt(), torch.cat([prompt(seed=1), prompt(seed=2)])):
        texts = []
        for engine in ("plain", "auto"):
            call = SAMPLED | {"logits_processor": [Counting()], "eos_token_id": None}
            with specplug.attach(target, draft, engine=engine, gamma=4) as plugin:
                texts.append(target.generate(ids, specplug={"seed": 3}, **call))
        assert torch.equal(*texts) and plugin.last.num_accepted > 0
        assert plugin.last.engine == ("rounds" if len(ids) == 1 else "lookahead")


def test_a_row_is_the_same_in_any_company(target, draft):
    """By its id: alone, among others, in another place, with padding before it and without."""
    texts, call = padded([3, 11, 7])
    ids = [5, 0, 77]
    longest = call["input_ids"].shape[1]
    with specplug.attach(target, draft, gamma=4):
        together = target.generate(**call | SAMPLED, specplug={"seed": 4, "row_ids": ids})
        turned = {name: call[name].flip(0) for name in ("input_ids", "attention_mask")}
        backwards = target.generate(**call | turned | SAMPLED, specplug={"seed": 4, "row_ids": ids[::-1]})
        assert torch.equal(together, backwards.flip(0))
        for row, text, number in zip(together, texts, ids, strict=True):
            alone = target.generate(text, specplug={"seed": 4, "row_ids": [number]}, **SAMPLED)[0, text.shape[1] :]
            new = row[longest:]
            assert torch.equal(new[: len(alone)], alone) and (new[len(alone) :] == PAD).all()
        other = target.generate(**call | SAMPLED, specplug={"seed": 4, "row_ids": [6, 0, 77]})
        assert not torch.equal(other[0], together[0]) and torch.equal(other[1:, :longest], together[1:, :longest])


def test_scores_come_with_it_in_rounds(target, draft):
    call = SAMPLED | {"return_dict_in_generate": True, "output_scores": True}
    with specplug.attach(target, draft, gamma=4) as plugin:
        output = target.generate(prompt(), specplug={"seed": 3}, **call)
        assert plugin.last.engine == "rounds" and len(output.scores) == output.sequences.shape[1] - 7
        assert all(torch.isfinite(scores).any() and (scores > -1e9).sum() > 1 for scores in output.scores)


def over_seeds(target, draft, settings, samples, first=0):
    """Counts of so many texts, ten for each seed."""
    call = law_arguments(SETTINGS[settings]) | {"num_return_sequences": 10}
    seeds = range(first * samples // 10, (first + 1) * samples // 10)
    with specplug.attach(target, draft, gamma=2, engine="rounds") as plugin:
        texts = [target.generate(PROMPT, **call, specplug={"seed": seed})[:, -TOKENS:] for seed in seeds]
    assert 0.1 < plugin.stats.alpha < 1
    return counted(torch.cat(texts))


@pytest.mark.parametrize("settings", ["plain", "temperature 1.5, top-k", "repetition penalty"])
def test_over_seeds_the_law_is_the_targets(six_tokens, settings):
    """Against the law by enumeration; false alarms as in test_exact_sampling."""
    draft = noisy_copy(six_tokens, scale=0.1)
    assert has_the_law(partial(over_seeds, six_tokens, draft, settings), exact_law(six_tokens, SETTINGS[settings]))


BROKEN = {
    "without the position": lambda seed, row, place, size: exponentials(seed, row, 0, size),
    "without the seed": lambda seed, row, place, size: exponentials(0, row, place, size),
    "half the noise": lambda seed, row, place, size: exponentials(seed, row, place, size) ** 0.5,
}


@pytest.mark.parametrize("broken", BROKEN)
def test_wrong_noise_is_caught_by_the_law(six_tokens, broken, monkeypatch):
    law = exact_law(six_tokens, {})
    monkeypatch.setattr(noise, "exponentials", BROKEN[broken])
    assert pvalue(over_seeds(six_tokens, noisy_copy(six_tokens, scale=0.1), "plain", AGAIN // 2), law) < WRONG


NEIGHBOURS = {"seeds": (1, 0, 0), "rows": (0, 1, 0), "positions": (0, 0, 1), "a seed and a row": (1, -1, 0)}


def dependence(first, step) -> float:
    """p-value of a chi-square test: do races over five tokens and the races one step on go apart? 3,000 pairs."""
    table = numpy.zeros((5, 5))
    for number in range(3000):
        key = [number // 100 % 10 + 1, number // 10 % 10 + 1, number % 10 + 10 * (number // 1000)]
        one = first(*key, 5).argmin()
        other = first(*(a + b for a, b in zip(key, step, strict=True)), 5).argmin()
        table[one, other] += 1
    return chi2_contingency(table).pvalue


@pytest.mark.parametrize("step", NEIGHBOURS)
def test_neighbours_are_independent(step):
    """False alarm: 1e-6 each."""
    assert dependence(exponentials, NEIGHBOURS[step]) > 1e-6


def test_noise_that_forgets_part_of_its_key_is_caught():
    for place, step in enumerate(list(NEIGHBOURS)[:3]):

        def forgets(*key, place=place):
            return exponentials(*(0 if k == place else value for k, value in enumerate(key)))

        assert dependence(forgets, NEIGHBOURS[step]) < 1e-6
    assert (
        dependence(lambda seed, row, *more: exponentials(seed + row, 0, *more), NEIGHBOURS["a seed and a row"]) < 1e-6
    )


def test_the_noise_is_exponential_and_never_zero():
    """Kolmogorov-Smirnov over 200,000 numbers; false alarm 1e-6."""
    drawn = torch.cat([exponentials(seed, 1, 2, 20_000) for seed in range(10)])
    assert drawn.min() > 0 and kstest(drawn.double().numpy(), "expon").pvalue > 1e-6
    assert torch.equal(exponentials(1, 2, 3, 10), exponentials(1, 2, 3, 1000)[:10])


def test_the_noise_stays_what_it_is():
    """A text that was written down with its seed can be made again by a later version: these numbers are for ever."""
    torch.testing.assert_close(exponentials(1, 2, 3, 4), torch.tensor(GOLDEN), rtol=1e-6, atol=0)


GOLDEN = [0.058906439691782, 0.908777117729187, 0.8544370532035828, 1.1155979633331299]


class Stranger(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


TWO = torch.cat([prompt(seed=1), prompt(seed=2)])
REFUSED = {
    "no number": ({"seed": "x"}, {}, "seed='x': give a whole number"),
    "a truth value": ({"seed": True}, {}, "seed=True: give a whole number"),
    "below zero": ({"seed": -1}, {}, r"seed=-1: .* from 0 to"),
    "too large": ({"seed": 2**64}, {}, "seed=18446744073709551616: "),
    "a fraction": ({"seed": 1.5}, {}, "seed=1.5"),
    "ids without a seed": ({"row_ids": [1]}, {}, "row_ids name the sequences for a seed"),
    "ids that are none": ({"seed": 1, "row_ids": "ab"}, {"inputs": TWO}, "row_ids='ab': give a list"),
    "an id that is none": ({"seed": 1, "row_ids": [1, -2]}, {"inputs": TWO}, r"row_ids=\[1, -2\]: give a list"),
    "too few ids": ({"seed": 1, "row_ids": [1]}, {"inputs": TWO}, "1 ids for 2 sequences"),
    "ids of prompts": (
        {"seed": 1, "row_ids": [1, 2]},
        {"inputs": TWO, "num_return_sequences": 2},
        "2 ids for 4 sequences",
    ),
    "one id twice": ({"seed": 1, "row_ids": [3, 3]}, {"inputs": TWO}, "two sequences with one id"),
    "greedy": ({"seed": 1}, {"do_sample": False}, "seed=1 with do_sample=False: .* leave seed out"),
    "beams": ({"seed": 1}, {"num_beams": 2}, "beam search"),
    "assisted": ({"seed": 1}, {"prompt_lookup_num_tokens": 3, "do_sample": False}, "assisted generation"),
    "a loop of the caller": ({"seed": 1}, {"custom_generate": lambda model, ids, *a, **k: ids}, "custom_generate"),
    "scores of a batch": (
        {"seed": 1},
        {"inputs": TWO, "return_dict_in_generate": True, "output_scores": True},
        "seed=1 with output_scores=True: .* leave one out",
    ),
    "a misspelt name": ({"sed": 1}, {}, "gamma, engine, seed, row_ids"),
    "a batch that rounds cannot serve": (
        {"seed": 1, "engine": "rounds"},
        {"inputs": TWO, "logits_processor": LogitsProcessorList([Stranger()])},
        "Stranger may look at all sequences",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(target, draft, name):
    settings, call, said = REFUSED[name]
    call = {"inputs": prompt(), "do_sample": True, "max_new_tokens": 5, **call}
    torch.manual_seed(0)
    with specplug.attach(target, draft, gamma=2), pytest.raises(ValueError, match=said) as caught:
        target.generate(**call, specplug=settings)
    assert "\n" not in str(caught.value)


def test_through_a_pipeline_and_the_plugin_as_a_custom_generate(tiny_pipeline):
    pipe, draft = tiny_pipeline
    call = {"max_new_tokens": 20, "do_sample": True, "temperature": 1.2, "specplug": {"seed": 6}}
    ask = "Ben has 12 coins. Ben finds 5 more coins."
    with specplug.attach(pipe, draft, gamma=3) as plugin:
        first = pipe(ask, **call)
        assert pipe(ask, **call) == first and pipe(ask, **call | {"specplug": {"seed": 7}}) != first
        other = specplug.SpeculativeProcessor("lookup")
        assert pipe(ask, custom_generate=other, **call) == first
    assert plugin.last.engine == "rounds" and other.last.engine == "rounds"
