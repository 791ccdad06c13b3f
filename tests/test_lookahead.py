"""The `lookahead` engine and the forms without attach: plain decoding to the last bit of what a caller can see."""

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from test_exact_greedy import MODELS, Recorder, StopAfter, pair
from transformers import DynamicCache, LogitsProcessor

import specplug
from specplug import hook
from specplug.cache import NAME
from specplug.schedule import FixedSchedule

NEW = 30


def call(target, ids, seed=0, **arguments):
    torch.manual_seed(seed)
    arguments = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True, **arguments}
    return target.generate(ids, **arguments)


def same(plain, ours):
    assert torch.equal(plain.sequences, ours.sequences)
    for a, b in zip(plain.scores, ours.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert plain[NAME].get_seq_length() == ours[NAME].get_seq_length()
    for a, b in zip(plain[NAME].layers, ours[NAME].layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, atol=1e-4, rtol=1e-4)


def forms(target, draft, ids, **arguments):
    """The same call through each way to use a plugin; yields the output and the counts."""
    with specplug.attach(target, draft, engine="lookahead", gamma=4) as plugin:
        yield call(target, ids, **arguments), plugin.last
    given = arguments.pop("logits_processor", [])
    plugin = specplug.SpeculativeProcessor(draft, engine="lookahead", schedule=FixedSchedule(4))
    yield call(target, ids, custom_generate=plugin, logits_processor=given, **arguments), plugin.last
    plugin = specplug.SpeculativeProcessor(draft, schedule=FixedSchedule(4))
    yield call(target, ids, logits_processor=[*given, plugin], **arguments), plugin.last


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 5, "temperature": 0.7}])
@pytest.mark.parametrize("drafter", ["model", "lookup"])
@pytest.mark.parametrize("kind", MODELS)
def test_same_ids_under_the_same_seed(kind, drafter, sampling):
    target, draft = pair(kind)
    accepted = 0
    for seed in range(3):
        ids = torch.cat([prompt(seed=seed), prompt(seed=seed + 9)])
        for rows in (ids[:1], ids):
            plain = call(target, rows, seed, **sampling)
            for ours, last in forms(target, draft if drafter == "model" else "lookup", rows, seed=seed, **sampling):
                same(plain, ours)
                assert last.engine == "lookahead"
                accepted += last.num_accepted
    assert accepted > 0 or drafter == "lookup", "nothing was accepted, so nothing was tested"


def test_stateful_criteria_and_processors_of_a_batch():
    target, draft = pair("llama")
    ids = torch.cat([prompt(seed=1), prompt(seed=2)])
    recorders, outputs = [], []
    for engine in (None, "auto"):
        recorder = Recorder()
        if engine:
            plugin = specplug.attach(target, draft, gamma=4)
        outputs.append(
            call(target, ids, logits_processor=[recorder], stopping_criteria=[StopAfter(17)], do_sample=False)
        )
        recorders.append(recorder.seen)
    assert plugin.last.engine == "lookahead"
    plugin.detach()
    same(*outputs)
    assert recorders[0] == recorders[1]


def test_a_wrong_roll_back_is_caught(monkeypatch):
    target, draft = pair("llama")
    plain = call(target, prompt(), do_sample=False)
    crop = specplug.lookahead.caches.crop
    monkeypatch.setattr(specplug.lookahead.caches, "crop", lambda cache, n: crop(cache, max(n - 1, 0)))
    with specplug.attach(target, draft, engine="lookahead", gamma=4), pytest.raises(AssertionError):
        same(plain, call(target, prompt(), do_sample=False))


class Raises(LogitsProcessor):
    def __init__(self, error):
        self.calls, self.error = 0, error

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 4:
            raise self.error("in the loop")
        return scores


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("form", ["attach", "custom_generate", "logits_processor"])
def test_nothing_is_left_behind_when_the_loop_raises(form, error):
    target, draft = pair("llama")
    original, names = type(target), set(vars(target))
    plugin = specplug.SpeculativeProcessor(draft, engine="lookahead", schedule=FixedSchedule(4))
    arguments = {"logits_processor": [Raises(error)]}
    if form == "attach":
        plugin.attach(target)
    elif form == "custom_generate":
        arguments["custom_generate"] = plugin
    else:
        arguments["logits_processor"].append(plugin)
    try:
        call(target, prompt(), **arguments)
    except error:
        pass
    else:
        raise AssertionError("the processor did not raise")
    plugin.detach()
    assert type(target) is original and set(vars(target)) == names
    assert not hook._LOOKAHEADS and not hook._LIVE_CALLS and not plugin._loops
    assert plugin.last.num_new_tokens >= 1


def test_a_traceback_that_is_kept_does_no_harm():
    """The loop's frame is then alive, and so is what hangs on it; the cache is used again all the same."""
    target, draft = pair("llama")
    plain_cache, cache = DynamicCache(config=target.config), DynamicCache(config=target.config)
    for used, plugins in (
        (plain_cache, []),
        (cache, [specplug.SpeculativeProcessor(draft, schedule=FixedSchedule(4))]),
    ):
        with pytest.raises(RuntimeError) as kept:
            call(target, prompt(), logits_processor=[Raises(RuntimeError), *plugins], do_sample=False, **{NAME: used})
    with torch.no_grad():
        for token in (5, 6, 7):
            step = torch.tensor([[token]])
            a, b = (target(input_ids=step, use_cache=True, **{NAME: used}).logits for used in (plain_cache, cache))
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
            assert plain_cache.get_seq_length() == cache.get_seq_length()
    assert kept.type is RuntimeError and not hook._LOOKAHEADS


def test_two_models_and_nested_calls_do_not_mix():
    target, draft = pair("llama")
    other = make_model("gpt2", seed=8)
    outer, inner = (
        specplug.SpeculativeProcessor(draft, schedule=FixedSchedule(4)),
        specplug.SpeculativeProcessor("lookup", schedule=FixedSchedule(4)),
    )

    class CallsTheOther(LogitsProcessor):
        def __init__(self, plugins):
            self.plugins, self.texts = plugins, []

        def __call__(self, input_ids, scores):
            extra = {"logits_processor": list(self.plugins)} if self.plugins else {}
            self.texts.append(other.generate(input_ids, max_new_tokens=6, do_sample=False, **extra).tolist())
            if self.plugins:  # and the same model again, within its own call
                target.generate(input_ids, max_new_tokens=3, do_sample=False, logits_processor=list(self.plugins[:0]))
            return scores

    plain_nested, nested = CallsTheOther([]), CallsTheOther([inner])
    plain = call(target, prompt(), do_sample=False, logits_processor=[plain_nested])
    ours = call(target, prompt(), do_sample=False, logits_processor=[nested, outer])
    same(plain, ours)
    assert plain_nested.texts == nested.texts
    assert outer.last.num_accepted > 0 and inner.stats.num_calls == len(nested.texts)


def test_a_reused_cache_and_chunked_prefill():
    """A second turn on the first turn's cache, through every engine."""
    target, draft = pair("mistral")
    ids = prompt(length=12, seed=3)
    for extra in ({}, {"prefill_chunk_size": 4}):
        turns = []
        for engine in (None, "rounds", "lookahead"):
            plugin = specplug.attach(target, draft, engine=engine, gamma=4) if engine else None
            cache = DynamicCache(config=target.config)
            first = call(target, ids, do_sample=False, **{NAME: cache}, **extra)
            second = torch.cat([first.sequences, prompt(length=5, seed=4)], dim=1)
            turns.append(call(target, second, do_sample=False, **{NAME: first[NAME]}))
            if plugin:
                assert plugin.last.engine == engine and plugin.last.num_accepted > 0
                plugin.detach()
        same(turns[0], turns[1])
        same(turns[0], turns[2])


def test_a_config_as_a_processor(tiny_pipeline):
    pipe, _ = tiny_pipeline
    plugin = specplug.SpeculativeProcessor(specplug.load("pair=tiny", "schedule=fixed", "schedule.gamma=3"))
    plain = pipe("Ben has 12 coins.", max_new_tokens=20, do_sample=False)
    assert pipe("Ben has 12 coins.", max_new_tokens=20, do_sample=False, logits_processor=[plugin]) == plain
    assert plugin.last.engine == "lookahead" and plugin.last.num_accepted > 0
    with pytest.raises(ValueError, match="vocab"):
        call(
            pipe.model,
            prompt(),
            logits_processor=[specplug.SpeculativeProcessor(noisy_copy(make_model()), schedule=FixedSchedule(4))],
        )


@pytest.mark.parametrize("how", ["inference_mode", "autocast", "train"])
def test_surroundings(how):
    target, draft = pair("llama")
    surroundings = {
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.float32, enabled=False),
        "train": torch.enable_grad,
    }[how]
    if how == "train":
        target.train()
    try:
        with surroundings():
            plain = call(target, prompt(), do_sample=False)
            for engine in ("rounds", "lookahead"):
                with specplug.attach(target, draft, engine=engine, gamma=4):
                    same(plain, call(target, prompt(), do_sample=False))
                assert target.training == (how == "train")
    finally:
        target.eval()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_watermark_that_keeps_state(rows):
    """SynthID remembers the contexts it has seen: equal ids under the same seed only if it sees each of them once."""
    from transformers import SynthIDTextWatermarkingConfig

    target, draft = pair("llama")
    ids = torch.cat([prompt(seed=seed) for seed in range(rows)])
    watermark = {"do_sample": True, "top_k": 8}

    def marked(seed):
        made = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3)
        return call(target, ids, seed, watermarking_config=made, **watermark)

    plain = [marked(seed) for seed in range(6)]
    with specplug.attach(target, draft, engine="lookahead", gamma=4) as plugin:
        for seed in range(6):
            same(plain[seed], marked(seed))
        assert plugin.stats.num_accepted > 0


def test_rounds_cannot_be_asked_of_a_logits_processor():
    target, draft = pair("llama")
    with pytest.raises(ValueError, match="take auto or lookahead"):
        call(target, prompt(), logits_processor=[specplug.SpeculativeProcessor(draft, engine="rounds")])
