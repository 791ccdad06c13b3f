"""Norms and rotations in one operation each: torch's bits, in recordings of models that have them, and of nothing that only looks alike."""

from collections import Counter

import pytest
import torch
from conftest import make_model, prompt
from transformers import AutoModelForCausalLM, Gemma2Config, GPTNeoXConfig, PhiConfig, Qwen3Config

import specplug
from specplug import capture, folding, fused, kernel, recording

pytestmark = pytest.mark.skipif(fused.operators() is None, reason="this torch has not what it takes")
SIZES = (8, 16, 31, 32, 96, 192, 576, 1000, 2048, 5120, 8192)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def made(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_norms_have_torchs_bits(size):
    rms, _ = fused.operators()
    for shape in ((), (1,), (1, 17), (2, 3, 5)):
        for x in (made(*shape, size), made(*shape, size) * 1e4, made(*shape, size).exp(), torch.zeros(*shape, size)):
            for eps in (1e-6, 1e-5, 0.1):
                assert torch.equal(rms(x, eps), fused.norm(x, eps))
    x = made(4, size)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    assert torch.equal(rms(x, 1e-6).isnan(), fused.norm(x, 1e-6).isnan())
    assert fused.is_torchs(size)[0]


@pytest.mark.parametrize("size", [size for size in SIZES if size % 2 == 0])
def test_rotations_have_torchs_bits(size):
    _, rotated = fused.operators()
    for rows, heads, width in ((1, 1, 1), (1, 3, 17), (2, 5, 4)):
        by_position = made(rows, width, heads, size).transpose(1, 2)
        part = made(rows, heads, width, 2 * size)[..., :size]
        for x in (by_position, by_position.contiguous(), part):
            for angle in (made(1, 1, width, size), made(rows, 1, width, size), made(1, 1, 1, size), made(*x.shape)):
                found = rotated(x, angle.cos(), angle.sin())
                assert torch.equal(found, fused.rotation(x, angle.cos(), angle.sin())) and found.is_contiguous()
    assert fused.is_torchs(size)[1]


def test_what_they_do_not_serve_is_none():
    rms, rotated = fused.operators()
    x, angle = made(1, 2, 3, 8), made(1, 1, 3, 8)
    assert rms(x.double(), 1e-6) is None and rms(torch.tensor(1.0), 1e-6) is None
    for given in (
        (x.double(), angle, angle),
        (x, angle.double(), angle),
        (x, angle, angle.half()),
        (x[0], angle[0], angle[0]),
        (x, angle, made(1, 1, 4, 8)),
        (x, angle, made(1, 1, 3, 16)),
        (x[..., :7], angle[..., :7], angle[..., :7]),
        (x, angle, made(1, 1, 8, 3).transpose(2, 3)),
    ):
        assert rotated(*given) is None


def test_nothing_is_left_behind():
    rms, rotated = fused.operators()
    tensors = made(1, 3, 2, 8).transpose(1, 2), made(1, 1, 3, 8), made(1, 1, 3, 8)
    uses = [torch._C._storage_Use_Count(each.untyped_storage()._cdata) for each in tensors]
    alone = torch.empty(1)
    for _ in range(20):
        for found in (
            rms(tensors[0], 1e-6),
            rotated(*tensors),
            rms(tensors[1].double(), 1e-6),
            rotated(*tensors[::-1]),
        ):
            if found is not None:
                assert torch._C._storage_Use_Count(found.untyped_storage()._cdata) == torch._C._storage_Use_Count(
                    alone.untyped_storage()._cdata
                )
        del found
    assert uses == [torch._C._storage_Use_Count(each.untyped_storage()._cdata) for each in tensors]


def kinds(model, width=3):
    """Operations of the recording of a pass of so many positions, after it was compared with the pass and used."""
    with specplug.attach(model, "lookup", gamma=width - 1) as plugin:
        plugin.record_after = 0
        for seed in range(2):
            ids = prompt(seed=seed).repeat(1, 3)
            assert torch.equal(
                model.generate(ids, max_new_tokens=30), model.generate(ids, max_new_tokens=30, specplug={"gamma": 0})
            )
    recorded = [each for each in capture._KNOWN[model][1].values() if each.replay is not None]
    assert recorded and all(each.ready and not each.refused for each in recorded)
    return Counter(node.kind() for node in recorded[-1].replay.graph.nodes())


MODELS = {  # with how many norms and rotations of two layers
    "llama": (None, 5, 4),
    "a norm of heads": (Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16), 9, 4),
    "one added to weights": (Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=16, sliding_window=512), 9, 4),
    "a part is rotated": (PhiConfig(**SMALL, partial_rotary_factor=0.5), 0, 4),
    "a part of the pairs": (GPTNeoXConfig(**SMALL), 0, 4),
}


@pytest.mark.parametrize(("config", "norms", "rotations"), MODELS.values(), ids=MODELS)
def test_recordings_have_them(config, norms, rotations):
    torch.manual_seed(0)
    model = make_model() if config is None else AutoModelForCausalLM.from_config(config).eval()
    found = kinds(model)
    assert (found["specplug::rms"], found["specplug::rotated"]) == (norms, rotations)
    if norms:
        assert not found["aten::rsqrt"] and not found["aten::pow"]
    assert found["aten::neg"] <= 1, "that of a number, and none of a half"


def test_half_precision_has_the_norms_alone():
    found = kinds(make_model().bfloat16())
    assert found["specplug::rms"] == 5 and not found["specplug::rotated"]


def test_an_operator_that_differs_is_not_used(monkeypatch):
    """Negative control of what is compared before."""
    rms, rotated = fused.operators()
    monkeypatch.setattr(
        fused, "operators", lambda: (lambda *each: rms(*each) * 1.0000002, lambda *each: -rotated(*each))
    )
    fused.is_torchs.cache_clear()
    try:
        assert fused.is_torchs(64) == (False, False)
        found = kinds(make_model())
        assert not found["specplug::rms"] and not found["specplug::rotated"] and found["aten::rsqrt"] == 5
    finally:
        fused.is_torchs.cache_clear()


def test_a_recording_with_a_wrong_one_is_not_used(monkeypatch):
    """Negative control of the comparison of the recording itself."""
    model = make_model()
    plain = model.generate(prompt(), max_new_tokens=30)
    as_rms = fused._as_rms

    def wrong(graph, node):
        found = as_rms(graph, node)
        if found is not None:
            found.replaceInput(1, graph.insertConstant(0.5))  # as an eps
        return found

    monkeypatch.setattr(fused, "_as_rms", wrong)
    with specplug.attach(model, "lookup", gamma=2) as plugin:
        plugin.record_after = 0
        for _ in range(2):
            assert torch.equal(model.generate(prompt(), max_new_tokens=30), plain)
    assert all(each.refused for each in capture._KNOWN[model][1].values() if each.replay is not None)


def test_without_them_recordings_are_as_they_were(monkeypatch):
    monkeypatch.setattr(folding, "PASSES", [])
    found = kinds(make_model())
    assert not found["specplug::rms"] and found["aten::rsqrt"] == 5 and found["aten::neg"] >= 4


def test_kernel_prepares_them(monkeypatch):
    called = []
    monkeypatch.setattr(fused, "operators", lambda: called.append(1))
    kernel.prepare("torch", make_model())
    assert not called
    kernel.prepare("auto", AutoModelForCausalLM.from_config(Qwen3Config(**{**SMALL, "hidden_size": 128})))
    assert called == [1]


ALIKE = {
    "another power": lambda x, a: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6),
    "another dimension": lambda x, a: x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6),
    "two dimensions": lambda x, a: x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + 1e-6),
    "without the dimension": lambda x, a: x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6)[..., None],
    "of another": lambda x, a: x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6),
    "eps times three": lambda x, a: x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 1e-6, alpha=3)),
    "a whole eps": lambda x, a: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1),
    "an eps that is given": lambda x, a: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + a[..., :1].abs()),
    "fp64": lambda x, a: x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6),
    "a mean in fp64": lambda x, a: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True, dtype=torch.float64) + 1e-6),
    "rows of seven": lambda x, a: x[..., :7] * torch.rsqrt(x[..., :7].pow(2).mean(-1, keepdim=True) + 1e-6),
    "the other half": lambda x, a: x * a + torch.cat((-x[..., :4], x[..., 4:]), dim=-1) * a,
    "the other sign": lambda x, a: x * a + torch.cat((x[..., 4:], -x[..., :4]), dim=-1) * a,
    "no halves": lambda x, a: x * a + torch.cat((-x[..., 2:], x[..., :2]), dim=-1) * a,
    "of a second one": lambda x, a: x * a + torch.cat((-a[..., 4:], x[..., :4]), dim=-1) * a,
    "minus": lambda x, a: torch.add(x * a, torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * a, alpha=-1),
    "joined elsewhere": lambda x, a: (
        x[:, :, :, :4] * a[..., :4] + torch.cat((-x[:, :1, :, 4:], x[:, :1, :, :4]), dim=1) * a[..., :4]
    ),
    "every second": lambda x, a: x * a + torch.cat((-x[..., 1::2], x[..., ::2]), dim=-1) * a,
    "angles for more": lambda x, a: x * a.expand(3, 2, 3, 8) + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * a,
}


@pytest.mark.parametrize("function", ALIKE.values(), ids=ALIKE)
def test_what_only_looks_alike_stays(function):
    x, other = [made(1, 2, 3, 8), made(1, 2, 3, 8, seed=1)], [made(1, 2, 4, 8), made(1, 2, 4, 8)]
    recorded = recording.trace(function, x, other)
    found = Counter(node.kind() for node in recorded.graph.nodes())
    assert not found["specplug::rms"] and not found["specplug::rotated"]
    assert torch.equal(recorded(*x), function(*x))


def test_the_same_tracing_finds_what_is_theirs():
    """So that the test above can fail. Factors may stand the other way round."""
    x, other = [made(1, 2, 3, 8), made(1, 2, 3, 8, seed=1)], [made(1, 2, 4, 8), made(1, 2, 4, 8)]
    for function, kind in (
        (lambda x, a: fused.norm(x, 1e-6), "specplug::rms"),
        (lambda x, a: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * x, "specplug::rms"),
        (lambda x, a: fused.rotation(x, a, a), "specplug::rotated"),
    ):
        recorded = recording.trace(function, x, other)
        assert Counter(node.kind() for node in recorded.graph.nodes())[kind] == 1
        assert torch.equal(recorded(*x), function(*x))
