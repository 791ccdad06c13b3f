"""What an operator of torch takes that numba compiles and that runs without Python: torch's stable C interface, as such code calls it.

torch calls the operator with a stack of arguments and takes the result from there: what it calls a boxed kernel. The interface
(torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h) is promised to stay as it is in later versions of torch.
"""

import ctypes
import functools
import sys
import zlib
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import torch
from numba import types
from numba.extending import register_jitable

from specplug import tiles
from specplug.tiles import INT, address_of, pointer, words

# As tiles.VERSION, for what uses both.
VERSION = (tiles.VERSION ^ zlib.crc32(Path(__file__).read_bytes())) | 1
MAX_DIM = 8  # of tensors

_CODE = types.int32  # an error if it is not 0


def _torchs(name: str, *kinds: Any) -> types.ExternalFunction:
    return types.ExternalFunction(name, _CODE(*kinds))


# Tensors are handles, which belong to whom they are given. What is asked for is written to the address given last.
get_dim = _torchs("aoti_torch_get_dim", INT, INT)
get_size = _torchs("aoti_torch_get_size", INT, INT, INT)
get_stride = _torchs("aoti_torch_get_stride", INT, INT, INT)
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
    get_stride,
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


@register_jitable
def number(at):  # type: ignore[no-untyped-def]
    return numba.carray(pointer(at), (1,))[0]


@register_jitable
def put(at, value):  # type: ignore[no-untyped-def]
    numba.carray(pointer(at), (1,))[0] = value


@register_jitable
def dim_of(tensor, at):  # type: ignore[no-untyped-def]
    get_dim(tensor, at)
    return number(at)


@register_jitable
def size_of(tensor, dim, at):  # type: ignore[no-untyped-def]
    get_size(tensor, dim, at)
    return number(at)


@register_jitable
def stride_of(tensor, dim, at):  # type: ignore[no-untyped-def]
    get_stride(tensor, dim, at)
    return number(at)


@register_jitable
def dtype_of(tensor, at):  # type: ignore[no-untyped-def]
    put(at, 0)
    get_dtype(tensor, at)
    return number(at)


@register_jitable
def is_contiguous(tensor, at):  # type: ignore[no-untyped-def]
    put(at, 0)
    get_contiguous(tensor, at)
    return number(at) != 0


@register_jitable
def data_of(tensor, at):  # type: ignore[no-untyped-def]
    get_data_ptr(tensor, at)
    return number(at)


@register_jitable
def threads_of_torch(at):  # type: ignore[no-untyped-def]
    put(at, 0)
    get_num_threads(at)
    return number(at)


@register_jitable
def empty(sizes_at, dim, dtype, cpu, at):  # type: ignore[no-untyped-def]
    """A new contiguous tensor, or 0."""
    strides_at, stride = words(MAX_DIM), 1
    for d in range(dim - 1, -1, -1):
        put(strides_at + 8 * d, stride)
        stride *= number(sizes_at + 8 * d)
    put(at, 0)
    failed = empty_strided(dim, sizes_at, strides_at, types.int32(dtype), types.int32(cpu), types.int32(0), at)
    return 0 if failed else number(at)


def library_path() -> Path:
    return Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


@functools.cache
def library() -> ctypes.CDLL:
    """torch's, whose functions compiled code can call from now on. Raises where it has them not."""
    if not sys.platform.startswith("linux"):
        raise OSError("tried on Linux alone")
    found = ctypes.CDLL(str(library_path()))
    for function in FUNCTIONS:
        llvmlite.binding.add_symbol(function.symbol, address_of(getattr(found, function.symbol)))
    return found


def dtype_code(name: str) -> int:
    """torch's number for it."""
    code: int = getattr(library(), f"aoti_torch_dtype_{name}")()
    return code


def cpu_code() -> int:
    code: int = library().aoti_torch_device_type_cpu()
    return code


def register(name: str, kernel: Any) -> Any:
    """Have the operator `specplug::name`, which is defined, run this compiled function (address of the stack, number of arguments, of
    results) on the CPU, as long as the process lives. Returns it. Raises OSError if torch does not take it."""
    handle = ctypes.c_void_p()
    where = __file__.encode(), ctypes.c_uint32(0)
    if library().aoti_torch_library_init_impl(b"specplug", b"CPU", *where, ctypes.byref(handle)):
        raise OSError("torch takes no operators")
    if library().aoti_torch_library_impl(handle, name.encode(), ctypes.c_void_p(kernel.address)):
        raise OSError("torch takes no operator")
    return getattr(torch.ops.specplug, name).default
