"""The linear layer for a few rows as an operator of torch that runs without Python: for a small model the way through Python
takes longer than the product, and it waits for other threads of Python. Where it cannot be had, kernel.py's operator serves.

torch calls it with a stack of arguments and takes the result from there: what it calls a boxed kernel. Ours is compiled by
numba and speaks torch's stable C ABI (torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h), which promises
that later versions of torch serve it. What is asked for in an unusual way is handed to `aten::linear`.
"""

import ctypes
import functools
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import torch
from numba import types
from numba.extending import register_jitable

from specplug.config import first_line
from specplug.skinny import MOST_ROWS
from specplug.tiles import (
    FLOAT32,
    INT,
    LINE,
    OTHERS,
    RUN,
    SHARED,
    STATE,
    VERSION,
    address_of,
    call,
    pointer,
    state,
    words,
)

log = logging.getLogger(__name__)

NAME = "few_rows_boxed"
MAX_DIM = 8  # of the input
_INSTALLING = threading.Lock()

_CODE = types.int32  # an error if it is not 0


def _torchs(name: str, *kinds: Any) -> types.ExternalFunction:
    return types.ExternalFunction(name, _CODE(*kinds))


# Tensors are handles, which belong to whom they are given. What is asked for is written to the address given last.
get_dim = _torchs("aoti_torch_get_dim", INT, INT)
get_size = _torchs("aoti_torch_get_size", INT, INT, INT)
get_dtype = _torchs("aoti_torch_get_dtype", INT, INT)  # 4 bytes
get_contiguous = _torchs("aoti_torch_is_contiguous", INT, INT)  # 1 byte
get_data_ptr = _torchs("aoti_torch_get_data_ptr", INT, INT)
get_num_threads = _torchs("torch_get_num_threads", INT)  # 4 bytes
# dim, sizes, strides, dtype, kind of device, its number
empty_strided = _torchs("aoti_torch_empty_strided", INT, INT, INT, types.int32, types.int32, types.int32, INT)
undefined = _torchs("aoti_torch_new_uninitialized_tensor", INT)
copy_to = _torchs("aoti_torch_copy_", INT, INT, types.int32)  # to, from, whether it may go on meanwhile
delete_tensor = _torchs("aoti_torch_delete_tensor_object", INT)
delete_optional = _torchs("torch_delete_stable_ivalue", INT)
call_operator = _torchs("aoti_torch_call_dispatcher", INT, INT, INT)  # name, overload, stack

FUNCTIONS = (
    get_dim,
    get_size,
    get_dtype,
    get_contiguous,
    get_data_ptr,
    get_num_threads,
    empty_strided,
    undefined,
    copy_to,
    delete_tensor,
    delete_optional,
    call_operator,
)

# The name of an operator, for that.
LINEAR, NO_OVERLOAD = OTHERS, OTHERS + 1
_TEXTS = {LINEAR: ctypes.create_string_buffer(b"aten::linear"), NO_OVERLOAD: ctypes.create_string_buffer(b"")}


@register_jitable
def _number(at):  # type: ignore[no-untyped-def]
    return numba.carray(pointer(at), (1,))[0]


@register_jitable
def _put(at, value):  # type: ignore[no-untyped-def]
    numba.carray(pointer(at), (1,))[0] = value


@register_jitable
def _dim(tensor, at):  # type: ignore[no-untyped-def]
    get_dim(tensor, at)
    return _number(at)


@register_jitable
def _size(tensor, dim, at):  # type: ignore[no-untyped-def]
    get_size(tensor, dim, at)
    return _number(at)


@register_jitable
def _dtype(tensor, at):  # type: ignore[no-untyped-def]
    _put(at, 0)
    get_dtype(tensor, at)
    return _number(at)


@register_jitable
def _is_contiguous(tensor, at):  # type: ignore[no-untyped-def]
    _put(at, 0)
    get_contiguous(tensor, at)
    return _number(at) != 0


@register_jitable
def _data(tensor, at):  # type: ignore[no-untyped-def]
    get_data_ptr(tensor, at)
    return _number(at)


@register_jitable
def _threads(at):  # type: ignore[no-untyped-def]
    _put(at, 0)
    get_num_threads(at)
    return _number(at)


@register_jitable
def _is_plain(tensor, dim, size, dtype, at):  # type: ignore[no-untyped-def]
    """Whether it is contiguous, and has so many dimensions, that size in the first, and that dtype."""
    if _dim(tensor, at) != dim or _size(tensor, 0, at) != size:
        return False
    return _dtype(tensor, at) == dtype and _is_contiguous(tensor, at)


@register_jitable
def _empty(sizes_at, dim, dtype, cpu, at):  # type: ignore[no-untyped-def]
    """A new contiguous tensor, or 0."""
    strides_at, stride = words(MAX_DIM), 1
    for d in range(dim - 1, -1, -1):
        _put(strides_at + 8 * d, stride)
        stride *= _number(sizes_at + 8 * d)
    _put(at, 0)
    failed = empty_strided(dim, sizes_at, strides_at, types.int32(dtype), types.int32(cpu), types.int32(0), at)
    return 0 if failed else _number(at)


@register_jitable
def _product(x, weight, bias, codes, most_rows, cpu):  # type: ignore[no-untyped-def]
    """The result, or 0 where it is not ours to make."""
    at, sizes_at = words(1), words(MAX_DIM)
    dim, dtype = _dim(x, at), _dtype(x, at)
    if dim < 1 or dim > MAX_DIM or _dim(weight, at) != 2:
        return 0
    num_out, num_in, num_rows = _size(weight, 0, at), _size(weight, 1, at), 1
    for d in range(dim - 1):
        size = _size(x, d, at)
        num_rows *= size
        _put(sizes_at + 8 * d, size)
    kind = 0
    while kind < len(codes) and codes[kind] != dtype:
        kind += 1
    if kind == len(codes) or state(RUN + kind) == 0 or num_rows < 1 or num_rows > most_rows[kind]:
        return 0
    row = num_in * (4 if kind == FLOAT32 else 2)
    if num_out < 8 or row == 0 or row % LINE != 0 or _size(x, dim - 1, at) != num_in:
        return 0
    if not _is_plain(weight, 2, num_out, dtype, at) or (bias != 0 and not _is_plain(bias, 1, num_out, dtype, at)):
        return 0
    rows = x
    _put(sizes_at + 8 * (dim - 1), num_in)
    if not _is_contiguous(x, at):
        rows = _empty(sizes_at, dim, dtype, cpu, at)
        if rows == 0:
            return 0
        copy_to(rows, x, types.int32(0))
    _put(sizes_at + 8 * (dim - 1), num_out)
    out = _empty(sizes_at, dim, dtype, cpu, at)
    if out != 0:
        threads = 1 if num_out * row < state(SHARED) else _threads(at)
        addresses = _data(rows, at), _data(weight, at), _data(bias, at) if bias != 0 else 0, _data(out, at)
        if call(state(RUN + kind), (*addresses, num_rows, num_in, num_out, threads)) != 0:
            delete_tensor(out)
            out = 0
    if rows != x:
        delete_tensor(rows)
    return out


@functools.cache
def _compile(codes: tuple[int, ...], most_rows: tuple[int, ...], cpu: int, version: int) -> Any:
    """`codes`: torch's numbers of our dtypes; `cpu`: of that kind of device; `version`: tiles.py's."""

    @numba.cfunc(types.void(INT, INT, INT), cache=True)
    def few_rows(stack_at, num_arguments, num_results):  # type: ignore[no-untyped-def]
        if version == 0:
            return
        x, weight, optional = _number(stack_at), _number(stack_at + 8), _number(stack_at + 16)
        bias = _number(optional) if optional != 0 else 0
        out = _product(x, weight, bias, codes, most_rows, cpu)
        if out != 0:
            delete_tensor(x)
            delete_tensor(weight)
            if optional != 0:
                delete_tensor(bias)
                delete_optional(optional)
            _put(stack_at, out)
        elif call_operator(state(LINEAR), state(NO_OVERLOAD), stack_at) != 0:  # which takes the arguments, in any case
            undefined(stack_at)

    return few_rows


def operator() -> Any:
    """The operator `specplug::few_rows_boxed(Tensor x, Tensor weight, Tensor? bias) -> Tensor`, or None where torch has not what it
    takes. It returns None where it fails: `aten::linear` says why.

    A dtype is served once skinny.py has compiled its product.
    """
    with _INSTALLING:
        return _install()


def library_path() -> Path:
    return Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


@functools.cache
def _install() -> Any:
    try:
        if not sys.platform.startswith("linux"):
            raise OSError("tried on Linux alone")
        library = ctypes.CDLL(str(library_path()))
        for function in FUNCTIONS:
            llvmlite.binding.add_symbol(function.symbol, address_of(getattr(library, function.symbol)))
        for place, text in _TEXTS.items():
            STATE[place] = ctypes.addressof(text)
        codes = tuple(getattr(library, f"aoti_torch_dtype_{name}")() for name in ("float32", "bfloat16", "float16"))
        most_rows = tuple(MOST_ROWS.get(dtype, 0) for dtype in range(len(codes)))
        kernel = _compile(codes, most_rows, library.aoti_torch_device_type_cpu(), VERSION)
        handle = ctypes.c_void_p()
        where = __file__.encode(), ctypes.c_uint32(0)
        if library.aoti_torch_library_init_impl(b"specplug", b"CPU", *where, ctypes.byref(handle)):
            raise OSError("torch takes no operators")
        if library.aoti_torch_library_impl(handle, NAME.encode(), ctypes.c_void_p(kernel.address)):
            raise OSError("torch takes no operator")
    except Exception as error:  # whatever another torch or a compiler may raise
        log.debug("specplug: the linear layer for a few rows goes through Python: %s", first_line(error))
        return None
    return getattr(torch.ops.specplug, NAME).default
