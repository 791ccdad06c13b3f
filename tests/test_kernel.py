"""The linear layer for a few rows: the same product as torch's, swapped in for the length of a call and for nothing else."""

import contextlib
import copy
import ctypes
import io
import os
import platform
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import kernel_times
import pytest
import test_capture
import torch
from conftest import make_model, noisy_copy, prompt
from torch import nn

import specplug
from specplug import boxed, kernel, skinny, tiles


@pytest.fixture(autouse=True)
def small_layers(monkeypatch):
    monkeypatch.setattr(kernel, "MIN_WEIGHTS", 1)


OPERATORS = ("few_rows", *(["few_rows_boxed"] if boxed.operator() else []))


@contextlib.contextmanager
def torch_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def linear(num_in=64, num_out=30, **options):
    torch.manual_seed(0)
    return nn.Linear(num_in, num_out, **options)


@pytest.fixture
def all_shared(monkeypatch):
    """Threads share layers of any size."""
    monkeypatch.setattr(kernel, "MIN_SHARED", 1)
    tiles.STATE[tiles.SHARED] = 1
    yield
    tiles.STATE[tiles.SHARED] = 1 << 19


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("zen", [False, True])
@pytest.mark.parametrize("dtype", kernel.DTYPES)
def test_the_product_is_torchs(dtype, zen, threads):
    """With the plans of such a processor, whatever the machine is: what they ask for is compiled on all."""
    assert (skinny.plan(1, 36, 1, zen).chains > 1) == zen
    try:
        assert kernel.self_check(skinny.product(kernel.DTYPES.index(dtype), zen), dtype, threads) < 1e-6
    finally:
        kernel._product(dtype)
    assert callable(kernel._compiled(dtype, threads))


@pytest.mark.parametrize("zen", [False, True])
def test_every_plan_has_its_tiles(zen):
    for vectors in (1, 2):
        for rows in range(1, skinny.AT_ONCE + 1):
            for steps in [*range(1, 40), *(int(1.3**power) for power in range(14, 40))]:
                how = skinny.plan(rows, steps, vectors, zen)
                parts = -(-rows // how.max_x)
                for num_x in {rows // parts, -(-rows // parts)}:
                    assert (how.num_w, num_x, how.chains) in tiles.TILES
                assert how.block <= skinny.BLOCK and how.block % how.num_w == 0 and skinny.BLOCK % how.num_w == 0
                assert 1 <= how.block_steps <= steps
                # tiles of several chains begin and end a row
                assert how.chains == 1 or how.block_steps == steps


@pytest.mark.parametrize("dtype", kernel.DTYPES)
def test_the_self_check_finds_a_wrong_product(dtype, monkeypatch):
    product = kernel._product(dtype)

    def forgets_the_last(*args):
        *first, num_rows, num_in, num_out, threads = args
        product(*first, num_rows, num_in, num_out - 1, threads)

    def forgets_the_bias(x, w, bias, *rest):
        product(x, w, 0, *rest)

    def reads_one_row_twice(x, w, bias, out, num_rows, num_in, num_out, threads):
        product(x, w, bias, out, num_rows, num_in, num_out, threads)
        size = dtype.itemsize * num_out
        ctypes.memmove(out + (num_rows - 1) * size, out, size)

    def is_wrong_when_shared(*args):
        product(*args)
        if args[-1] > 1:
            ctypes.memset(args[3], 0, dtype.itemsize)

    def rounds_down(*args):
        """The lowest bit of all outputs away: half a unit of the last place too far, and no more, for half of them."""
        product(*args)
        out, num_rows, num_out = args[3], args[4], args[6]
        kind = ctypes.c_int32 if dtype is torch.float32 else ctypes.c_int16
        values = (kind * (num_rows * num_out)).from_address(out)
        for i in range(len(values)):
            values[i] &= -2

    # what is not written is not right
    wrong = [forgets_the_last, forgets_the_bias, reads_one_row_twice, is_wrong_when_shared, lambda *args: None]
    if dtype is not torch.float32:
        wrong.append(rounds_down)
    for each in wrong:
        assert kernel.self_check(each, dtype, 2) > kernel.TOLERANCE, each
    monkeypatch.setattr(kernel, "_product", lambda dtype: forgets_the_bias)
    kernel._compiled.cache_clear()
    try:
        assert "something else than torch" in kernel._compiled(dtype, 1)
        with kernel.swapped("auto", linear(dtype=dtype)) as any_served:
            assert not any_served
    finally:
        kernel._compiled.cache_clear()


@pytest.mark.parametrize("dtype", kernel.DTYPES)
def test_threads_change_no_bit(dtype, all_shared):
    module = linear(96, 301, dtype=dtype).requires_grad_(False)
    for rows in (1, 2, 5, 9, 17, 50):
        if rows > kernel.most_rows(dtype):
            continue  # torch's own
        x = torch.randn(rows, 96).to(dtype)
        results = []
        for threads in (1, 2, 4):
            with torch.no_grad(), torch_threads(threads), kernel.swapped("auto", module) as any_served:
                assert any_served
                results.append(module(x))
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_python_threads_with_threads_of_their_own(all_shared):
    module = linear(96, 301).requires_grad_(False)
    inputs = [torch.randn(3, 96) for _ in range(4)]

    @torch.no_grad()  # of each thread
    def ours(x):
        return module(x)

    with torch_threads(2), kernel.swapped("auto", module):
        expected = [ours(x) for x in inputs]
        with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(2,)) as pool:
            for results in [list(pool.map(ours, inputs)) for _ in range(50)]:
                assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_it_has_not(all_shared):
    module, x = linear(96, 301).requires_grad_(False), torch.randn(3, 96)
    kernel._compiled.cache_clear()  # nor does it have what compares with torch, whose products would wait, too
    with torch.no_grad(), torch_threads(2), kernel.swapped("auto", module):
        expected = module(x)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that waits
            os._exit(0 if torch.equal(module(x), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="features of x86")
def test_other_processors():
    """Without AVX-512 registers are smaller; without F16C nothing converts fp16, and it is left out."""

    def found(code, name, features):
        environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
        python = [sys.executable, "-c", code]
        return subprocess.run(python, env=environment, capture_output=True, text=True, check=True).stdout.split()

    code = """
import torch
from specplug import boxed, kernel, tiles
right = all(kernel.self_check(kernel._product(dtype), dtype, 2) < 1e-6 for dtype in kernel.DTYPES)
usual = boxed.operator() or torch.ops.specplug.few_rows.default
print(tiles.LANES, tiles._PAIRS, right, callable(kernel._compiled(torch.float32, 1)) and kernel._operator is usual)
"""
    assert found(code, "haswell", "+avx,+avx2,+fma,+f16c,+sse4.2,+bmi,+bmi2") == ["8", "False", "True", "True"]
    assert found("from specplug import tiles; print(*tiles.DTYPES)", "generic", "+sse2") == ["0", "1"]


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 4), (1, 17), (17,), (), (5, 8), (2, 60)])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_any_shape(shape, bias):
    module, x = linear(bias=bias), torch.randn(*shape, 64)
    with torch.no_grad():
        expected = module(x)
        with kernel.swapped("auto", module) as any_served:
            assert any_served and type(module) is kernel.FewRows
            torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(module(x.expand(2, *x.shape)[1]), expected, atol=1e-5, rtol=1e-5)
    assert type(module) is nn.Linear


def test_what_is_not_served_is_torchs_bit_by_bit():
    module = linear()
    wide, double = torch.randn(97, 64), torch.randn(2, 64)
    with kernel.swapped("auto", module):
        assert torch.equal(module(wide), nn.functional.linear(wide, module.weight, module.bias))
        assert module(double).requires_grad, "training goes on as ever"
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert module(double).dtype is torch.bfloat16
    for other in (linear(dtype=torch.float64), linear(40), linear(num_out=7), nn.LayerNorm(3)):
        with kernel.swapped("auto", other) as any_served:
            assert not any_served
    hooked = linear()
    hooked.register_forward_hook(lambda *_: None)
    replaced = linear()
    replaced.forward = lambda x: x

    class Special(nn.Linear):
        pass

    for other in (hooked, replaced, Special(64, 30), nn.utils.parametrizations.weight_norm(linear())):
        with kernel.swapped("auto", other) as any_served:
            assert not any_served
    assert "forward" in vars(replaced)


def test_threads_share_a_model():
    module, x = linear(), torch.randn(4, 64)
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


@pytest.mark.parametrize("through", OPERATORS)
@pytest.mark.parametrize(("dtype", "threads"), [(torch.float32, 2), (torch.bfloat16, 1), (torch.float16, 1)])
def test_recorded_passes_take_it(dtype, threads, through, monkeypatch):
    assert callable(kernel._compiled(dtype, threads))
    monkeypatch.setattr(kernel, "_operator", getattr(torch.ops.specplug, through).default)
    monkeypatch.setattr(test_capture.capture, "USES_BEFORE", 0)
    modules = []
    forward = kernel.FewRows.forward
    monkeypatch.setattr(kernel.FewRows, "forward", lambda *args: modules.append(args[0]) or forward(*args))
    model = make_model().to(dtype)
    with torch_threads(threads), kernel.swapped("auto", model):
        widths = [1, 1, 1, 3, 3, 1, 3]
        with torch.profiler.profile() as profile:
            recorded = test_capture.run(model, widths)
        assert test_capture.recordings(model) == {1, 3}
        counts = {each.key: each.count for each in profile.key_averages()}
        assert counts[f"specplug::{through}"] > len(modules) > 0, "a replay has no modules"
        assert test_capture.same(recorded, test_capture.run(model, widths, "off"))


def test_the_command_that_times_it(monkeypatch, capsys):
    monkeypatch.setattr(kernel_times, "POOL", 1 << 16)
    with torch_threads(torch.get_num_threads()):  # which the command changes
        for options in ([], ["--dtype", "bfloat16", "--threads", "2"]):
            shape = ["--shapes", "64x64", "--rows", "1", "5", "--seconds", "0.01"]
            monkeypatch.setattr(sys, "argv", ["kernel_times.py", *shape, *options])
            kernel_times.main()
            lines = capsys.readouterr().out.splitlines()
            assert len(lines) == 4 and [line.split()[:2] for line in lines[2:]] == [["64x64", "1"], ["64x64", "5"]]


def test_a_choice_that_cannot_be_served_is_one_line(monkeypatch):
    target = make_model()
    with pytest.raises(ValueError, match="allowed are auto, torch, numba"):
        specplug.attach(target, kernel="cuda")
    with pytest.raises(ValueError, match="in fp32, bf16 and fp16 on the CPU"):
        specplug.attach(make_model().double(), kernel="numba")
    with torch_threads(2), monkeypatch.context() as patch:
        patch.setattr(skinny, "openmp", lambda: None)
        kernel._compiled.cache_clear()
        with pytest.raises(ValueError, match="serves one thread here"):
            specplug.attach(target, kernel="numba")
        with kernel.swapped("auto", target) as any_served:
            assert not any_served
    kernel._compiled.cache_clear()
    monkeypatch.setattr(kernel, "_compiled", lambda *_: "numba cannot be imported (no such module)")
    with pytest.raises(ValueError, match="no such module"):
        specplug.attach(target, kernel="numba")
    with kernel.swapped("auto", target) as any_served:
        assert not any_served


def test_a_copy_made_during_a_call_is_a_plain_model():
    module, x = linear(), torch.randn(4, 64)
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


def test_beyond_the_rows_at_which_torch_is_quicker_it_is_torchs(monkeypatch):
    assert callable(kernel._compiled(torch.float32, torch.get_num_threads()))  # which compares with torch's
    monkeypatch.setitem(skinny.MOST_ROWS, kernel.DTYPES.index(torch.float32), 3)
    kernel.most_rows.cache_clear()
    asked = []

    def linear_of_torch(x, *rest):
        asked.append(len(x))
        return nn.functional.linear(x, *rest)

    monkeypatch.setattr(kernel, "nn", SimpleNamespace(functional=SimpleNamespace(linear=linear_of_torch)))
    try:
        with torch.no_grad():
            for rows in range(1, 6):
                kernel._few_rows(torch.randn(rows, 64), torch.randn(30, 64), None)
    finally:
        kernel.most_rows.cache_clear()
    assert asked == [4, 5]
