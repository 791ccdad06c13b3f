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
}


def test_every_pointwise_processor_is_tested():
    assert {each.__name__ for each in warp.POINTWISE} == set(MAKE)


@pytest.mark.parametrize("name", MAKE)
def test_at_once_is_one_by_one(name):
    processors = LogitsProcessorList([MAKE[name](getattr(library, name))])
    assert warp.all_pointwise(processors)
    logits = torch.randn(1, 6, 40, generator=torch.Generator().manual_seed(0)) * 3
    text = torch.randint(0, 40, (1, 9), generator=torch.Generator().manual_seed(1))
    at_once = warp.process_at_once(processors, text, logits.clone())
    for i in range(6):
        alone = warp.process(processors, text, logits[:, i].clone())
        assert torch.equal(at_once[:, i], alone)


def test_processors_that_read_the_text_do_not_pass_as_pointwise():
    for processor in (library.RepetitionPenaltyLogitsProcessor(1.2), library.NoRepeatNGramLogitsProcessor(2)):
        assert not warp.all_pointwise(LogitsProcessorList([processor]))


def test_a_subclass_of_a_known_processor_is_not_known():
    class Mine(library.TemperatureLogitsWarper):
        pass

    assert not warp.all_pointwise(LogitsProcessorList([Mine(0.5)]))
    assert len(warp.for_draft(LogitsProcessorList([Mine(0.5), library.TemperatureLogitsWarper(0.5)]))) == 1
