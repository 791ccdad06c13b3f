"""Packed attention: transformers' results up to rounding, put in place for a call and taken out again."""

import inspect
import threading

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import specplug
from specplug import capture, packed


class Module(nn.Module):
    is_causal = True
    num_key_value_groups = 3


def inputs(width, rows=2, length=11, groups=3, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn((rows, 2 * groups, width, size), generator=generator)
    key, value = (torch.randn((rows, 2, length, size), generator=generator) for _ in range(2))
    mask = torch.rand((rows, 1, width, length), generator=generator) < 0.6
    mask[..., 0] = True
    return query, key, value, mask


def agree(found, expected):
    return torch.allclose(found[0], expected[0], atol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 5, 17])
def test_it_computes_what_transformers_computes(width):
    module, (*given, mask) = Module().eval(), inputs(width)
    for each in (mask, mask[:1], torch.where(mask, 0.0, torch.finfo(torch.float32).min)):
        assert agree(packed.packed(module, *given, each), sdpa_attention_forward(module, *given, each))
        scaled = sdpa_attention_forward(module, *given, each, scaling=0.2)
        assert agree(packed.packed(module, *given, each, scaling=0.2), scaled)


def test_one_position_with_a_mask_is_packed_where_transformers_would_copy(monkeypatch):
    module, (*given, mask) = Module().eval(), inputs(1)
    expected = sdpa_attention_forward(module, *given, mask)
    monkeypatch.setattr(packed, "sdpa_attention_forward", None)
    assert agree(packed.packed(module, *given, mask), expected)


def test_models_that_give_the_mask_by_name_are_served():
    """As AFMoE does; names are those of transformers' own function."""
    module, (query, key, value, mask) = Module().eval(), inputs(5)
    names = list(inspect.signature(sdpa_attention_forward).parameters)[1:5]
    given = dict(zip(names, (query, key, value, mask), strict=True))
    assert agree(packed.packed(module, **given), sdpa_attention_forward(module, **given))


def test_the_order_of_heads_and_the_mask_matter():
    """Negative control: what a wrong packing would compute is told apart."""
    module, (query, key, value, mask) = Module().eval(), inputs(5)
    expected = sdpa_attention_forward(module, query, key, value, mask)
    turned = query.reshape(2, 2, 3, 5, 8).flip(2).reshape(query.shape)
    assert not agree(packed.packed(module, turned, key, value, mask), expected)
    assert not agree(packed.packed(module, query, key, value, mask.flip(2)), expected)


def test_what_it_does_not_serve_goes_to_transformers(monkeypatch):
    seen = []
    monkeypatch.setattr(packed, "sdpa_attention_forward", lambda *args, **kwargs: seen.append(kwargs) or "theirs")
    module, (query, key, value, mask) = Module().eval(), inputs(5)
    assert packed.packed(module, query, key, value, None) == "theirs"
    wide = [each.expand(-1, -1, 65, -1) for each in (query[:, :, :1], mask[:, :, :1])]
    assert packed.packed(module, wide[0], key, value, wide[1]) == "theirs"
    assert packed.packed(module, query, key, value, mask.expand(-1, 6, -1, -1)) == "theirs"
    for given in ({"dropout": 0.1}, {"softcap": 30.0}, {"position_bias": mask}):
        assert packed.packed(module, query, key, value, mask, **given) == "theirs"
    assert len(seen) == 6


def attentions(model):
    return [module for module in model.modules() if hasattr(module, "num_key_value_groups")]


def grouped(name="llama"):
    model = make_model(name)
    assert all(each.num_key_value_groups > 1 for each in attentions(model))
    return model


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_it_is_in_place_during_the_call_alone(kernel, monkeypatch):
    widths, original = [], packed.packed

    def spy(module, query, *args, **kwargs):
        widths.append(query.shape[2])
        return original(module, query, *args, **kwargs)

    monkeypatch.setattr(packed, "packed", spy)
    model, ids = grouped(), prompt(9)
    configs = [each.config for each in attentions(model)]
    expected = model.generate(ids, do_sample=False, max_new_tokens=12)
    with specplug.attach(model, noisy_copy(model, 0.02), gamma=3, kernel=kernel, graph="off"):
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=12), expected)
    assert (4 in widths) == (kernel == "auto")
    assert all(each.config is config for each, config in zip(attentions(model), configs, strict=True))
    assert model.config._attn_implementation == "sdpa" and not packed._INSIDE


def test_it_is_taken_out_after_an_error_and_while_another_thread_is_inside():
    model = grouped()
    configs = [each.config for each in attentions(model)]
    entered, leave = threading.Event(), threading.Event()

    def inside():
        with packed.swapped("auto", model):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=inside)
    thread.start()
    entered.wait(10)
    with pytest.raises(RuntimeError), packed.swapped("auto", model):
        raise RuntimeError
    assert all(each.config._attn_implementation == packed.NAME for each in attentions(model))
    leave.set()
    thread.join()
    assert all(each.config is config for each, config in zip(attentions(model), configs, strict=True))


def test_other_kinds_of_attention_are_left_alone():
    alone, eager = make_model("gpt2"), grouped()
    eager.set_attn_implementation("eager")
    with packed.swapped("auto", alone, eager):
        assert not packed._INSIDE


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_where_no_heads_are_shared_a_recording_makes_one_mask(kernel):
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64)).eval()
    ids = prompt(9)
    expected = model.generate(ids, do_sample=False, max_new_tokens=40)
    with specplug.attach(model, noisy_copy(model, 0.02), gamma=3, kernel=kernel) as plugin:
        plugin.record_after = 0
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=40), expected)
    graphs = [each.replay.graph for each in capture._KNOWN[model][1].values() if each.ready]
    given = [node for node in graphs[-1].nodes() if node.kind() == "aten::scaled_dot_product_attention"]
    masks = {node.inputsAt(3).unique(): node.inputsAt(3).type().scalarType() for node in given}
    assert len(given) == 3 and list(masks.values()) == ["Float" if kernel == "auto" else "Bool"]
