"""Products of a few rows of weights with a few rows of x, written in LLVM's language, and what else numba's own lacks.

A tile has a register of sums for each pair of rows. A step of it takes VECTOR bytes of each row of weights. Sums of half-precision
weights are fp32 and rounded once. The rest are functions that code compiled by numba calls: for addresses, and for what C offers.
"""

import ctypes
import os
import platform
import zlib
from pathlib import Path
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from specplug.kernel import MIN_SHARED

# numba keeps what it compiled by the file that a function is in, and by what it closes over: so, by this, for what is compiled into it.
VERSION = zlib.crc32(Path(__file__).read_bytes()) | 1  # never 0

FLOAT32, BFLOAT16, FLOAT16 = range(3)  # a dtype, here

# What the compiler may use, which is what the machine has unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say otherwise.
_, _CPU, _LISTED = cpu_target.target_context.codegen().magic_tuple()
FEATURES = set(_LISTED.split(","))
ZEN = _CPU.startswith("znver")
WIDE = "+avx512f" in FEATURES
_PAIRS = WIDE and "+avx512bf16" in FEATURES  # multiplies bf16 as it is, in pairs
DTYPES = (FLOAT32, BFLOAT16, *([FLOAT16] if "+f16c" in FEATURES or platform.machine() in ("arm64", "aarch64") else []))

LANES = 16 if WIDE else 8  # sums in a register
VECTOR = LANES * 4  # bytes of a register, and of a row of weights that a step takes
LINE = 64  # bytes: rows of weights have to be full lines
NUM_W, MAX_X = (4, 6) if WIDE else (2, 5)  # of a tile, so that sums and what is loaded for a step are registers
# Bytes that a row of weights is fetched ahead into the nearest cache: with more than one row of x its products wait in a queue that is
# soon full. This, and what three tiles do, was tried on Intel's Emerald Rapids; not on AMD's Zen.
SOON = 0 if ZEN else 16 * VECTOR

# num_w, num_x, chains. With one chain the rows of weights are read together. With more they are read one after the other,
# and a sum is made of as many: alone it would wait for itself.
TILES = {(NUM_W, num_x, 1) for num_x in range(1, MAX_X + 1)} | {(2, num_x, 1) for num_x in range(3, 6)}
TILES |= {(8, 1, 4), (8, 2, 2), (8, 3, 2)}


def address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


F32, F16 = ir.FloatType(), ir.HalfType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def _vector(kind: Any, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(kind, lanes)


def _all(kind: Any, value: float, lanes: int = LANES) -> ir.Constant:
    return ir.Constant(_vector(kind, lanes), [value] * lanes)


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _function(builder: Any, name: str, result: Any, kinds: list[Any]) -> Any:
    known = builder.module.globals.get(name)
    return known if known is not None else ir.Function(builder.module, ir.FunctionType(result, kinds), name)


def num_vectors(dtype: int) -> int:
    """Registers that VECTOR bytes of weights fill."""
    return 1 if dtype == FLOAT32 or (dtype == BFLOAT16 and _PAIRS) else 2


def _read(builder: Any, address: Any, dtype: int) -> list[Any]:
    """VECTOR bytes at `address`, as fp32 if they are to be multiplied so; of bf16 the even ones, then the odd ones."""
    if num_vectors(dtype) == 1:
        return [builder.load(_at(builder, address, _vector(F32)), align=2)]
    if dtype == BFLOAT16:  # the upper half of an fp32, so that a shift or a mask widens it
        both = builder.load(_at(builder, address, _vector(I32)), align=2)
        even, odd = builder.shl(both, _all(I32, 16)), builder.and_(both, _all(I32, -65536))
        return [builder.bitcast(even, _vector(F32)), builder.bitcast(odd, _vector(F32))]
    halves = [_at(builder, builder.add(address, I64(VECTOR // 2 * i)), _vector(F16)) for i in range(2)]
    return [builder.fpext(builder.load(half, align=2), _vector(F32)) for half in halves]


def _multiply(builder: Any, w: Any, x: Any, total: Any, dtype: int) -> Any:
    vector, pairs = _vector(F32), _vector(I32)
    if dtype == BFLOAT16 and _PAIRS:
        dot = _function(builder, "llvm.x86.avx512bf16.dpbf16ps.512", vector, [vector, pairs, pairs])
        return builder.call(dot, [total, builder.bitcast(x, pairs), builder.bitcast(w, pairs)])
    fused = _function(builder, f"llvm.fmuladd.v{LANES}f32", vector, [vector] * 3)
    return builder.call(fused, [w, x, total])


def _neighbours(builder: Any, a: Any, b: Any) -> Any:
    """Sums of two neighbours, of `a` and then of `b`; of `a` alone where it is both."""
    lanes = a.type.count * (1 if a is b else 2)
    picks = [ir.Constant(_vector(I32, lanes // 2), list(range(first, lanes, 2))) for first in (0, 1)]
    return builder.fadd(*(builder.shuffle_vector(a, b, pick) for pick in picks))


def _read_bias(builder: Any, address: Any, count: int, dtype: int) -> Any:
    kind = {FLOAT32: F32, BFLOAT16: I16, FLOAT16: F16}[dtype]
    values = builder.load(_at(builder, address, _vector(kind, count)), align=2)
    if dtype == BFLOAT16:
        wide = builder.shl(builder.zext(values, _vector(I32, count)), _all(I32, 16, count))
        return builder.bitcast(wide, _vector(F32, count))
    return builder.fpext(values, _vector(F32, count)) if dtype == FLOAT16 else values


def _write(builder: Any, address: Any, values: Any, dtype: int) -> None:
    """fp32 values, rounded to the nearest of `dtype`, to even where two are as near."""
    count = values.type.count
    if dtype == FLOAT16:
        values = builder.fptrunc(values, _vector(F16, count))
    if dtype == BFLOAT16:
        bits = builder.bitcast(values, _vector(I32, count))
        last = builder.and_(builder.lshr(bits, _all(I32, 16, count)), _all(I32, 1, count))
        rounded = builder.add(builder.add(bits, _all(I32, 0x7FFF, count)), last)
        number = builder.fcmp_ordered("ord", values, values)
        rounded = builder.select(number, rounded, _all(I32, 0x7FC00000, count))
        values = builder.trunc(builder.lshr(rounded, _all(I32, 16, count)), _vector(I16, count))
    builder.store(values, _at(builder, address, values.type), align=2)


def _tile(module: Any, dtype: int, num_w: int, num_x: int, chains: int) -> Any:
    """A function in `module`: the products over `steps`, while memory is asked for what is `ahead`, and the second cache for what
    lies `soon` bytes behind in the same rows.

    They are added to sums[x][w], unless `fresh`, and kept there, or written to out[x][w] if `last`.
    """
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 14), f"specplug_{num_w}_{num_x}_{chains}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    w, row, x, sums, steps, soon, ahead, ahead_row, ahead_step, fresh, last, bias, out, out_row = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    vector = _vector(F32)
    prefetch = _function(builder, "llvm.prefetch.p0", ir.VoidType(), [I8.as_pointer(), I32, I32, I32])

    def one(step: Any, rows: list[int], totals: dict[Any, Any]) -> None:
        weights = {}
        for r in rows:
            here = builder.add(builder.add(w, builder.mul(row, I64(r))), builder.mul(step, I64(VECTOR)))
            weights[r] = _read(builder, here, dtype)
            if chains == 1:  # a single stream is foreseen by the machine
                there = builder.add(builder.add(ahead, builder.mul(step, ahead_step)), builder.mul(ahead_row, I64(r)))
                builder.call(prefetch, [_at(builder, there, I8), I32(0), I32(2), I32(1)])  # to be read, second cache
                if SOON:  # the nearest
                    later = _at(builder, builder.add(here, soon), I8)
                    builder.call(prefetch, [later, I32(0), I32(3), I32(1)])
        values = _at(builder, builder.add(x, builder.mul(step, I64(num_x * num_vectors(dtype) * VECTOR))), vector)
        for v in range(num_vectors(dtype)):
            for g in range(num_x):
                value = builder.load(builder.gep(values, [I64(v * num_x + g)]), align=4)
                for r in rows:
                    totals[g, r] = _multiply(builder, weights[r][v], value, totals[g, r], dtype)

    def loop(begin: Any, end: Any, rows: list[int], starts: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
        """From `begin` to `end`, as many steps at a time as there are sums in `starts`."""
        before, head, body, after = builder.block, *(function.append_basic_block() for _ in range(3))
        builder.branch(head)
        builder.position_at_end(head)
        step = builder.phi(I64)
        totals = [{place: builder.phi(vector) for place in each} for each in starts]
        builder.cbranch(builder.icmp_signed("<", step, end), body, after)
        builder.position_at_end(body)
        new = [dict(each) for each in totals]
        for c, each in enumerate(new):
            one(builder.add(step, I64(c)), rows, each)
        step.add_incoming(begin, before)
        step.add_incoming(builder.add(step, I64(len(starts))), body)
        for phis, first, later in zip(totals, starts, new, strict=True):
            for place, phi in phis.items():
                phi.add_incoming(first[place], before)
                phi.add_incoming(later[place], body)
        builder.branch(head)
        builder.position_at_end(after)
        return totals

    zero, added = _all(F32, 0.0), cgutils.alloca_once_value(builder, _all(F32, 0.0, num_w))
    with builder.if_then(builder.icmp_signed("!=", bias, I64(0))):
        builder.store(_read_bias(builder, bias, num_w, dtype), added)
    places = [(g, r) for g in range(num_x) for r in range(num_w)]
    kept = {(g, r): builder.gep(_at(builder, sums, vector), [I64(g * num_w + r)]) for g, r in places}
    totals: dict[Any, Any] = {}
    if chains == 1:
        start, load = builder.block, function.append_basic_block()
        ready = function.append_basic_block()
        builder.cbranch(builder.icmp_signed("!=", fresh, I64(0)), ready, load)
        builder.position_at_end(load)
        loaded = {place: builder.load(each, align=4) for place, each in kept.items()}
        builder.branch(ready)
        builder.position_at_end(ready)
        starts = {place: builder.phi(vector) for place in places}
        for place, phi in starts.items():
            phi.add_incoming(zero, start)
            phi.add_incoming(loaded[place], load)
        totals = loop(I64(0), steps, list(range(num_w)), [starts])[0]
    for r in range(num_w) if chains > 1 else []:  # whole rows, always
        whole = builder.and_(steps, I64(-chains))
        parts = loop(I64(0), whole, [r], [{(g, r): zero for g in range(num_x)}] * chains)
        parts[:1] = loop(whole, steps, [r], parts[:1])
        while len(parts) > 1:
            halves = zip(parts[::2], parts[1::2], strict=True)
            parts = [{place: builder.fadd(a[place], b[place]) for place in a} for a, b in halves]
        totals |= parts[0]
    with builder.if_else(builder.icmp_signed("!=", last, I64(0))) as (write, keep):
        with write:
            for g in range(num_x):
                row_sums = [totals[g, r] for r in range(num_w)]
                while len(row_sums) > 1:
                    row_sums = [_neighbours(builder, a, b) for a, b in zip(row_sums[::2], row_sums[1::2], strict=True)]
                while row_sums[0].type.count > num_w:
                    row_sums = [_neighbours(builder, row_sums[0], row_sums[0])]
                value = builder.fadd(row_sums[0], builder.load(added))
                _write(builder, builder.add(out, builder.mul(out_row, I64(g))), value, dtype)
        with keep:
            for place, each in kept.items():
                builder.store(totals[place], each, align=4)
    builder.ret_void()
    return function


INT = types.intp


@intrinsic(prefer_literal=True)
def multiply_tiles(context, num_w, num_x, chains, arguments, dtype):  # type: ignore[no-untyped-def]
    """Calls the tile of that shape."""

    def code(context, builder, signature, args):  # type: ignore[no-untyped-def]
        end = builder.append_basic_block()
        shape = builder.add(builder.add(builder.mul(args[0], I64(256)), builder.mul(args[1], I64(16))), args[2])
        switch = builder.switch(shape, end)
        for each in sorted(TILES):
            block = builder.append_basic_block()
            switch.add_case(I64(each[0] * 256 + each[1] * 16 + each[2]), block)
            builder.position_at_end(block)
            values = [builder.extract_value(args[3], i) for i in range(len(arguments))]
            builder.call(_tile(builder.module, dtype.literal_value, *each), values)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[INT] * 3, types.UniTuple(INT, len(arguments)), dtype), code


@intrinsic(prefer_literal=True)
def spread(context, source, target, apart, dtype):  # type: ignore[no-untyped-def]
    """A step of a row of x, as tiles want it; where it fills two registers, they come to lie `apart` bytes apart."""

    def code(context, builder, signature, args):  # type: ignore[no-untyped-def]
        for i, values in enumerate(_read(builder, args[0], dtype.literal_value)):
            place = builder.add(args[1], builder.mul(args[2], I64(i)))
            builder.store(values, _at(builder, place, _vector(F32)), align=4)
        return context.get_dummy_value()

    return types.void(*[INT] * 3, dtype), code


@intrinsic
def claim(context, counter_at):  # type: ignore[no-untyped-def]
    """The number that stands there, which is one more for whoever asks next."""

    def code(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", _at(builder, args[0], I64), I64(1), "monotonic")

    return types.int64(counter_at), code


# What compiled code looks up where it runs: code is kept for other processes, where addresses are others.
STATE = (ctypes.c_int64 * 16)()
llvmlite.binding.add_symbol("specplug_state", ctypes.addressof(STATE))
# Places in it: GOMP_parallel, or 0; of each dtype the code of a product, or 0, and of a thread's part of it;
# MIN_SHARED; and boxed.py's own.
PARALLEL, RUN, WORK, SHARED, OTHERS = 0, 1, 4, 7, 8
STATE[SHARED] = MIN_SHARED

_C = ctypes.CDLL(None) if os.name == "posix" else ctypes.cdll.msvcrt
llvmlite.binding.add_symbol("specplug_malloc", address_of(_C.malloc))
llvmlite.binding.add_symbol("specplug_free", address_of(_C.free))
malloc = types.ExternalFunction("specplug_malloc", INT(INT))
free = types.ExternalFunction("specplug_free", types.void(INT))


@intrinsic
def state(context, place):  # type: ignore[no-untyped-def]
    """What stands there in STATE."""

    def code(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = ir.ArrayType(I64, len(STATE))
        known = builder.module.globals.get("specplug_state")
        array = known if known is not None else ir.GlobalVariable(builder.module, kind, "specplug_state")
        return builder.load(builder.gep(array, [I64(0), args[0]]))

    return types.int64(types.intp), code


@intrinsic(prefer_literal=True)
def words(context, count):  # type: ignore[no-untyped-def]
    """The address of so many whole numbers on the stack."""

    def code(context, builder, signature, args):  # type: ignore[no-untyped-def]
        with builder.goto_entry_block():
            return builder.ptrtoint(builder.alloca(I64, I64(count.literal_value)), I64)

    return INT(count), code


@intrinsic
def pointer(context, address):  # type: ignore[no-untyped-def]
    def code(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _at(builder, args[0], I64)

    return types.CPointer(types.int64)(address), code


@intrinsic
def pointer32(context, address):  # type: ignore[no-untyped-def]
    """To fp32 values."""

    def code(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _at(builder, args[0], F32)

    return types.CPointer(types.float32)(address), code


@intrinsic
def call(context, address, arguments):  # type: ignore[no-untyped-def]
    """A function of C, of whole numbers and addresses; what it returns, if that is a whole number."""

    def code(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(I64, [I64] * len(arguments))
        values = [builder.extract_value(args[1], i) for i in range(len(arguments))]
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)

    return types.int64(types.int64, types.UniTuple(types.int64, len(arguments))), code
