"""The linear layer for a few rows: the same product as torch's, swapped in for the length of a call and for nothing else."""

import copy
import ctypes
import io
import threading

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from torch import nn

import specplug
from specplug import kernel
from specplug.skinny import product_at as product


@pytest.fixture(autouse=True)
def small_layers(monkeypatch):
    monkeypatch.setattr(kernel, "MIN_WEIGHTS", 1)


def linear(num_in=40, num_out=30, **options):
    torch.manual_seed(0)
    return nn.Linear(num_in, num_out, **options)


def test_the_product_is_torchs():
    assert kernel.self_check(product) < 1e-6
    assert kernel._compiled() is product


def test_the_self_check_finds_a_wrong_product():
    def forgets_the_last(x, w, out, num_rows, num_in, num_out):
        product(x, w, out, num_rows, num_in, num_out - 1)

    def adds_another(x, w, out, num_rows, num_in, num_out):
        product(x, w, out, num_rows, num_in, num_out)
        ctypes.cast(out, ctypes.POINTER(ctypes.c_float))[0] += 1

    for wrong in (forgets_the_last, adds_another, lambda *args: None):  # what is not written is not right
        assert kernel.self_check(wrong) > kernel.TOLERANCE


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 4), (1, 17), (17,), ()])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_any_shape(shape, bias):
    module, x = linear(bias=bias), torch.randn(*shape, 40)
    with torch.no_grad():
        expected = module(x)
        with kernel.swapped("auto", module) as any_served:
            assert any_served and type(module) is kernel.FewRows
            torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(module(x.expand(2, *x.shape)[1]), expected, atol=1e-5, rtol=1e-5)
    assert type(module) is nn.Linear


def test_what_is_not_served_is_torchs_bit_by_bit():
    module = linear()
    wide, double = torch.randn(18, 40), torch.randn(2, 40)
    with kernel.swapped("auto", module):
        assert torch.equal(module(wide), nn.functional.linear(wide, module.weight, module.bias))
        assert module(double).requires_grad, "training goes on as ever"
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert module(double).dtype is torch.bfloat16
    for other in (linear(dtype=torch.float64), linear(dtype=torch.bfloat16), nn.LayerNorm(3)):
        with kernel.swapped("auto", other) as any_served:
            assert not any_served
    hooked = linear()
    hooked.register_forward_hook(lambda *_: None)
    replaced = linear()
    replaced.forward = lambda x: x

    class Special(nn.Linear):
        pass

    for other in (hooked, replaced, Special(40, 30), nn.utils.parametrizations.weight_norm(linear())):
        with kernel.swapped("auto", other) as any_served:
            assert not any_served
    assert "forward" in vars(replaced)


def test_threads_share_a_model():
    module, x = linear(), torch.randn(4, 40)
    inside, may_leave = threading.Event(), threading.Event()

    def other_call():
        with kernel.swapped("auto", module):
            inside.set()
            may_leave.wait(10)

    thread = threading.Thread(target=other_call)
    thread.start()
    inside.wait(10)
    with kernel.swapped("auto", module), torch.no_grad():
        module(x)
    assert type(module) is kernel.FewRows, "another call is still inside"
    may_leave.set()
    thread.join()
    assert type(module) is nn.Linear and module not in kernel._INSIDE


def test_a_call_swaps_and_gives_back(monkeypatch):
    target = make_model()
    draft = noisy_copy(target)
    calls = []
    forward = kernel.FewRows.forward
    monkeypatch.setattr(kernel.FewRows, "forward", lambda *args: calls.append(args[0]) or forward(*args))
    call = {"do_sample": False, "max_new_tokens": 20}
    plain = target.generate(prompt(), **call)
    assert not calls
    for engine in ("rounds", "lookahead"):
        with specplug.attach(target, draft, gamma=3, engine=engine):
            assert torch.equal(target.generate(prompt(), **call), plain)
        assert {id(each) for each in calls} >= {id(target.lm_head), id(draft.lm_head)}
        calls.clear()
    assert not any(type(module) is kernel.FewRows for model in (target, draft) for module in model.modules())
    with specplug.attach(target, draft, gamma=3, kernel="torch"):
        target.generate(prompt(), **call)
    assert not calls

    class Stop(Exception):
        pass

    def stopping(ids, scores):
        raise Stop

    with specplug.attach(target, draft, gamma=3), pytest.raises(Stop):
        target.generate(prompt(), logits_processor=[stopping], **call)
    assert not any(type(module) is kernel.FewRows for module in target.modules())


def test_a_choice_that_cannot_be_served_is_one_line(monkeypatch):
    target = make_model()
    with pytest.raises(ValueError, match="allowed are auto, torch, numba"):
        specplug.attach(target, kernel="cuda")
    with pytest.raises(ValueError, match="in fp32 on the CPU"):
        specplug.attach(make_model().bfloat16(), kernel="numba")
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="one thread"):
            specplug.attach(target, kernel="numba")
        with kernel.swapped("auto", target) as any_served:
            assert not any_served
    finally:
        torch.set_num_threads(1)
    monkeypatch.setattr(kernel, "_compiled", lambda: "numba cannot be imported (no such module)")
    with pytest.raises(ValueError, match="no such module"):
        specplug.attach(target, kernel="numba")
    with kernel.swapped("auto", target) as any_served:
        assert not any_served


def test_a_copy_made_during_a_call_is_a_plain_model():
    module, x = linear(), torch.randn(4, 40)
    with kernel.swapped("auto", module), torch.no_grad():
        stored = io.BytesIO()
        torch.save(module, stored)
        stored.seek(0)
        copies = [copy.deepcopy(module), copy.copy(module), torch.load(stored, weights_only=False)]
        for each in copies:
            assert type(each) is nn.Linear and "forward" not in vars(each)
            torch.testing.assert_close(each(x), module(x), atol=1e-5, rtol=1e-5)
        copies[0].weight.zero_()
        assert not torch.equal(copies[0](x), module(x)), "it multiplies by the weights of the original"
        assert type(module) is kernel.FewRows
    assert type(module) is nn.Linear
