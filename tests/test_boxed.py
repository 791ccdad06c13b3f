"""The operator without Python: the same bits as the one with it, for whatever is asked, and nothing is left behind."""

import ctypes
import sys
import threading
import time

import pytest
import torch
from test_kernel import all_shared, torch_threads  # noqa: F401
from torch import nn

from specplug import boxed, fused, kernel, stable, tiles

pytestmark = pytest.mark.skipif(boxed.operator() is None, reason="this torch has not what it takes")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def operator(dtype):
    if isinstance(kernel._compiled(dtype, 1), str):
        pytest.skip(kernel._compiled(dtype, 1))
    return boxed.operator()


def made(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def test_layers_take_it():
    operator(torch.float32)
    assert kernel._operator is boxed.operator()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", kernel.DTYPES)
def test_the_same_bits(dtype, threads, all_shared):  # noqa: F811
    few_rows = operator(dtype)
    with torch_threads(threads):
        for shape in [(), (1,), (1, 1), (2, 3), (1, 17), (1, 19), (4, 9), (2, 60), (0,), (2, 0, 3), (1,) * 6 + (5,)]:
            for num_in, num_out in ((64, 9), (64, 30), (160, 67), (576, 301)):
                weight, biases = made(num_out, num_in, dtype=dtype), (None, made(num_out, dtype=dtype))
                for bias in biases:
                    for x in (made(*shape, num_in, dtype=dtype), made(num_in, *shape, dtype=dtype).movedim(0, -1)):
                        found, expected = few_rows(x, weight, bias), kernel._few_rows(x, weight, bias)
                        assert torch.equal(found, expected) and found.is_contiguous()
                        assert found.dtype is dtype and found.shape == expected.shape


def test_what_is_not_its_own_is_torchs():
    few_rows, linear = operator(torch.float32), nn.functional.linear
    x, weight, bias = made(3, 64), made(30, 64), made(30)
    assert not torch.equal(few_rows(x, weight, bias), linear(x, weight, bias)), (
        "it rounds otherwise: the rest of this test can fail"
    )
    others = [
        (made(97, 64), weight, bias),
        (made(*[1] * 8, 3, 64), weight, bias),  # dimensions
        (made(3, 62), made(30, 62), bias),  # rows that are no full lines
        (x, made(7, 64), None),
        (x, made(64, 30).T, bias),
        (x, weight, made(60)[::2]),
        (x, weight, made(1)),
        (x.double(), weight.double(), bias.double()),
    ]
    for each in others:
        assert torch.equal(few_rows(*each), linear(*each)), [
            tuple(tensor.shape) for tensor in each if tensor is not None
        ]
    kept, tiles.STATE[tiles.RUN] = tiles.STATE[tiles.RUN], 0  # a dtype that the self-check refuses
    try:
        assert torch.equal(few_rows(x, weight, bias), linear(x, weight, bias))
    finally:
        tiles.STATE[tiles.RUN] = kept


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (made(3, 32), made(30, 64), None),
        (made(3, 64), made(30, 64), made(31)),
        (made(3, 64).double(), made(30, 64), None),
        (made(3, 64), made(30, 64), made(30).bfloat16()),
        (made(3, 64), made(30, 64, 1), None),
    ],
    ids=["input", "bias", "dtype", "dtype of the bias", "weight"],
)
def test_a_mistake_is_torchs_error(x, weight, bias):
    assert operator(torch.float32)(x, weight, bias) is None
    layer = nn.Linear(64, 32)
    layer.weight, layer.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
    with pytest.raises(RuntimeError) as expected:
        layer(x)
    kernel._enter(layer)
    try:
        with pytest.raises(RuntimeError) as found:
            layer(x)
    finally:
        kernel._leave(layer)
    assert str(found.value) == str(expected.value)


def test_nothing_is_left_behind():
    few_rows = operator(torch.float32)
    tensors = made(3, 64), made(64, 3).T, made(40, 64), made(3, 32), made(30, 64), made(30)

    def uses():
        return [torch._C._storage_Use_Count(each.untyped_storage()._cdata) for each in tensors]

    before = uses()
    for _ in range(20):
        for x in tensors[:4]:
            for bias in (None, tensors[5]):
                result = few_rows(x, tensors[4], bias)
                assert (result is None) == (x.shape[1] == 32)
                assert result is None or torch._C._storage_Use_Count(result.untyped_storage()._cdata) == uses_of_one()
    assert uses() == before


def uses_of_one():
    tensor = torch.empty(1)
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def test_no_memory_is_none(monkeypatch):
    """So that a layer asks torch, which says so or finds some."""
    few_rows = operator(torch.float32)
    x, weight = made(3, 64), made(30, 64)

    def no_memory(*_):
        return 1

    function = ctypes.CFUNCTYPE(*[ctypes.c_ssize_t] * 9)(no_memory)
    kept, tiles.STATE[tiles.RUN] = tiles.STATE[tiles.RUN], tiles.address_of(function)
    try:
        assert torch.equal(few_rows(x, weight, None), nn.functional.linear(x, weight))
    finally:
        tiles.STATE[tiles.RUN] = kept


def test_other_threads_of_python_go_on_meanwhile():
    few_rows = operator(torch.float32)
    x, weight = made(17, 4096), made(1 << 15, 4096)  # for some tens of milliseconds
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    before = sys.getswitchinterval()
    sys.setswitchinterval(100)  # nobody takes the lock away
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        with torch_threads(1):
            start = time.perf_counter()
            few_rows(x, weight, None)
            end = time.perf_counter()
    finally:
        stop.set()
        sys.setswitchinterval(before)
        thread.join()
    assert sum(start < each < end for each in ticks) >= 2


def test_without_it_layers_go_through_python(monkeypatch):
    monkeypatch.setattr(boxed, "operator", lambda: None)
    monkeypatch.setattr(kernel, "_operator", torch.ops.specplug.few_rows.default)
    kernel._compiled.cache_clear()
    try:
        assert callable(kernel._compiled(torch.float32, 1))
    finally:
        kernel._compiled.cache_clear()
    assert kernel._operator is torch.ops.specplug.few_rows.default


def test_one_that_differs_is_not_used(monkeypatch, caplog):
    few_rows = operator(torch.float32)
    monkeypatch.setattr(boxed, "operator", lambda: lambda *args: few_rows(*args) * 1.0000002)
    monkeypatch.setattr(kernel, "_operator", few_rows)
    kernel._compiled.cache_clear()
    try:
        assert callable(kernel._compiled(torch.float32, 1))
    finally:
        kernel._compiled.cache_clear()
    assert kernel._operator is torch.ops.specplug.few_rows.default and "goes through Python" in caplog.text


@pytest.mark.parametrize("missing", ["torch_delete_stable_ivalue", "aoti_torch_library_impl"])
def test_an_older_torch(missing, monkeypatch):
    class Older:
        def __getattr__(self, name):
            if name == missing:
                raise AttributeError(f"undefined symbol: {name}")
            return getattr(library, name)

    library = ctypes.CDLL(str(stable.library_path()))
    monkeypatch.setattr(stable.ctypes, "CDLL", lambda path: Older())
    stable.library.cache_clear()
    try:
        assert boxed._install.__wrapped__() is None and fused._install.__wrapped__() is None
    finally:
        stable.library.cache_clear()
