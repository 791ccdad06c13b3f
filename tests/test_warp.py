"""All positions at once gives what one position at a time gives, for every processor that claims to be pointwise."""

import pytest
import torch
import transformers.generation.logits_process as library
from transformers import LogitsProcessorList

from specplug import warp

MAKE = {
    "TemperatureLogitsWarper": lambda c: c(0.7),
    "TopKLogitsWarper": lambda c: c(5),
    "TopPLogitsWarper": lambda c: c(0.8),
    "MinPLogitsWarper": lambda c: c(0.1),
    "TypicalLogitsWarper": lambda c: c(0.7),
    "EpsilonLogitsWarper": lambda c: c(0.02),
    "EtaLogitsWarper": lambda c: c(0.02),
    "SuppressTokensLogitsProcessor": lambda c: c([3, 7]),
    "LogitNormalization": lambda c: c(),
    "InfNanRemoveLogitsProcessor": lambda c: c(),
    "Only": lambda c: c(torch.arange(40) % 3 == 0),
}


def test_every_pointwise_processor_is_tested():
    assert {each.__name__ for each in warp.POINTWISE} == set(MAKE)


@pytest.mark.parametrize("name", MAKE)
def test_at_once_is_one_by_one(name):
    processors = LogitsProcessorList([MAKE[name](getattr(library, name, warp.Only))])
    assert warp.all_pointwise(processors)
    logits = torch.randn(1, 6, 40, generator=torch.Generator().manual_seed(0)) * 3
    text = torch.randint(0, 40, (1, 9), generator=torch.Generator().manual_seed(1))
    at_once = warp.process_at_once(processors, text, text[:, :5], logits.clone())
    for i in range(6):
        alone = warp.process(processors, text, logits[:, i].clone())
        assert torch.equal(at_once[:, i], alone)


READS_THE_TEXT = {
    "repetition penalty": lambda: library.RepetitionPenaltyLogitsProcessor(1.3),
    "repetition penalty without padding": lambda: library.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=3),
    "all but the last are padding": lambda: library.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=8),
    "no repeated n-gram": lambda: library.NoRepeatNGramLogitsProcessor(2),
    "bad words": lambda: library.NoBadWordsLogitsProcessor([[3], [5, 7]], eos_token_id=torch.tensor([2])),
    "sequence bias": lambda: library.SequenceBiasLogitsProcessor([[[3], 2.0], [[5, 7], -3.0]]),
    "minimum length": lambda: library.MinLengthLogitsProcessor(11, torch.tensor([2])),
    "minimum of new tokens": lambda: library.MinNewTokensLengthLogitsProcessor(9, 3, torch.tensor([2])),
    "forced end": lambda: library.ForcedEOSTokenLogitsProcessor(12, torch.tensor([2])),
    "forced begin": lambda: library.ForcedBOSTokenLogitsProcessor(1),
    "decay": lambda: library.ExponentialDecayLengthPenalty((2, 1.5), torch.tensor([2]), 9),
    "suppressed at the beginning": lambda: library.SuppressTokensAtBeginLogitsProcessor([4], 11),
}


@pytest.mark.parametrize("name", READS_THE_TEXT)
def test_drafted_positions_at_once_are_one_prefix_after_another(name):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(1, 6, 12, generator=generator) * 3
        text = torch.randint(0, 12, (1, 14), generator=generator)
        processors = LogitsProcessorList([library.TemperatureLogitsWarper(0.7), READS_THE_TEXT[name]()])
        assert warp.all_stateless(processors) and not warp.all_pointwise(processors)
        at_once = warp.process_at_once(processors, text[:, :9], text[:, 9:], logits.clone())
        for i in range(6):
            alone = warp.process(processors, text[:, : 9 + i], logits[:, i].clone())
            assert torch.equal(at_once[:, i], alone)


def test_the_padding_of_each_row_is_told_to_its_processors():
    shared = library.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=torch.tensor([2, 0]))
    text = torch.tensor([[0, 0, 5, 6], [3, 0, 5, 6]])
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    both = shared(text, logits.clone())
    for b, padding in enumerate((2, 0)):
        alone = warp.for_row(LogitsProcessorList([shared]), padding)
        assert torch.equal(warp.process(alone, text[b : b + 1], logits[b : b + 1].clone()), both[b : b + 1])
    wrong = warp.for_row(LogitsProcessorList([shared]), 0)
    assert not torch.equal(warp.process(wrong, text[:1], logits[:1].clone()), both[:1])


def test_processors_that_read_the_text_do_not_pass_as_pointwise():
    for processor in (library.RepetitionPenaltyLogitsProcessor(1.2), library.NoRepeatNGramLogitsProcessor(2)):
        assert not warp.all_pointwise(LogitsProcessorList([processor]))


def test_a_subclass_of_a_known_processor_is_not_known():
    class Mine(library.TemperatureLogitsWarper):
        pass

    assert not warp.all_pointwise(LogitsProcessorList([Mine(0.5)]))
    assert len(warp.for_draft(LogitsProcessorList([Mine(0.5), library.TemperatureLogitsWarper(0.5)]))) == 1
