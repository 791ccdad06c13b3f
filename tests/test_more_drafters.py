"""Suffix counts, early exit, chains, and drafters of other packages. That none of them changes the output: test_fuzz.py."""

import math
import sys
import time
import types

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from transformers import DynamicCache, LogitsProcessorList

import specplug
from specplug.cache import NAME
from specplug.config import Before, ConfigError, Draft, Quantization, QuantizationMethod
from specplug.config import Drafter as Kind
from specplug.drafters import Request
from specplug.drafters.build import build_drafter
from specplug.drafters.chain import BUCKETS, ChainDrafter
from specplug.drafters.early_exit import EarlyExitDrafter, first_layers
from specplug.drafters.lookup import LookupDrafter
from specplug.drafters.suffix import Counts, SuffixDrafter
from specplug.schedule import ConfidenceSchedule

GREEDY = {"max_new_tokens": 24, "do_sample": False}


def proposal(drafter, text, gamma=8, vocab_size=100):
    session = drafter.start(Request(False, LogitsProcessorList(), vocab_size))
    return session.propose(torch.tensor([text]), gamma)


def tokens(drafter, text, **more):
    return proposal(drafter, text, **more).tokens[0].tolist()


def test_suffix_takes_the_most_frequent_continuation():
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 9, 8, 1, 2]
    assert tokens(SuffixDrafter(), text, gamma=2) == [3, 9]
    assert tokens(LookupDrafter(), [*text[:-2], 1, 2, 4, 7, 1, 2], gamma=1) == [4]  # a lookup takes the latest


def test_suffix_stops_where_it_is_no_longer_likely():
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    assert tokens(SuffixDrafter(min_probability=0.4), text)[0] in (3, 4)
    assert tokens(SuffixDrafter(min_probability=0.6), text) == []
    assert proposal(SuffixDrafter(), [5, 6, 7, 8, 5, 6, 7]).bucket == 3


def test_suffix_stays_below_the_vocabulary():
    assert tokens(SuffixDrafter(), [1, 2, 99, 1, 2], vocab_size=50) == []


def test_cold_calls_know_nothing_of_each_other_and_warm_ones_do():
    first, second = [1, 2, 3, 4, 5], [9, 1, 2]
    for warm, expected in ((False, []), (True, [3, 4, 5])):
        drafter = SuffixDrafter(warm=warm)
        tokens(drafter, first)
        assert tokens(drafter, second) == expected


def test_memory_is_bounded():
    counts = Counts(1, 4, max_runs=50)
    counts.add(list(range(1000)), 0)
    assert len(counts.following) == 50
    assert counts.next([0, 1, 2]) is None and counts.next([996, 997, 998]) == (999, 1.0, 3)


def test_a_proposal_at_8000_tokens_is_quick():
    """Not a benchmark: a scan of the text would take a hundred times as long."""
    text = torch.randint(0, 500, (1, 8000), generator=torch.Generator().manual_seed(0))
    for drafter in (SuffixDrafter(), LookupDrafter()):
        session = drafter.start(Request(False, LogitsProcessorList(), 500))
        session.propose(text, 8)
        started = time.perf_counter()
        for k in range(100):
            session.propose(torch.cat([text, text[:, : k + 1]], dim=1), 8)
        assert (time.perf_counter() - started) / 100 < 2e-3


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_early_exit_is_the_target_cut_short(kind):
    target = make_model(kind, layers=3)
    before = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    config = target.config.to_dict()
    short = first_layers(target, 2)
    own = make_model(kind, layers=2, seed=9)
    own.load_state_dict({name: tensor for name, tensor in target.state_dict().items() if name in own.state_dict()})
    torch.testing.assert_close(short(prompt()).logits, own(prompt()).logits)
    assert {tensor.data_ptr() for tensor in short.state_dict().values()} <= set(before.values())
    assert {name: tensor.data_ptr() for name, tensor in target.state_dict().items()} == before
    assert target.config.to_dict() == config and short.config.num_hidden_layers == 2
    plain = target.generate(prompt(), **GREEDY)
    with specplug.attach(target, EarlyExitDrafter(target, 2), gamma=3) as plugin:
        assert torch.equal(target.generate(prompt(), **GREEDY), plain)
        assert plugin.last.num_draft_steps > 0


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_early_exit_borrows_the_targets_keys_and_values(kind, do_sample):
    """It proposes what it would with a cache of its own, computes the prompt no second time, and leaves the cache as it was."""
    target = make_model(kind, layers=3)
    drafter, ids = EarlyExitDrafter(target, 2), prompt(30)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids[:, :-1], use_cache=True, **{NAME: cache})
    held = [(layer.keys, layer.values, layer.get_seq_length()) for layer in cache.layers]
    lengths = []
    drafter.model.register_forward_hook(
        lambda module, args, kwargs, output: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    proposals = []
    for theirs in (cache, None):
        torch.manual_seed(0)
        session = drafter.start(Request(do_sample, LogitsProcessorList(), 64, cache=theirs))
        proposals.append(session.propose(ids, 4))
    assert lengths == [1] * 4 + [30] + [1] * 3
    assert torch.equal(proposals[0].tokens, proposals[1].tokens)
    if do_sample:
        torch.testing.assert_close(proposals[0].probs, proposals[1].probs)
    for layer, (keys, values, length) in zip(cache.layers, held, strict=True):
        assert layer.keys is keys and layer.values is values and layer.get_seq_length() == length


def test_a_failing_early_exit_leaves_the_targets_cache(monkeypatch):
    target = make_model("llama", layers=3)
    drafter = EarlyExitDrafter(target, 2)
    call = {"do_sample": False, "max_new_tokens": 20}
    plain = target.generate(prompt(9), **call)
    forward, calls = drafter.model.forward, []

    def failing(*args, **kwargs):
        calls.append(1)
        output = forward(*args, **kwargs)
        if len(calls) == 6:
            raise RuntimeError("after the keys were added")
        return output

    monkeypatch.setattr(drafter.model, "forward", failing)
    with specplug.attach(target, drafter, gamma=4):
        assert torch.equal(target.generate(prompt(9), **call), plain)
    assert len(calls) == 6


def test_early_exit_of_what_has_no_such_layers():
    target = make_model(layers=2)
    for number in (0, 2, 1.5, True):
        with pytest.raises(ValueError, match=r"has 2 layers; an early exit takes 1 to 1"):
            first_layers(target, number)
    with pytest.raises(ValueError, match="no single stack of 1 layers"):
        first_layers(make_model(layers=1), 1)


def test_a_chain_asks_the_next_when_the_first_has_nothing_good():
    target = make_model()
    chain = ChainDrafter([LookupDrafter(), specplug.drafters.model.ModelDrafter(noisy_copy(target))], min_drafts=2)
    session = chain.start(Request(False, LogitsProcessorList(), 64))
    known = torch.tensor([[5, 6, 7, 8, 5, 6]])
    assert session.propose(known, 2).tokens.tolist() == [[7, 8]] and session.num_steps == 0
    session.observe(1)
    new = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 30]])
    made = session.propose(new, 3)
    assert made.tokens.shape == (1, 3) and made.bucket == BUCKETS and session.num_steps == 3
    session.observe(0)
    assert [dict(each) for each in chain.counts] == [
        {"proposals": 1, "drafts": 2, "kept": 1},
        {"proposals": 1, "drafts": 3, "kept": 0},
    ]
    assert not chain.costs_nothing and ChainDrafter([LookupDrafter(), SuffixDrafter()]).costs_nothing


def test_a_list_is_a_chain_and_exact():
    target = make_model()
    plain = target.generate(prompt(), **GREEDY)
    with specplug.attach(target, ["suffix", noisy_copy(target)], gamma=4) as plugin:
        assert torch.equal(target.generate(prompt(), **GREEDY), plain)
        assert sum(each["kept"] for each in plugin.drafter.counts) == plugin.last.num_accepted > 0
    for members in ([], ["lookup"]):
        with pytest.raises(ValueError, match="give two or more"):
            specplug.attach(target, members)
    with pytest.raises(ValueError, match="64 tokens and the draft 70"):
        specplug.attach(target, ["lookup", make_model(vocab_size=70)])


def phrases(target, length=3):
    return LookupDrafter(min_ngram=length)


WRONG = {
    "not a name": ({"plugin": "nothing"}, "give package.module:callable"),
    "no module": ({"plugin": "no_such_module:make"}, "No module named"),
    "no attribute": ({"plugin": "own_drafters:other"}, "other"),
    "no drafter": ({"plugin": "own_drafters:number"}, "made a int, which has no start"),
}


@pytest.fixture
def own_drafters(monkeypatch):
    module = types.ModuleType("own_drafters")
    module.make, module.number = phrases, lambda target: 5
    monkeypatch.setitem(sys.modules, "own_drafters", module)


def test_drafters_of_another_package(own_drafters):
    target = make_model()
    config = Draft(drafter=Kind.plugin, plugin="own_drafters:make", options={"length": 4})
    assert build_drafter(config, target).sizes.stop == 3
    for given, said in WRONG.values():
        with pytest.raises(ConfigError, match=said):
            build_drafter(Draft(drafter=Kind.plugin, **given), target)


def test_configurations():
    target = make_model()
    assert type(build_drafter(Draft(drafter=Kind.suffix, warm=True), target)) is SuffixDrafter
    assert type(build_drafter(Draft(drafter=Kind.early_exit, num_layers=1), target)) is EarlyExitDrafter
    chain = build_drafter(Draft(drafter=Kind.early_exit, num_layers=1, before=Before.lookup), target)
    assert [each.name for each in chain.members] == ["lookup", "early_exit"]
    with pytest.raises(ConfigError, match="1 to 1"):
        build_drafter(Draft(drafter=Kind.early_exit), target)
    for kind in (Kind.suffix, Kind.early_exit):
        with pytest.raises(ConfigError, match="loads no weights of its own"):
            build_drafter(Draft(drafter=kind, quantization=Quantization(QuantizationMethod.int8)), target)
    assert specplug.load("draft=suffix", "draft.warm=true").draft.warm
    with pytest.raises(ConfigError, match=r"draft\.num_layers=null: say how many"):
        specplug.load("draft=early_exit")


def test_how_sure_a_draft_is():
    """By its highest probability, or by 1 - sqrt(entropy), which never falls below 0; in the mean of the rows."""
    sure, split, flat = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.9, 0.1, 0, 0]), torch.full((4,), 0.25)
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    for criterion, expected in (("probability", [1.0, 0.9, 0.25]), ("entropy", [1.0, 1 - math.sqrt(entropy), 0.0])):
        for probs, value in zip((sure, split, flat), expected, strict=True):
            for threshold in (value - 0.01, value + 0.01):
                request = Request(True, LogitsProcessorList(), 4, threshold, criterion)
                assert request.unsure(probs[None], probs.amax()[None]) == (threshold > 0 and value < threshold)
        both = Request(True, LogitsProcessorList(), 4, (expected[0] + expected[2]) / 2 + 0.01, criterion)
        rows = torch.stack([sure, flat])
        assert both.unsure(rows, rows.amax(-1))


@pytest.mark.parametrize("criterion", ["probability", "entropy"])
def test_an_unsure_draft_proposes_less(llama, llama_draft, criterion):
    drafted = {}
    for threshold in (0.0, 0.5, 1.0):
        schedule = ConfidenceSchedule(5, threshold, criterion)
        with specplug.attach(llama, llama_draft, schedule=schedule) as plugin:
            llama.generate(prompt(), do_sample=True, temperature=0.3, max_new_tokens=40)
            drafted[threshold] = plugin.last.mean_gamma
    assert drafted[0.0] > drafted[0.5] > 0 and drafted[1.0] < 1
