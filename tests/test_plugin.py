"""attach and detach: symmetrical, refusing what does not fit, leaving alone what is not theirs."""

import contextlib
import copy
import functools
import logging
import pickle
import threading

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import specplug
from specplug import hook
from specplug.cache import NAME
from specplug.trace import Trace

GREEDY = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture
def target():
    return make_model()


@pytest.fixture
def draft(target):
    return noisy_copy(target)


def fingerprint(model):
    weights = {name: (tensor.data_ptr(), tensor.sum().item()) for name, tensor in model.state_dict().items()}
    return type(model), weights, model.config.to_dict(), model.generation_config.to_dict(), dict(vars(model))


class Raises(LogitsProcessor):
    def __init__(self, error):
        self.error, self.calls = error, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 4 and self.error is not None:
            raise self.error
        return scores


@pytest.mark.parametrize("error", [None, RuntimeError("processor"), KeyboardInterrupt()])
def test_detach_leaves_everything_as_it_was(target, draft, error):
    before = fingerprint(target), fingerprint(draft)
    plugin = specplug.attach(target, draft, gamma=4)
    if error is None:
        target.generate(prompt(), **GREEDY)
    else:
        with pytest.raises(type(error)):
            target.generate(prompt(), logits_processor=[Raises(error)], **GREEDY)
    plugin.detach()
    assert (fingerprint(target), fingerprint(draft)) == before


class FailsLater:
    """Raises at the fourth call, wherever it is put."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("on purpose")
        return torch.tensor([False])

    put = __call__

    def end(self):
        pass


@pytest.mark.parametrize("engine", ["rounds", "lookahead"])
@pytest.mark.parametrize("where", ["criterion", "streamer", "target", "draft"])
def test_side_effects_of_an_exception(target, draft, where, engine):
    """A draft that raises does not lose the text; everything else comes through, and nothing is left behind."""
    plain = target.generate(prompt(), **GREEDY)
    before = fingerprint(target), fingerprint(draft)
    extra = {"criterion": {"stopping_criteria": [FailsLater()]}, "streamer": {"streamer": FailsLater()}}.get(where, {})
    hooks = []
    if where in ("target", "draft"):
        fails, model = FailsLater(), {"target": target, "draft": draft}[where]
        hooks = [model.register_forward_pre_hook(lambda *_: (fails(), None)[1])]
    plugin = specplug.attach(target, draft, engine=engine, gamma=4)
    try:
        if where == "draft":
            assert torch.equal(target.generate(prompt(), **GREEDY, **extra), plain)
        else:
            with pytest.raises(RuntimeError, match="on purpose"):
                target.generate(prompt(), **GREEDY, **extra)
    finally:
        plugin.detach()
        for each in hooks:
            each.remove()
    assert (fingerprint(target), fingerprint(draft)) == before
    assert torch.equal(target.generate(prompt(), **GREEDY), plain)


def test_with_form_and_detach_function(target, draft):
    with specplug.attach(target, draft, gamma=4) as plugin:
        assert specplug.attached(target) is plugin
        assert isinstance(target, type(target)) and type(target).__name__ == "LlamaForCausalLM"
    assert specplug.attached(target) is None
    specplug.attach(target, draft, gamma=4)
    specplug.detach(target)
    specplug.detach(target)
    assert specplug.attached(target) is None


def test_counts_of_calls_add_up(target, draft):
    with specplug.attach(target, draft, gamma=4) as plugin:
        assert plugin.last is None
        for seed in range(3):
            target.generate(prompt(seed=seed), **GREEDY)
        assert plugin.stats.num_calls == 3 and plugin.last.num_calls == 1
        assert plugin.last.num_new_tokens <= plugin.stats.num_new_tokens
        assert plugin.stats.seconds_rounds >= plugin.stats.seconds_draft_forward + plugin.stats.seconds_target > 0
        plugin.reset_stats()
        assert plugin.stats.num_calls == 0 and plugin.last is None


def test_copies_and_pickles_are_plain_models(target, draft, tmp_path):
    ids = prompt()
    plain = target.generate(ids, **GREEDY)
    original = type(target)
    with specplug.attach(target, draft, gamma=4):
        for twin in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
            assert type(twin) is original and specplug.attached(twin) is None
            assert torch.equal(twin.generate(ids, **GREEDY), plain)
        target.save_pretrained(tmp_path)
    assert '"LlamaForCausalLM"' in (tmp_path / "config.json").read_text()


def test_two_models_do_not_mix(target, draft):
    other = make_model("gpt2")
    ids = prompt()
    plain = [model.generate(ids, **GREEDY) for model in (target, other)]
    with specplug.attach(target, draft, gamma=4) as first, specplug.attach(other, "lookup", gamma=4) as second:
        ours = [model.generate(ids, **GREEDY) for model in (target, other)]
        assert first.last.num_draft_steps > 0 and second.last.num_draft_steps == 0
    assert all(map(torch.equal, plain, ours))


def test_threads_on_one_model(target, draft):
    """8 threads of 50 calls give what 400 calls in a row give, whichever engine each of them asks for."""
    prompts = [prompt(length=5 + seed, seed=seed) for seed in range(5)]
    call = {"max_new_tokens": 8, "do_sample": False}
    plain = [target.generate(ids, **call) for ids in prompts]
    wrong = []
    with specplug.attach(target, draft, gamma=4) as plugin:

        def work(number):
            for k in range(50):
                which, engine = (k + number) % 5, ("rounds", "lookahead")[k % 2]
                if not torch.equal(target.generate(prompts[which], specplug={"engine": engine}, **call), plain[which]):
                    wrong.append((which, engine))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert plugin.stats.num_calls == 400
    assert not wrong


class Ends(BaseStreamer):
    """Gets the prompt when transformers has looked up its loop and not begun it yet."""

    def __init__(self, service):
        self.service = service

    def put(self, value):
        service, self.service = self.service, lambda: None
        service()

    def end(self):
        pass


@pytest.mark.parametrize("how", ["the plugin is detached", "another call is over"])
def test_a_call_goes_on_where_the_class_is_given_back_meanwhile(target, draft, how):
    """As another thread may do at any time: by `detach`, or when a call ends that has the plugin as a processor."""
    original, plain = type(target), target.generate(prompt(), **GREEDY)
    if how == "another call is over":
        hook.begin_call(target)
        end = functools.partial(hook.end_call, target)
    else:
        end = specplug.attach(target, draft, gamma=4).detach
    step = target._call_impl  # looked up before, called behind
    assert torch.equal(target.generate(prompt(), streamer=Ends(end), **GREEDY), plain)
    assert type(target) is original
    with torch.no_grad():
        assert torch.equal(step(input_ids=prompt()).logits, target(input_ids=prompt()).logits)


REFUSED = {
    "the target itself": (lambda t, d: specplug.attach(t, t, gamma=4), "target itself"),
    "negative gamma": (lambda t, d: specplug.attach(t, d, gamma=-1), "gamma=-1"),
    "half a gamma": (lambda t, d: specplug.attach(t, d, gamma=2.5), "gamma=2.5"),
    "unknown engine": (lambda t, d: specplug.attach(t, d, engine="fast", gamma=4), "auto, rounds, lookahead, plain"),
    "unknown rule": (lambda t, d: specplug.attach(t, d, verify="lossy", gamma=4), "token"),
    "not a draft": (lambda t, d: specplug.attach(t, 7, gamma=4), "draft=7"),
    "not a model": (lambda t, d: specplug.attach(torch.nn.Linear(2, 2), d, gamma=4), "Linear"),
    "copied in every call": (
        lambda t, d: specplug.attach(torch.nn.DataParallel(t), d, gamma=4),
        "attach to its .module",
    ),
    "other vocabulary": (
        lambda t, d: specplug.attach(t, make_model(vocab_size=70), gamma=4),
        "64 tokens and the draft 70",
    ),
    "confidence of a lookup": (
        lambda t, d: specplug.attach(t, "lookup", schedule=specplug.schedule.ConfidenceSchedule(4, 0.5)),
        "lookup is none",
    ),
    "gamma and schedule": (
        lambda t, d: specplug.attach(t, d, gamma=2, schedule=specplug.schedule.FixedSchedule(2)),
        "gamma and schedule",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(target, draft, name):
    ask, answer = REFUSED[name]
    with pytest.raises(ValueError, match=answer) as caught:
        ask(target, draft)
    assert "\n" not in str(caught.value)
    assert specplug.attached(target) is None


def test_attaching_twice_is_refused(target, draft):
    with specplug.attach(target, draft, gamma=4) as plugin:
        with pytest.raises(ValueError, match="detach"):
            specplug.attach(target, draft, gamma=4)
        with pytest.raises(ValueError, match="another model"):
            plugin.attach(make_model(seed=5))


def test_vocabularies_padded_for_the_hardware_are_allowed():
    """As 151936 and 152064 of Qwen2.5: greedy ids are equal both ways round."""
    small, large = make_model(vocab_size=12_800, seed=1), make_model(vocab_size=12_928, seed=1)
    with torch.no_grad():  # the same model but for rows that no token has
        for ours, theirs in zip(large.parameters(), small.parameters(), strict=True):
            ours[: theirs.shape[0]] = theirs
        large.lm_head.weight[12_800:] = 0
    for target, draft in ((small, large), (large, small)):
        plain = target.generate(prompt(), **GREEDY)
        with specplug.attach(target, draft, gamma=4) as plugin:
            assert torch.equal(target.generate(prompt(), **GREEDY), plain)
            assert plugin.last.alpha > 0.5
            target.generate(prompt(), do_sample=True, max_new_tokens=20)


def test_the_real_padded_sizes_are_allowed_and_others_are_not():
    from transformers import AutoModelForCausalLM, LlamaConfig

    def shell(vocab_size):
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocab_size, num_hidden_layers=1))

    specplug.plugin.check_pair(shell(152_064), shell(151_936))
    with pytest.raises(ValueError, match=r"152064 tokens and the draft 128256"):
        specplug.plugin.check_pair(shell(152_064), shell(128_256))


def test_a_draft_that_fails_does_not_lose_the_text(target, draft, caplog):
    from specplug.drafters.model import ModelDrafter, ModelSession

    class Fails(ModelDrafter):
        def start(self, request):
            session = ModelSession(self, request)
            propose, calls = session.propose, []

            def propose_twice(ids, gamma):
                calls.append(1)
                if len(calls) == 3:
                    raise MemoryError("out of memory\nand more")
                return propose(ids, gamma)

            session.propose = propose_twice
            return session

    plain = target.generate(prompt(), **GREEDY)
    with specplug.attach(target, Fails(draft), gamma=2) as plugin, caplog.at_level(logging.WARNING, "specplug"):
        assert torch.equal(target.generate(prompt(), **GREEDY), plain)
        assert plugin.last.drafted[0] > 0
    assert [record.message.endswith("without it: out of memory") for record in caplog.records] == [True]


NOT_SERVED = {
    "hidden states": (
        lambda: {"input_ids": prompt(), "output_hidden_states": True, "return_dict_in_generate": True},
        "hidden states",
    ),
    "no cache": (lambda: {"input_ids": prompt(), "use_cache": False}, "use_cache=False"),
    "static cache": (lambda: {"input_ids": prompt(), "cache_implementation": "static"}, "StaticCache"),
}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_is_not_served_is_decoded_plainly_with_one_warning(target, draft, name, caplog):
    make, reason = NOT_SERVED[name]
    arguments = {**GREEDY, **make()}
    torch.manual_seed(0)
    plain = target.generate(**arguments)
    with specplug.attach(target, draft, gamma=4) as plugin, caplog.at_level(logging.WARNING, "specplug"):
        for _ in range(2):
            torch.manual_seed(0)
            ours = target.generate(**arguments)
        assert plugin.last.engine == "plain" and reason in plugin.last.reason
    assert torch.equal(getattr(plain, "sequences", plain), getattr(ours, "sequences", ours))
    assert [reason in record.message for record in caplog.records if record.name == "specplug.plugin"] == [True]


def test_engine_rounds_refuses_instead(target, draft):
    embeds = target.get_input_embeddings()(prompt())
    with (
        specplug.attach(target, draft, engine="rounds", gamma=4),
        pytest.raises(ValueError, match="given as embeddings"),
    ):
        target.generate(inputs_embeds=embeds, **GREEDY)
    with (
        specplug.attach(target, draft, engine="lookahead", gamma=4),
        pytest.raises(ValueError, match="use_cache=False"),
    ):
        target.generate(prompt(), use_cache=False, **GREEDY)


def test_auto_takes_the_engine_that_serves_and_says_why(target, draft):
    two, embeds = torch.cat([prompt(), prompt(seed=1)]), target.get_input_embeddings()(prompt())
    calls = [
        ({"inputs": prompt()}, "rounds", "exactly"),
        ({"inputs": two}, "rounds", "exactly"),
        ({"inputs": two, "return_dict_in_generate": True}, "lookahead", "cache of all sequences"),
        ({"inputs": two, "logits_processor": [Raises(None)]}, "lookahead", "Raises may look at all"),
        ({"inputs": two, "eos_token_id": None, "max_time": 1e6}, "lookahead", "without an end-of-sequence token"),
        ({"inputs_embeds": embeds}, "lookahead", "embeddings"),
        ({"inputs": prompt(), "use_cache": False}, "plain", "use_cache=False"),
    ]
    with specplug.attach(target, draft, gamma=4) as plugin:
        for arguments, engine, reason in calls:
            target.generate(**arguments, **GREEDY)
            assert plugin.last.engine == engine and reason in plugin.last.reason


def test_settings_of_one_call(target, draft):
    plain = target.generate(prompt(), **GREEDY)
    with specplug.attach(target, draft, gamma=3) as plugin:
        assert torch.equal(target.generate(prompt(), specplug={"gamma": 0}, **GREEDY), plain)
        assert plugin.last.num_draft_tokens == 0
        assert torch.equal(target.generate(prompt(), specplug={"gamma": 5, "engine": "lookahead"}, **GREEDY), plain)
        assert plugin.last.engine == "lookahead" and max(plugin.last.drafted) == 5
        target.generate(prompt(), **GREEDY)
        assert plugin.last.engine == "rounds" and max(plugin.last.drafted) == 3
        for wrong, said in (
            ({"gama": 1}, "gamma, engine"),
            ({"gamma": -1}, "0 or more"),
            ({"engine": "x"}, "lookahead"),
        ):
            with pytest.raises(ValueError, match=said):
                target.generate(prompt(), specplug=wrong, **GREEDY)


def test_a_call_that_is_refused_says_so_and_one_that_is_interrupted_says_by_what_it_was_served(target, draft):
    two = torch.cat([prompt(), prompt(seed=1)])
    refused = [
        ({"engine": "rounds"}, {"inputs": two, "num_return_sequences": 1, "return_dict_in_generate": True}),
        ({"gamma": -1}, {"inputs": prompt()}),
        ({"seed": 1}, {"inputs": prompt()}),  # greedy
        (
            {"seed": 1, "engine": "plain"},
            {"inputs": prompt(), "do_sample": True, "return_dict_in_generate": True, "output_scores": True},
        ),
    ]
    with specplug.attach(target, draft, gamma=3) as plugin:
        for settings, arguments in refused:
            with pytest.raises(ValueError) as error:
                target.generate(**{**GREEDY, **arguments}, specplug=settings)
            assert plugin.last.engine == "refused" and plugin.last.reason == str(error.value)
            assert plugin.last.num_new_tokens == 0
        plugin.trace = Trace()
        with pytest.raises(ValueError, match="records one sequence"):
            target.generate(two, **GREEDY)
        assert plugin.last.engine == "refused" and "records one sequence" in plugin.last.reason
        plugin.trace = None
        for engine in ("rounds", "lookahead", "plain"):
            with pytest.raises(RuntimeError):
                target.generate(
                    prompt(), logits_processor=[Raises(RuntimeError())], specplug={"engine": engine}, **GREEDY
                )
            assert plugin.last.engine == engine


def test_detach_during_a_call_lets_it_finish(target, draft):
    class Detaches(LogitsProcessor):
        def __init__(self):
            self.calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            if self.calls == 5:
                specplug.detach(target)
            return scores

    plain = target.generate(prompt(), **GREEDY)
    original = type(target)
    for engine in ("rounds", "lookahead"):
        plugin = specplug.attach(target, draft, engine=engine, gamma=4)
        assert torch.equal(target.generate(prompt(), logits_processor=[Detaches()], **GREEDY), plain)
        assert plugin.last.num_accepted > 0 and type(target) is original and specplug.attached(target) is None


def test_engine_plain_never_drafts(target, draft):
    with specplug.attach(target, draft, engine="plain", gamma=4) as plugin:
        target.generate(prompt(), **GREEDY)
        assert plugin.last.engine == "plain" and plugin.last.num_rounds == 0


def test_beam_search_and_assistants_are_left_alone(target, draft, caplog):
    beams = {**GREEDY, "num_beams": 3}
    plain = target.generate(prompt(), **beams), target.generate(prompt(), assistant_model=draft, **GREEDY)
    with specplug.attach(target, draft, gamma=4) as plugin, caplog.at_level(logging.WARNING, "specplug"):
        ours = target.generate(prompt(), **beams), target.generate(prompt(), assistant_model=draft, **GREEDY)
        assert plugin.stats.num_calls == 0
    assert all(map(torch.equal, plain, ours))
    assert sum("beam search" in record.message for record in caplog.records) == 1


def test_a_plugin_as_a_processor_is_no_draft_of_an_assistant(target, draft, caplog):
    """The assistant drafts in a loop of its own, under the processors of the call."""
    plugin = specplug.SpeculativeProcessor(draft)
    with caplog.at_level(logging.WARNING, "specplug"):
        ours = target.generate(prompt(), assistant_model=draft, logits_processor=[plugin], **GREEDY)
    assert torch.equal(ours, target.generate(prompt(), assistant_model=draft, **GREEDY))
    assert plugin.last is None and "left to transformers" in caplog.text
    target.generate(prompt(), logits_processor=[plugin], **GREEDY)
    assert plugin.last.num_accepted > 0


class WritesInPlace(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[:, input_ids.shape[1]] += 9.0
        return scores


@pytest.mark.parametrize("settings", [{"gamma": 4}, {"gamma": 4, "verify": "walk"}, {"tree": [2, 2, 1]}], ids=str)
def test_logits_are_those_that_a_processor_left(target, draft, settings):
    """transformers keeps the logits that it gave the processors, and one may write into them."""
    call = {"logits_processor": [WritesInPlace()], "return_dict_in_generate": True, "output_logits": True}
    for do_sample in (False, "verify" in settings):
        call |= {"max_new_tokens": 20, "do_sample": do_sample}
        torch.manual_seed(0)
        plain = target.generate(prompt(), **call)
        torch.manual_seed(0)
        with specplug.attach(target, draft, engine="rounds", **settings) as plugin:
            ours = target.generate(prompt(), **call)
        assert plugin.last.num_draft_tokens > 0 and torch.equal(ours.sequences, plain.sequences)
        for theirs, each in zip(plain.logits, ours.logits, strict=True):
            assert torch.allclose(theirs, each, atol=1e-4)


def test_configuration_of_a_draft_model_without_rollback_is_refused(target):
    from transformers import MambaConfig, MambaForCausalLM

    state = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="cannot be rolled back"):
        specplug.attach(target, state, gamma=4)
    plain = state.generate(prompt(), **GREEDY)
    with specplug.attach(state, "lookup", gamma=4) as plugin:
        assert torch.equal(state.generate(prompt(), **GREEDY), plain)
        assert plugin.last.engine == "plain"


def test_pipeline_with_stop_strings_and_a_streaming_thread(tiny_pipeline):
    """What breaks transformers' assisted generation: stop strings, and a consumer in another thread."""
    pipe, draft = tiny_pipeline
    chat = [
        {
            "role": "user",
            "content": "Write a short story about Mia, a red kite and the lake. There should be cake in it.",
        }
    ]
    asked = {"max_new_tokens": 90, "do_sample": False, "return_full_text": False}
    plain = pipe(chat, **asked), pipe(chat, stop_strings=["little"], tokenizer=pipe.tokenizer, **asked)
    with specplug.attach(pipe, draft, gamma=5) as plugin:
        ours = pipe(chat, **asked), pipe(chat, stop_strings=["little"], tokenizer=pipe.tokenizer, **asked)
        assert plugin.last.engine == "rounds" and plugin.stats.alpha > 0
        streamer = TextIteratorStreamer(pipe.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
        thread = threading.Thread(target=pipe, args=(chat,), kwargs={"streamer": streamer, **asked})
        thread.start()
        streamed = "".join(streamer)
        thread.join()
    assert plain == ours
    assert ours[1][0]["generated_text"].endswith("little")
    assert streamed == plain[0][0]["generated_text"]


def test_output_object_has_the_cache_under_its_name(target, draft):
    with specplug.attach(target, draft, gamma=4):
        output = target.generate(prompt(), return_dict_in_generate=True, **GREEDY)
    assert output[NAME].get_seq_length() == output.sequences.shape[1] - 1
    assert output.attentions is None and output.scores is None


def test_caches_that_cannot_be_rolled_back_are_named(target):
    from transformers import DynamicCache, StaticCache

    from specplug.cache import why_not_croppable

    offloaded = DynamicCache(config=target.config)
    offloaded.offloading = True  # what `cache_implementation="offloaded"` makes, without a second device to move it to
    assert "offloaded" in why_not_croppable(offloaded)
    assert "StaticCache" in why_not_croppable(StaticCache(config=target.config, max_cache_len=8))
    assert "use_cache=False" in why_not_croppable(None)
    assert why_not_croppable(DynamicCache(config=target.config)) is None


class RaisesAt(StoppingCriteria):
    """As a criterion, a streamer or a processor; asked once for each token."""

    def __init__(self, number):
        self.number, self.asked = number, 0

    def __call__(self, input_ids, scores):
        self.asked += 1
        if self.asked == self.number:
            raise RuntimeError("on purpose")
        return scores if isinstance(scores, torch.Tensor) else torch.zeros(len(input_ids), dtype=torch.bool)

    def put(self, value):
        self(value, None)

    def end(self):
        pass


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("llama", dict(gamma=4)),
        ("llama", dict(tree=[2, 2, 1])),
        ("llama", dict(gamma=4, engine="lookahead")),
        ("mistral", dict(gamma=4)),
    ],
)
def test_a_cache_is_as_far_as_the_text_when_a_call_was_interrupted(kind, how):
    """As after plain decoding, so that a conversation goes on from it; drafts that were not kept are no part of it."""
    model = make_model(kind)
    draft = noisy_copy(model)
    wheres = ("stopping_criteria", "streamer", "logits_processor")
    for where, number in [(where, number) for where in wheres for number in (2, 3, 4, 5, 8)]:
        left = []
        for attached in (False, True):
            fails, cache = RaisesAt(number), DynamicCache(config=model.config)
            given = {where: fails if where == "streamer" else [fails], NAME: cache}
            with contextlib.ExitStack() as stack:
                if attached:
                    stack.enter_context(specplug.attach(model, draft, **how))
                stack.enter_context(pytest.raises(RuntimeError, match="on purpose"))
                model.generate(prompt(), **GREEDY, **given)
            left.append(cache)
        for one, other in zip(*(each.layers for each in left), strict=True):
            less = one.get_seq_length() - other.get_seq_length()
            # A processor is asked once the last token is in the cache, by plain decoding, which passes over one at a time.
            assert 0 <= less <= (where == "logits_processor"), (where, number)
            keys = one.keys[:, :, : one.keys.shape[2] - less]
            held = min(keys.shape[2], other.keys.shape[2])
            assert torch.allclose(keys[:, :, -held:], other.keys[:, :, -held:], atol=1e-4), (where, number)
