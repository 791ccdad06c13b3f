"""Kinds of attention: the table of docs/exactness.md is what they do, and what is not masked is not speculated on."""

import re
from pathlib import Path

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from transformers import (
    AttentionInterface,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BloomForCausalLM,
    MoshiConfig,
    MoshiForCausalLM,
    XLMConfig,
    XLMWithLMHeadModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import is_flash_attn_2_available

import specplug
from specplug import attention, packed, tree_pass
from specplug.config import ConfigError
from specplug.models import load_model

PAGE = (Path(__file__).parent.parent / "docs" / "exactness.md").read_text()
CALL = {"max_new_tokens": 16, "do_sample": False}


def table() -> dict[str, dict[str, str]]:
    text = PAGE.split("## Attention\n")[1].split("\n## ")[0].replace("\\|", "/")
    header, _, *rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in re.findall(r"^\|.*\|$", text, re.M)
    ]
    return {row[0].replace("/", "|"): dict(zip(header[1:], row[1:], strict=True)) for row in rows}


TABLE = table()
RUN = ("sdpa", "eager", "flex_attention", "paged|eager")


def test_the_table_has_what_transformers_has():
    known = {*AttentionInterface().valid_keys(), "eager"} - {"flash_attention_4", packed.NAME}
    assert set(TABLE) == known


@pytest.fixture(autouse=True)
def uncompiled():
    """What would be compiled is run as it is: the same, without a C++ compiler."""
    with torch.compiler.set_stance("force_eager"):
        yield


def served(model, draft, ids, mask=None, **given) -> tuple[str, specplug.SpeculativeProcessor]:
    """How a call was served, and whether its ids are those of plain decoding."""
    call = CALL | {"attention_mask": torch.ones_like(ids) if mask is None else mask}
    plain = model.generate(ids, **call)
    with specplug.attach(model, draft, **given) as plugin:
        plugin.record_after = 0
        assert torch.equal(model.generate(ids, **call), plain)
    if plugin.last.engine == "plain":
        return "plain", plugin
    assert plugin.last.num_accepted > 0
    return "chains" if "chains, not trees" in plugin.last.reason else "yes", plugin


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without:UserWarning",
    "ignore:_compile flag:DeprecationWarning",
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning",
)
@pytest.mark.parametrize("kind", RUN)
def test_the_table_is_what_happens(kind):
    model = make_model(attn_implementation=kind)
    draft = noisy_copy(make_model())
    ids = torch.cat([prompt(9), prompt(9, seed=3)])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    windowed = make_model("mistral", attn_implementation=kind)
    found = {}
    found["one sequence"], plugin = served(model, draft, ids[:1], gamma=3)
    recorded = plugin.last.seconds_capture > 0
    found["batches, padding"], _ = served(model, draft, ids, mask, gamma=3)
    found["sliding windows"], plugin = served(windowed, noisy_copy(make_model("mistral")), ids[:1], gamma=3)
    found["trees"], _ = served(model, draft, ids[:1], tree=[2, 2, 1])
    if found["one sequence"] == "yes":  # the draft is recorded in any case; the target alone if nothing is drafted
        with specplug.attach(model, "lookup", gamma=0) as plugin:
            plugin.record_after = 0
            model.generate(ids[:1], **CALL)
            recorded = plugin.last.seconds_capture > 0
            model.generate(ids, attention_mask=mask, **CALL)
            assert (plugin.last.seconds_capture > 0) == recorded, "batches are recorded where one sequence is"
    assert found | {"recorded passes": "yes" if recorded else "no"} == TABLE[kind]


@pytest.mark.parametrize("kind", [kind for kind in TABLE if kind not in RUN])
def test_what_cannot_be_run_here_is_derived(kind):
    model = make_model()
    model.config._attn_implementation = kind
    assert attention.why_not_attention(model) is None, "chains are served"
    assert TABLE[kind]["trees"] == "chains" and "takes no mask of our own" in tree_pass.why_not_tree(model)


@pytest.mark.skipif(is_flash_attn_2_available(), reason="flash attention is installed, so nothing is refused")
def test_flash_attention_that_is_not_there_is_one_line():
    with pytest.raises(ImportError, match="FlashAttention2"):
        make_model(attn_implementation="flash_attention_2")
    config = specplug.load("target.attn_implementation=flash_attention_2")
    with pytest.raises(ConfigError, match=r"^target\.attn_implementation=flash_attention_2: FlashAttention2") as caught:
        load_model(config.target, "target")
    assert "\n" not in str(caught.value)
    shape = "target.shape={hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, vocab_size: 64}"
    config = specplug.load("recipe=bench", shape, "target.attn_implementation=flash_attention_2")
    with pytest.raises(ConfigError, match=r"^target\.attn_implementation=flash_attention_2: FlashAttention2"):
        load_model(config.target, "target")


def test_a_kind_that_nobody_knows_is_one_line():
    config = specplug.load("target.attn_implementation=psychic")
    with pytest.raises(ConfigError, match=r"^target\.attn_implementation=psychic: .*not supported"):
        load_model(config.target, "target")


@pytest.fixture
def unmasked():
    """A model whose attention is a function of the caller's, registered without a mask; and its draft."""
    AttentionInterface.register("of_the_caller", sdpa_attention_forward)
    try:
        model = make_model(attn_implementation="of_the_caller")
        yield model, noisy_copy(make_model())
    finally:
        del AttentionInterface._global_mapping["of_the_caller"]


@pytest.mark.parametrize("form", ["attach", "custom_generate", "logits_processor"])
def test_attention_without_masks_is_decoded_plainly(unmasked, form, caplog):
    model, draft = unmasked
    plain = model.generate(prompt(9), **CALL)
    plugin = specplug.SpeculativeProcessor(draft, schedule=specplug.schedule.FixedSchedule(3))
    more = {
        "attach": {},
        "custom_generate": {"custom_generate": plugin},
        "logits_processor": {"logits_processor": [plugin]},
    }
    if form == "attach":
        plugin.attach(model)
    try:
        assert torch.equal(model.generate(prompt(9), **CALL, **more[form]), plain)
    finally:
        plugin.detach()
    assert "makes no masks for its attention, of_the_caller" in caplog.text
    assert plugin.last is None or plugin.last.engine == "plain"


@pytest.mark.parametrize("engine", ["rounds", "lookahead"])
def test_an_engine_that_was_asked_for_refuses_it(unmasked, engine):
    model, draft = unmasked
    with specplug.attach(model, draft, gamma=3, engine=engine), pytest.raises(ValueError, match="makes no masks"):
        model.generate(prompt(9), **CALL)


def test_it_would_be_wrong_otherwise(unmasked, monkeypatch):
    """The negative control: served all the same, the text is another one."""
    model, draft = unmasked
    plain = model.generate(prompt(9), **CALL)
    monkeypatch.setattr(specplug.plugin, "why_not_attention", lambda model: None)
    with specplug.attach(model, draft, gamma=3):
        assert not torch.equal(model.generate(prompt(9), **CALL), plain)


def encoder(**extra):
    """With weights of its own for both of its ways, and a head that is as wide as theirs."""
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    return BertLMHeadModel(
        BertConfig(**shape, initializer_range=0.3, pad_token_id=0, eos_token_id=None, **extra)
    ).eval()


def test_a_model_that_looks_ahead_is_decoded_plainly(caplog, monkeypatch):
    model = encoder()
    draft = noisy_copy(model)
    plain = model.generate(prompt(9), **CALL)
    with specplug.attach(model, draft, gamma=3) as plugin:
        assert torch.equal(model.generate(prompt(9), **CALL), plain)
        assert plugin.last.engine == "plain" and "with others behind it" in caplog.text
        monkeypatch.setattr(specplug.plugin, "why_not_attention", lambda model: None)
        assert not torch.equal(model.generate(prompt(9), **CALL), plain), "the negative control"


def test_what_only_may_look_ahead_is_tried_out():
    assert served(encoder(is_decoder=True), "lookup", prompt(9).repeat(1, 3), gamma=3)[0] == "yes"
    model = make_model()
    assert attention.why_not_attention(model) is None
    model.config.is_causal = False  # masks are then those of an encoder
    assert "with others behind it" in attention.why_not_attention(model)
    model.config.is_causal = True
    assert attention.why_not_attention(model) is None


def test_windows_that_are_in_the_cache_alone_are_decoded_plainly(caplog, monkeypatch):
    torch.manual_seed(0)
    shape = dict(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
    model = MoshiForCausalLM(MoshiConfig(**shape, vocab_size=64, sliding_window=8, initializer_range=0.3)).eval()
    draft, call = noisy_copy(model), CALL | {"max_new_tokens": 40}
    plain = model.generate(prompt(9), **call)
    with specplug.attach(model, draft, gamma=3) as plugin:
        assert torch.equal(model.generate(prompt(9), **call), plain)
        assert plugin.last.engine == "plain" and "none in its masks" in caplog.text
        monkeypatch.setattr(specplug.plugin, "why_not_attention", lambda model: None)
        assert not torch.equal(model.generate(prompt(9), **call), plain), "the negative control"
    assert attention.why_not_attention(make_model("mistral")) is None


def test_models_that_read_a_mask_token_behind_the_text_are_decoded_plainly():
    model = XLMWithLMHeadModel(XLMConfig(vocab_size=64, emb_dim=32, n_layers=2, n_heads=4)).eval()
    plain = model.generate(prompt(9), max_new_tokens=12, do_sample=False)
    with specplug.attach(model, "lookup") as plugin:
        assert torch.equal(model.generate(prompt(9), max_new_tokens=12, do_sample=False), plain)
        assert plugin.last.engine == "plain" and "mask token" in plugin.last.reason


@pytest.mark.parametrize("kind", [BartForCausalLM, BloomForCausalLM])
def test_rows_of_models_that_count_positions_themselves_stay_together(kind):
    """They count padding too, and rows that fall behind are padded anew in `rounds`."""
    torch.manual_seed(0)
    shape = dict(d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, init_std=0.3)
    shape |= dict(hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    model = kind(kind.config_class(vocab_size=64, pad_token_id=0, eos_token_id=2, **shape)).eval()
    ids = torch.cat([prompt(9), prompt(9, seed=3)])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    _, plugin = served(model, noisy_copy(model), ids, mask, gamma=3)
    assert plugin.last.engine == "lookahead" and "takes no position_ids" in plugin.last.reason
    _, plugin = served(model, noisy_copy(model), ids[:1], gamma=3)
    assert plugin.last.engine == "rounds"


def test_continuous_batching_is_left_to_transformers(caplog, monkeypatch):
    """Its manager, which takes a minute to set up its memory on a CPU, is left out here."""
    model = make_model()
    asked = []
    monkeypatch.setattr(type(model), "generate_batch", lambda self, inputs, **_: asked.append(inputs) or "theirs")
    with specplug.attach(model, noisy_copy(model), gamma=3) as plugin:
        assert model.generate_batch([[3, 4]]) == "theirs" and asked == [[[3, 4]]]
        assert plugin.last is None and "continuous batching is left to transformers" in caplog.text
        call = CALL | {"cache_implementation": "paged", "do_sample": True}
        with pytest.raises(ValueError, match="continuous batching draws in a loop of its own"):
            model.generate(prompt(9), **call, specplug={"seed": 1})
    assert len(asked) == 1
