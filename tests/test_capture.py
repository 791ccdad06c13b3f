"""Recorded passes: bit by bit what transformers computes, used only where that was seen, made anew when the model changes."""

import gc
import json
import os
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    GPTNeoXConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Qwen3Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

import specplug
from specplug import capture, kernel
from specplug.cache import NAME, prepare_for_crop
from specplug.recording import Recording, trace
from specplug.stats import Stats


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(capture, "USES_BEFORE", 0)


def why_not(model):
    return capture.why_not(model, list(model.modules()))


def recordings(model):
    """Those that are used."""
    return {width for each in capture._KNOWN[model][1].values() for width in each.ready}


def run(model, widths, graph="capture"):
    """Logits of several passes in a row, and the cache's length behind each."""
    torch.manual_seed(0)
    cache, found = DynamicCache(config=model.config), []
    with torch.no_grad():
        model(input_ids=prompt(9), use_cache=True, **{NAME: cache})
        prepare_for_crop(cache, roomy=graph == "capture")  # the others copy the text at each pass, as transformers does
        passes = capture.Capture(graph).passes(model)
        for number, width in enumerate(widths):
            ids = prompt(width, seed=number)

            def ordinary(ids=ids):
                return model(input_ids=ids, use_cache=True, **{NAME: cache}).logits

            found.append((passes(ids, cache, ordinary), cache.get_seq_length()))
    return found


def same(one, other):
    return all(torch.equal(a, b) and m == n for (a, m), (b, n) in zip(one, other, strict=True))


WIDTHS = [1, 1, 1, 3, 3, 1, 3, 3, 5, 5, 1, 5, 3]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_replay_is_the_pass_bit_by_bit(kind):
    model = make_model(kind)
    assert same(run(model, WIDTHS), run(model, WIDTHS, "off"))
    assert recordings(model) == {1, 3, 5}


SMALL = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=64,
    max_position_embeddings=64,
    pad_token_id=1,  # which embeddings look for in their weights
)


@pytest.mark.parametrize(
    "config",
    [
        OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32),
        Qwen3Config(**SMALL, intermediate_size=64, num_key_value_heads=2, head_dim=8),
        GPTNeoXConfig(**SMALL, intermediate_size=64),
        MixtralConfig(**SMALL, intermediate_size=64, num_key_value_heads=2, num_local_experts=4, sliding_window=None),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_architectures_are_recorded_right(config, attention):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    assert same(run(model, WIDTHS), run(model, WIDTHS, "off"))
    assert recordings(model) == {1, 3, 5}


def test_what_decides_by_more_than_the_width_is_not_recorded():
    model = make_model("llama")
    layer = model.model.layers[0]
    original = type(layer)

    class Decides(original):
        def forward(self, hidden_states, *args, **kwargs):
            found = super().forward(hidden_states, *args, **kwargs)
            return found * 2 if hidden_states.sum() > 0 else found

    Decides.__module__ = original.__module__
    layer.__class__ = Decides
    assert same(run(model, WIDTHS), run(model, WIDTHS, "off"))
    assert recordings(model) == set()


def test_a_replay_that_differs_is_not_used(monkeypatch):
    original = capture.record

    def wrong(model, inputs, rooms):
        recorded = original(model, inputs, rooms)
        return lambda *inputs: recorded(*inputs) + 1e-6

    monkeypatch.setattr(capture, "record", wrong)
    model = make_model("llama")
    assert same(run(model, WIDTHS), run(model, WIDTHS, "off"))
    assert recordings(model) == set()


def change_in_place(model):
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)


def change_data(model):
    model.lm_head.weight.data = model.lm_head.weight.data * 1.5


def change_parameter(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.5)


def change_module(model):
    model.model.norm = nn.Identity()


def change_hook(model):
    model.model.norm.register_forward_hook(lambda module, inputs, output: output * 1.5)


def change_forward(model):
    original = model.model.norm.forward
    model.model.norm.forward = lambda x: original(x) * 1.5


def change_number(model):
    model.model.norm.variance_epsilon = 0.5


def change_config(model):
    model.config.num_hidden_layers = 1


def change_mode(model):
    model.set_attn_implementation("eager")


def change_back_and_forth(model):
    model.half()
    model.float()


@pytest.mark.parametrize(
    "change",
    [
        change_in_place,
        change_data,
        change_parameter,
        change_module,
        change_hook,
        change_forward,
        change_number,
        change_config,
        change_mode,
        change_back_and_forth,
    ],
)
def test_a_model_that_changes_is_not_replayed_as_it_was(change):
    model = make_model("llama")
    before = run(model, WIDTHS)
    assert recordings(model)
    change(model)
    after = run(model, WIDTHS)
    assert same(after, run(model, WIDTHS, "off"))
    assert change in (change_mode,) or not same(before, after), "the change changes something"


def test_a_class_that_is_patched_is_not_replayed_as_it_was(monkeypatch):
    model = make_model("llama")
    before, norm = run(model, WIDTHS), type(model.model.norm)
    original = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, x: original(self, x) * 1.5)
    after = run(model, WIDTHS)
    assert same(after, run(model, WIDTHS, "off")) and not same(before, after)


def test_a_function_that_is_patched_is_not_replayed_as_it_was(monkeypatch):
    model = make_model("llama")
    before = run(model, WIDTHS)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda query, key, *args, **kwargs: (query, key))
    after = run(model, WIDTHS)
    assert same(after, run(model, WIDTHS, "off")) and not same(before, after)


def test_another_function_under_the_name_of_sdpa_is_used(monkeypatch):
    """Registered by the caller before or after passes were recorded, in calls that pack attention elsewhere."""
    model = make_model("llama")
    call = dict(max_new_tokens=40, do_sample=False, eos_token_id=None)

    def twice(*args, **kwargs):
        found, weights = sdpa_attention_forward(*args, **kwargs)
        return found * 2, weights

    with specplug.attach(model, noisy_copy(model), gamma=3) as plugin:
        plugin.record_after = 0
        before = model.generate(prompt(9), **call)
        assert recordings(model)
        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", twice)
        found = model.generate(prompt(9), **call)
    assert torch.equal(found, model.generate(prompt(9), **call)) and not torch.equal(found, before)


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(3), TimeoutError("too late"), UnicodeDecodeError("utf-8", b"a", 0, 1, "no")],
    ids=lambda error: type(error).__name__,
)
def test_ctrl_c_inside_a_replay_is_ctrl_c(error, monkeypatch):
    """Signals come where Python runs, in a replay in our own operation; torch makes RuntimeErrors of what they raise."""

    def product(x, weight):
        return torch.ops.specplug.few_rows(x, weight, None)

    x, weight, recording = torch.randn(1, 64), torch.randn(64, 64), Recording()
    recording.replay = trace(product, [x, weight], [torch.randn(2, 64), weight])
    before = recording.run([x], [weight])

    def interrupted(*_):
        raise error

    monkeypatch.setattr(kernel, "_compiled", interrupted)
    kept = type(error) is not UnicodeDecodeError  # which cannot be made of its text
    with pytest.raises(type(error) if kept else RuntimeError) as caught:
        recording.run([x], [weight])
    assert not kept or caught.value.args == error.args
    monkeypatch.undo()
    assert torch.equal(recording.run([x], [weight]), before)


def test_what_one_thread_refuses_no_other_uses():
    one, other = torch.zeros(2), torch.ones(2)
    recording = Recording()
    recording.replay = lambda *inputs: [one]
    recording.check(1, [one], [one])
    assert recording.ready
    recording.check(1, [one], [other])
    recording.check(1, [one], [one])
    assert not recording.ready and recording.refused
    assert recording.run([one], []) == [one], "a thread that has begun to use it goes on"


@pytest.mark.parametrize(
    "which", ["training", "autocast", "gradients", "layer of somebody else's", "mode", "offloaded"]
)
def test_what_is_not_recorded_says_why(which):
    model = make_model("llama")
    with torch.no_grad():
        assert why_not(model) is None
        if which == "offloaded":
            model.to("meta")
        if which == "training":
            model.model.layers[0].train()
        if which == "layer of somebody else's":

            class Mine(nn.Linear):
                pass

            model.lm_head.__class__ = Mine
        if which == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert "autocast" in why_not(model)
            return
        if which == "mode":
            from torch.utils.flop_counter import FlopCounterMode

            with FlopCounterMode(display=False):
                assert "mode" in why_not(model)
            return
        if which == "gradients":
            with torch.enable_grad():
                assert "gradients" in why_not(model)
            return
        assert why_not(model) is not None
        assert capture.Capture("capture").passes(model)._recordings == why_not(model)


def test_weights_still_ask_for_gradients():
    model = make_model("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    run(model, WIDTHS)
    assert recordings(model)
    assert not model.model.embed_tokens.weight.requires_grad and model.lm_head.weight.requires_grad
    model(input_ids=prompt(4)).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize("options", [dict(do_sample=False), dict(do_sample=True, temperature=0.8)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_call_has_the_same_ids_with_and_without(options, attention):
    model = make_model("llama", attn_implementation=attention)
    draft = noisy_copy(model)
    found = {}
    for graph in ("capture", "off"):
        with specplug.attach(model, draft, gamma=3, graph=graph) as plugin:
            torch.manual_seed(0)
            found[graph] = [model.generate(prompt(9), max_new_tokens=60, **options) for _ in range(3)]
            assert (plugin.stats.seconds_capture > 0) == (graph == "capture")
            stats = plugin.stats
            if graph == "off":
                assert stats.num_replayed == 0 and stats.not_replayed == {
                    "LlamaForCausalLM: graph=off": stats.num_passes
                }
            else:
                assert stats.num_replayed > stats.num_passes / 2 and not stats.not_replayed
            assert stats.num_rounds < stats.num_passes <= stats.num_rounds + stats.num_draft_steps
            assert Stats.from_dict(json.loads(json.dumps(stats.to_dict()))) == stats
    assert all(map(torch.equal, *found.values()))
    assert 4 in recordings(model) and 1 in recordings(draft)


@pytest.mark.parametrize("options", [dict(do_sample=False), dict(do_sample=True, temperature=0.8)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_trees_are_replayed_too(options, attention):
    model = make_model("llama", attn_implementation=attention)
    draft = noisy_copy(model)
    found = {}
    for graph in ("capture", "off"):
        with specplug.attach(model, draft, tree=[3, 2, 1], graph=graph):
            torch.manual_seed(0)
            found[graph] = [model.generate(prompt(9), max_new_tokens=60, **options) for _ in range(2)]
    assert all(map(torch.equal, *found.values()))
    assert 16 in {
        width for (mask, _), each in capture._KNOWN[model][1].items() if mask is model.dtype for width in each.ready
    }
    assert {3, 6} <= recordings(draft)


@pytest.mark.parametrize("what", ["padding", "positions"])
def test_padding_and_positions_of_ones_own_go_the_ordinary_way(what):
    model = make_model("llama")
    ids, mask = prompt(9), torch.ones((1, 9), dtype=torch.long)
    given = {"attention_mask": mask}
    if what == "padding":
        mask[:, :3] = 0
    else:
        given["position_ids"] = torch.arange(5, 14)[None]
    plain = model.generate(ids, max_new_tokens=40, do_sample=False, **given)
    with specplug.attach(model, "lookup", graph="capture") as plugin:
        assert torch.equal(model.generate(ids, max_new_tokens=40, do_sample=False, **given), plain)
        assert plugin.last.engine != "plain" and plugin.stats.seconds_capture == 0
        (reason,) = plugin.last.not_replayed
        assert what in reason and plugin.last.num_replayed == 0 and plugin.last.num_passes == plugin.last.num_rounds


WINDOWED = SMALL | dict(intermediate_size=64, head_dim=8, sliding_window=24, initializer_range=0.3, eos_token_id=None)
WINDOWS = {
    "mistral": MistralConfig(**WINDOWED, num_key_value_heads=2),
    "gemma": Gemma3TextConfig(**WINDOWED | {"num_hidden_layers": 3}, sliding_window_pattern=3),
}


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize(
    "options", [dict(do_sample=False), dict(do_sample=True, temperature=0.8)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("drafted", ["model", "lookup"])
def test_texts_of_two_windows_are_replayed_and_longer_ones_are_not(kind, options, drafted):
    """The cache of a window drops what is behind it, so passes on it are not recorded; a cache that holds everything has the same text
    and leaves the same behind."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(WINDOWS[kind]).eval()
    draft = noisy_copy(model, 0.01) if drafted == "model" else "lookup"
    ids = prompt(3).repeat(1, 3)
    for num_new, within in ((39, True), (40, False)):
        call = options | dict(max_new_tokens=num_new, min_new_tokens=num_new, return_dict_in_generate=True)
        torch.manual_seed(1)
        expected = model.generate(ids, **call)
        with specplug.attach(model, draft, gamma=3, verify="walk") as plugin:
            plugin.record_after = 0
            torch.manual_seed(1)
            found = model.generate(ids, **call)
        assert plugin.last.engine == "rounds" and torch.equal(found.sequences, expected.sequences)
        assert plugin.last.num_accepted > 0 or drafted == "lookup"
        assert (plugin.last.num_replayed > plugin.last.num_passes / 2) == within
        reasons = [each.partition(": ")[2] for each in plugin.last.not_replayed]
        assert reasons == [] if within else set(reasons) == {"its cache has layers that do not hold the whole text"}
        for mine, plains in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert mine.get_seq_length() == plains.get_seq_length()
            assert torch.allclose(mine.keys, plains.keys, atol=1e-4) and torch.allclose(
                mine.values, plains.values, atol=1e-4
            )


def test_a_draft_that_is_not_replayed_is_named():
    model, draft = make_model("llama"), make_model("gpt2")
    draft.transformer.h[0].register_forward_hook(lambda *_: None)
    with specplug.attach(model, draft, gamma=3) as plugin:
        model.generate(prompt(9), max_new_tokens=60, do_sample=False)
    (reason,) = plugin.last.not_replayed
    assert reason.startswith("GPT2LMHeadModel: GPT2Block ") and "hooks" in reason
    assert plugin.last.not_replayed[reason] == plugin.last.num_draft_steps - 1  # but the prompt's


def test_threads_share_recordings():
    model = make_model("llama")
    draft = noisy_copy(model)
    expected = model.generate(prompt(9), max_new_tokens=60, do_sample=False)
    with specplug.attach(model, draft, gamma=3):
        results = []
        threads = [
            threading.Thread(
                target=lambda: results.append(model.generate(prompt(9), max_new_tokens=60, do_sample=False))
            )
            for _ in range(4)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert len(results) == 4 and all(torch.equal(each, expected) for each in results)


def test_recordings_go_with_their_model():
    model = make_model("llama")
    run(model, WIDTHS)
    weights, known = weakref.ref(model.lm_head.weight), weakref.ref(model)
    del model
    gc.collect()
    assert known() is None and weights() is None


@pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="needs /proc/self/statm to see this process's memory"
)
def test_recordings_take_no_memory_once_their_model_is_gone():
    """torch.jit.trace would keep about 20 MB of these each time."""

    def memory_mb():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    held = []
    for _ in range(5):
        model = make_model("llama", layers=10)
        run(model, [2, 2, 2])
        assert recordings(model) == {2}
        del model
        held.append(memory_mb())
    assert held[4] - held[1] < 20, held


@pytest.mark.parametrize("length", [1, 255, 256, 257])
@pytest.mark.parametrize("width", [1, 2, 17, capture.MAX_WIDTH])
def test_positions_and_what_they_see(length, width):
    """Of masks that are made for texts of many lengths."""
    ids, cache = (
        torch.zeros((1, width), dtype=torch.long),
        SimpleNamespace(layers=[SimpleNamespace(get_seq_length=lambda: length)]),
    )
    given, positions, seen = capture._inputs(ids, cache, False)
    assert given is ids and positions.tolist() == [list(range(length, length + width))]
    if width > 1:
        expected = torch.arange(length + width) <= torch.arange(length, length + width)[:, None]
        assert torch.equal(seen, expected[None, None])


def test_a_model_that_writes_into_its_positions_is_not_recorded(monkeypatch):
    """They are those of other passes too, which would then be elsewhere."""
    forward = modeling_llama.LlamaRotaryEmbedding.forward

    def writes(self, x, position_ids):
        found = forward(self, x, position_ids)
        position_ids.add_(1)
        return found

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", writes)
    target = make_model()
    draft = noisy_copy(target, scale=0.02)
    plain = [target.generate(prompt(seed=seed), max_new_tokens=30) for seed in range(4)]
    with specplug.attach(target, draft, gamma=4) as plugin:
        plugin.record_after = 0
        for seed, expected in enumerate(plain):
            assert torch.equal(target.generate(prompt(seed=seed), max_new_tokens=30), expected)
    recordings = capture._KNOWN[draft][
        1
    ].values()  # the target's are not made: it has written into the call's positions
    assert recordings and all(each.refused for each in recordings)
    assert capture._positions(capture.ROOM, target.device)[0, :9].tolist() == list(range(9))
