"""A draft step as one recording: the drafts that Python makes, bit by bit, and as many as a judge wants."""

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from transformers import LogitsProcessor, LogitsProcessorList

import specplug
from specplug.capture import _KNOWN, Capture
from specplug.drafters import Request
from specplug.drafters.early_exit import EarlyExitDrafter
from specplug.drafters.model import ModelDrafter
from specplug.drafters.step import MOST, Step
from specplug.recording import Recording
from specplug.schedule import AdaptiveSchedule, ConfidenceSchedule, FixedSchedule
from specplug.sureness import Judge, Sureness
from specplug.warp import Only

SAMPLED = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "temperature, top-k": {"temperature": 1.3, "top_k": 9},
    "min-p": {"min_p": 0.05},
}


@pytest.fixture(scope="module")
def target():
    return make_model()


@pytest.fixture(scope="module")
def draft(target):
    return noisy_copy(target, scale=0.02)


def steps_recorded(model) -> list[Recording]:
    """Recordings of steps of this model."""
    known = _KNOWN[model][1] if model in _KNOWN else {}
    return [each for (key, _), each in known.items() if isinstance(key, tuple)]


def texts(target, draft, graph, schedule=None, settings=None):
    """Of four calls; the recordings are there after two."""
    given = {"max_new_tokens": 40} if settings is None else {"max_new_tokens": 40, "do_sample": True, **settings}
    with specplug.attach(target, draft, schedule=schedule or FixedSchedule(16), graph=graph) as plugin:
        plugin.record_after = 0
        found = []
        for seed in range(4):
            torch.manual_seed(seed)
            found.append(target.generate(prompt(seed=seed), **given))
        assert plugin.stats.num_accepted > 0
    return found, torch.rand(1)


def assert_same(one, other):
    for ours, theirs in zip(one[0], other[0], strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(one[1], other[1]), "the random stream is elsewhere"


def test_greedy_texts_are_those_of_plain_decoding(target, draft):
    plain = [target.generate(prompt(seed=seed), max_new_tokens=40) for seed in range(4)]
    for ours, theirs in zip(texts(target, draft, "capture")[0], plain, strict=True):
        assert torch.equal(ours, theirs)
    assert [each.ready for each in steps_recorded(draft)] == [{1}]


@pytest.mark.parametrize("settings", SAMPLED.values(), ids=SAMPLED)
def test_sampled_drafts_are_those_of_python(target, settings):
    """From the same random numbers, taken in the same order."""
    model = noisy_copy(target, scale=0.02)
    assert_same(texts(target, model, "capture", None, settings), texts(target, model, "off", None, settings))
    (recording,) = steps_recorded(model)
    assert bool(recording.refused) == ("min_p" in settings)  # torch cannot run what its tracer makes of min-p
    assert bool(recording.ready) != bool(recording.refused)
    if recording.refused:  # then its passes alone are recorded
        assert _KNOWN[model][1][None, True].ready


def test_so_are_those_of_the_targets_first_layers(target):
    drafter = EarlyExitDrafter(target, 1)
    plain = [target.generate(prompt(seed=seed), max_new_tokens=40) for seed in range(4)]
    with specplug.attach(target, drafter, gamma=9) as plugin:
        plugin.record_after = 0
        for seed, text in enumerate(plain):
            assert torch.equal(target.generate(prompt(seed=seed), max_new_tokens=40), text)
    assert steps_recorded(drafter.model)[0].ready


def proposals(draft, graph, judge=None, num=6, below=64, **request):
    """Drafts behind a text of 9 tokens, again and again."""
    capture = Capture(graph, uses_before=0)
    given = {"do_sample": False, "processors": LogitsProcessorList(), "vocab_size": 64, **request}
    found = []
    with torch.no_grad():
        for number in range(num):
            session = ModelDrafter(draft).start(Request(**given, judge=judge, capture=capture))
            text = prompt(length=9 + number, vocab_size=below)
            if judge is not None:
                judge.begin(0.3)
            torch.manual_seed(number)
            proposal = session.propose(text, 13)
            session.observe(1)
            more = torch.cat([text, proposal.tokens[:, :1], torch.tensor([[5]])], dim=1)
            if judge is not None:
                judge.begin(0.3)
            found += [proposal, session.propose(more, 13)]
    return found


def assert_same_proposals(one, other):
    for ours, theirs in zip(one, other, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        assert (ours.probs is None) == (theirs.probs is None)
        assert ours.probs is None or torch.equal(ours.probs, theirs.probs)


@pytest.mark.parametrize("extra", [-3, 0, 5])
@pytest.mark.parametrize("do_sample", [False, True])
def test_vocabularies_of_other_sizes(extra, do_sample):
    """One tokenizer's, padded or cut: what the draft does not have it never says, and no more than the target has."""
    model = make_model(layers=1, vocab_size=64 + extra, seed=3)
    ours, by_python = (
        proposals(model, graph, do_sample=do_sample, below=min(64, 64 + extra)) for graph in ("capture", "off")
    )
    assert_same_proposals(ours, by_python)
    assert all(int(each.tokens.max()) < min(64, 64 + extra) for each in ours)
    assert steps_recorded(model)[0].ready


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_judge_gets_as_many_as_it_wants(draft, do_sample):
    """By the same questions."""
    asked = {}
    for graph in ("capture", "off"):
        sureness, asked[graph] = Sureness(), []
        sureness.kept, sureness.tested = (
            [0.5e6] * 2 + [0.98e6] * 10,
            [1e6] * 12,
        )  # rarely kept where the highest is below 0.2

        class Heard(Judge):
            def __call__(self, highest, heard=asked[graph]):
                heard.append(highest)
                return super().__call__(highest)

        asked[graph, "made"] = proposals(draft, graph, Heard(sureness), do_sample=do_sample)
    lengths = {each.tokens.shape[1] for each in asked["capture", "made"]}
    assert len(lengths) > 2, "always as many, so nothing was cut"
    if not do_sample:  # what is drawn behind a question moves the stream
        assert_same_proposals(asked["capture", "made"], asked["off", "made"])
        assert asked["capture"] == asked["off"]
    assert any(each.ready for each in steps_recorded(draft))


class Doubling(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return 2 * scores


@pytest.mark.parametrize(
    "request_",
    [
        {"min_confidence": 0.1},
        {"processors": LogitsProcessorList([Doubling()])},
        {"vocab_size": 64, "capture": "off"},
    ],
    ids=["asked how sure", "a processor not known", "graph=off"],
)
def test_where_steps_are_not_recorded(target, request_):
    model = noisy_copy(target)
    given = dict(request_)
    proposals(model, given.pop("capture", "capture"), **given)
    assert not steps_recorded(model)


def test_another_set_of_silent_tokens_is_another_recording(target):
    model = noisy_copy(target)
    sets = [torch.arange(64) % 2 == parity for parity in (0, 1)]
    for silent in sets:
        for proposal in proposals(model, "capture", processors=LogitsProcessorList([Only(silent)])):
            assert not silent[proposal.tokens].any()


def test_what_replays_otherwise_is_refused(target, monkeypatch):
    """The negative control of the comparison."""
    model = noisy_copy(target, scale=0.02)
    record = Step._record

    def spoiled(self, *args):
        replay = record(self, *args)
        return lambda *given: (replay(*given)[0] ^ 1, *replay(*given)[1:])  # other tokens

    monkeypatch.setattr(Step, "_record", spoiled)
    plain = [target.generate(prompt(seed=seed), max_new_tokens=40) for seed in range(4)]
    for ours, theirs in zip(texts(target, model, "capture")[0], plain, strict=True):
        assert torch.equal(ours, theirs)
    (recording,) = steps_recorded(model)
    assert recording.refused and not recording.ready


@pytest.mark.parametrize("kind", ["adaptive", "confidence"])
def test_schedules(target, draft, kind):
    schedule = ConfidenceSchedule(12, 0.2) if kind == "confidence" else AdaptiveSchedule(16)
    if kind == "adaptive":
        schedule.frozen = True  # by estimates with which drafts pay
        costs = schedule.states[1].costs
        for width, seconds in ((0, 1.0), (16, 1.1)):
            costs.observe(width, seconds)
    plain = [target.generate(prompt(seed=seed), max_new_tokens=40) for seed in range(4)]
    for ours, theirs in zip(texts(target, draft, "capture", schedule)[0], plain, strict=True):
        assert torch.equal(ours, theirs)


def test_no_more_recordings_than_so_many(target):
    """Of a caller who has another temperature in each call."""
    model = noisy_copy(target, scale=0.02)
    with specplug.attach(target, model, gamma=6) as plugin:
        for number in range(MOST + 4):
            target.generate(prompt(), max_new_tokens=12, do_sample=True, temperature=1 + number / 100)
    assert plugin.stats.num_accepted > 0
    assert 10 < len(steps_recorded(model)) < len(_KNOWN[model][1]) <= MOST + 2  # with those of passes alone
