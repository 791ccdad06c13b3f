"""The linear layer for a few rows as an operator of torch that runs without Python: for a small model the way through Python
takes longer than the product, and it waits for other threads of Python. Where it cannot be had, kernel.py's operator serves.

What is asked for in an unusual way is handed to `aten::linear`.
"""

import ctypes
import functools
import logging
import threading
from typing import Any

import numba
from numba import types
from numba.extending import register_jitable

from specplug import stable
from specplug.config import first_line
from specplug.skinny import MOST_ROWS
from specplug.stable import (
    MAX_DIM,
    VERSION,
    call_operator,
    copy_to,
    data_of,
    delete_optional,
    delete_tensor,
    dim_of,
    dtype_of,
    empty,
    is_contiguous,
    number,
    put,
    size_of,
    threads_of_torch,
    undefined,
)
from specplug.tiles import FLOAT32, INT, LINE, OTHERS, RUN, SHARED, STATE, call, state, words

log = logging.getLogger(__name__)

NAME = "few_rows_boxed"
_INSTALLING = threading.Lock()

# The name of an operator, for `call_operator`.
LINEAR, NO_OVERLOAD = OTHERS, OTHERS + 1
_TEXTS = {LINEAR: ctypes.create_string_buffer(b"aten::linear"), NO_OVERLOAD: ctypes.create_string_buffer(b"")}


@register_jitable
def _is_plain(tensor, dim, size, dtype, at):  # type: ignore[no-untyped-def]
    """Whether it is contiguous, and has so many dimensions, that size in the first, and that dtype."""
    if dim_of(tensor, at) != dim or size_of(tensor, 0, at) != size:
        return False
    return dtype_of(tensor, at) == dtype and is_contiguous(tensor, at)


@register_jitable
def _product(x, weight, bias, codes, most_rows, cpu):  # type: ignore[no-untyped-def]
    """The result, or 0 where it is not ours to make."""
    at, sizes_at = words(1), words(MAX_DIM)
    dim, dtype = dim_of(x, at), dtype_of(x, at)
    if dim < 1 or dim > MAX_DIM or dim_of(weight, at) != 2:
        return 0
    num_out, num_in, num_rows = size_of(weight, 0, at), size_of(weight, 1, at), 1
    for d in range(dim - 1):
        size = size_of(x, d, at)
        num_rows *= size
        put(sizes_at + 8 * d, size)
    kind = 0
    while kind < len(codes) and codes[kind] != dtype:
        kind += 1
    if kind == len(codes) or state(RUN + kind) == 0 or num_rows < 1 or num_rows > most_rows[kind]:
        return 0
    row = num_in * (4 if kind == FLOAT32 else 2)
    if num_out < 8 or row == 0 or row % LINE != 0 or size_of(x, dim - 1, at) != num_in:
        return 0
    if not _is_plain(weight, 2, num_out, dtype, at) or (bias != 0 and not _is_plain(bias, 1, num_out, dtype, at)):
        return 0
    rows = x
    put(sizes_at + 8 * (dim - 1), num_in)
    if not is_contiguous(x, at):
        rows = empty(sizes_at, dim, dtype, cpu, at)
        if rows == 0:
            return 0
        copy_to(rows, x, types.int32(0))
    put(sizes_at + 8 * (dim - 1), num_out)
    out = empty(sizes_at, dim, dtype, cpu, at)
    if out != 0:
        threads = 1 if num_out * row < state(SHARED) else threads_of_torch(at)
        addresses = data_of(rows, at), data_of(weight, at), data_of(bias, at) if bias != 0 else 0, data_of(out, at)
        if call(state(RUN + kind), (*addresses, num_rows, num_in, num_out, threads)) != 0:
            delete_tensor(out)
            out = 0
    if rows != x:
        delete_tensor(rows)
    return out


@functools.cache
def _compile(codes: tuple[int, ...], most_rows: tuple[int, ...], cpu: int, version: int) -> Any:
    """`codes`: torch's numbers of our dtypes; `cpu`: of that kind of device; `version`: stable.py's."""

    @numba.cfunc(types.void(INT, INT, INT), cache=True)
    def few_rows(stack_at, num_arguments, num_results):  # type: ignore[no-untyped-def]
        if version == 0:
            return
        x, weight, optional = number(stack_at), number(stack_at + 8), number(stack_at + 16)
        bias = number(optional) if optional != 0 else 0
        out = _product(x, weight, bias, codes, most_rows, cpu)
        if out != 0:
            delete_tensor(x)
            delete_tensor(weight)
            if optional != 0:
                delete_tensor(bias)
                delete_optional(optional)
            put(stack_at, out)
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


@functools.cache
def _install() -> Any:
    try:
        codes = tuple(stable.dtype_code(name) for name in ("float32", "bfloat16", "float16"))
        most_rows = tuple(MOST_ROWS.get(dtype, 0) for dtype in range(len(codes)))
        for place, text in _TEXTS.items():
            STATE[place] = ctypes.addressof(text)
        return stable.register(NAME, _compile(codes, most_rows, stable.cpu_code(), VERSION))
    except Exception as error:  # whatever another torch or a compiler may raise
        log.debug("specplug: the linear layer for a few rows goes through Python: %s", first_line(error))
        return None
