"""x @ w.T + bias for a few rows of x, compiled by numba: each weight is read from memory once, whatever the number of rows.

The unit is a tile: a few rows of weights times a few rows of x, with a register of sums for each pair. A step of it takes
LANES * 4 bytes of each row of weights. How rows come to tiles is a plan, by the number of rows and their length: what takes
time is memory, and it is quickest where it is read in order. Sums of half-precision weights are fp32 and rounded once.

Every output is one thread's sum, in an order that does not depend on the number of threads. Knows addresses and sizes only;
kernel.py says who is served.
"""

import ctypes
import functools
import os
import platform
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from specplug.kernel import MAX_ROWS

FLOAT32, BFLOAT16, FLOAT16 = range(3)  # a dtype, here

# What the compiler may use, which is what the machine has unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say otherwise.
_, _CPU, _LISTED = cpu_target.target_context.codegen().magic_tuple()
_FEATURES = set(_LISTED.split(","))
_ZEN = _CPU.startswith("znver")
_WIDE = "+avx512f" in _FEATURES
_PAIRS = _WIDE and "+avx512bf16" in _FEATURES  # multiplies bf16 as it is, in pairs
# With tiles of its own a processor multiplies any few rows of bf16 as fast as one; there torch's product is the quicker one beyond.
MOST_ROWS = {FLOAT32: MAX_ROWS, BFLOAT16: 6 if "+amx-bf16" in _FEATURES else MAX_ROWS, FLOAT16: MAX_ROWS}
DTYPES = (FLOAT32, BFLOAT16, *([FLOAT16] if "+f16c" in _FEATURES or platform.machine() in ("arm64", "aarch64") else []))

LANES = 16 if _WIDE else 8  # sums in a register
VECTOR = LANES * 4  # bytes of a register, and of a row of weights that a step takes
LINE = 64  # bytes: rows of weights have to be full lines
NUM_W, MAX_X = (4, 6) if _WIDE else (2, 5)  # of a tile, so that sums and what is loaded for a step are registers
NEAR = 28 << 10  # bytes of x that the nearest cache holds beside a stream of weights
FAR = 384 << 10  # the same of the second cache
BLOCK = 32  # rows of weights that share a block of x where all of it is more
# Bytes that a row of weights is fetched ahead into the nearest cache: with more than one row of x its products wait in a queue that is
# soon full. This, and what three tiles do, was tried on Intel's Emerald Rapids; not on AMD's Zen.
SOON = 0 if _ZEN else 16 * VECTOR

# num_w, num_x, chains. With one chain the rows of weights are read together. With more they are read one after the other,
# and a sum is made of as many: alone it would wait for itself.
TILES = {(NUM_W, num_x, 1) for num_x in range(1, MAX_X + 1)} | {(2, num_x, 1) for num_x in range(3, 6)}
TILES |= {(8, 1, 4), (8, 2, 2), (8, 3, 2)}


class Plan(NamedTuple):
    num_w: int
    max_x: int  # rows of x in a tile, at most
    chains: int
    block: int  # rows of weights that go through all steps before the next
    block_steps: int  # steps that these rows make together, one after the other
    in_order: int  # 1: memory is asked for in its own order; 0: row beside row


@functools.cache
def plan(dtype: int, num_rows: int, num_steps: int) -> Plan:
    """The quickest of what was tried (tests/kernel_times.py), by the bytes of x."""
    size = num_rows * num_steps * VECTOR * _vectors(dtype)
    # One row of weights after the other: quicker on AMD's Zen, and up to a third slower on Intel's Emerald Rapids.
    if num_rows <= 3 and size <= NEAR and _ZEN:
        return Plan(8, num_rows, 4 if num_rows == 1 else 2, 8, num_steps, 1)
    waits = 3 <= num_rows < 10 and _vectors(dtype) == 1  # more rows, and weights to be widened, have more to compute
    if size <= (NEAR if waits else FAR):
        return Plan(NUM_W, MAX_X, 1, NUM_W, num_steps, 1)
    blocks = -(-num_steps // max(4, (16 << 10 if waits else 32 << 10) // (num_rows * VECTOR)))
    return Plan(2 if 3 <= num_rows <= 5 else NUM_W, MAX_X, 1, BLOCK, -(-num_steps // blocks), 0)


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


def _vectors(dtype: int) -> int:
    """Registers that VECTOR bytes of weights fill."""
    return 1 if dtype == FLOAT32 or (dtype == BFLOAT16 and _PAIRS) else 2


def _read(builder: Any, address: Any, dtype: int) -> list[Any]:
    """VECTOR bytes at `address`, as fp32 if they are to be multiplied so; of bf16 the even ones, then the odd ones."""
    if _vectors(dtype) == 1:
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
        values = _at(builder, builder.add(x, builder.mul(step, I64(num_x * _vectors(dtype) * VECTOR))), vector)
        for v in range(_vectors(dtype)):
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


_INT = types.intp


@intrinsic(prefer_literal=True)
def _tiles(context, num_w, num_x, chains, arguments, dtype):  # type: ignore[no-untyped-def]
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

    return types.void(*[_INT] * 3, types.UniTuple(_INT, len(arguments)), dtype), code


@intrinsic(prefer_literal=True)
def _spread(context, source, target, apart, dtype):  # type: ignore[no-untyped-def]
    """A step of a row of x, as tiles want it; where it fills two registers, they come to lie `apart` bytes apart."""

    def code(context, builder, signature, args):  # type: ignore[no-untyped-def]
        for i, values in enumerate(_read(builder, args[0], dtype.literal_value)):
            place = builder.add(args[1], builder.mul(args[2], I64(i)))
            builder.store(values, _at(builder, place, _vector(F32)), align=4)
        return context.get_dummy_value()

    return types.void(*[_INT] * 3, dtype), code


@intrinsic
def _room(context, size):  # type: ignore[no-untyped-def]
    """The address of sums for BLOCK rows of weights and MAX_ROWS of x, on the stack."""

    def code(context, builder, signature, args):  # type: ignore[no-untyped-def]
        with builder.goto_entry_block():
            return builder.ptrtoint(builder.alloca(_vector(F32), I64(BLOCK * MAX_ROWS)), I64)

    return _INT(size), code


@intrinsic
def _claim(context, counter):  # type: ignore[no-untyped-def]
    """What `counter` points to, which is one more for whoever asks next."""

    def code(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", args[0], I64(1), "monotonic")

    return types.int64(counter), code


_TASK = types.void(types.CPointer(types.int64))
_SIZE = 17
_TASK_OF = ctypes.c_int64 * _SIZE
PACK, MULTIPLY = 1, 2


def _compile(dtype: int) -> Any:
    """A function of the address of a task: a counter that threads share, what to do, addresses, sizes and the plan."""
    size, vectors = (4 if dtype == FLOAT32 else 2), _vectors(dtype)  # numba keeps code by what a function closes over

    @numba.cfunc(_TASK, cache=True)
    def work(task_at):  # type: ignore[no-untyped-def]
        task = numba.carray(task_at, (_SIZE,))
        stages, source, all_w, all_bias, out, x = task[1], task[2], task[3], task[4], task[5], task[6]
        num_rows, num_steps, num_out, chunk = task[7], task[8], task[9], task[10]
        num_w, max_x, chains, block, block_steps, in_order = task[11], task[12], task[13], task[14], task[15], task[16]
        tiles = (num_rows + max_x - 1) // max_x
        if stages & PACK:  # rows of x to tiles: for each step what the rows of a tile have there, to be read in order
            m = 0
            for t in range(tiles):
                num_x = (num_rows - m + tiles - t - 1) // (tiles - t)
                for g in range(num_x):
                    for k in range(num_steps):
                        to = x + ((m * num_steps + k * num_x) * vectors + g) * VECTOR
                        _spread(source + ((m + g) * num_steps + k) * VECTOR, to, num_x * VECTOR, dtype)
                m += num_x
        if not stages & MULTIPLY:
            return
        row, last = num_steps * VECTOR, num_out - num_w
        ahead_row, ahead_step = (VECTOR, VECTOR * num_w) if in_order else (row, VECTOR)
        soon = SOON if tiles == 1 else 0  # of several tiles the first fetches for the others
        # Of three tiles each asks for a third of what is ahead: else memory has nothing to do while the others multiply.
        shares = tiles if tiles > 2 and in_order and SOON else 1
        ahead_row, ahead_step = ahead_row // shares, ahead_step // shares
        ahead_tile = num_w * row // shares if shares > 1 else 0
        sums = _room(0)
        while True:  # chunks of the rows of weights, until the threads have taken all
            first = _claim(task_at) * chunk
            if first >= num_out:
                break
            end = min(num_out, first + chunk)
            for n0 in range(first, end, block):
                n1 = min(end, n0 + block)
                for k in range(0, num_steps, block_steps):
                    steps = min(block_steps, num_steps - k)
                    for n in range(n0, n1, num_w):
                        i = min(n, last)  # the last rows once more, where num_w is no divisor
                        w = all_w + i * row + k * VECTOR
                        if n + num_w < n1:
                            ahead = w + num_w * row
                        elif k + steps < num_steps:
                            ahead = all_w + n0 * row + (k + steps) * VECTOR
                        else:
                            ahead = all_w + n1 * row
                        bias = all_bias + i * size if all_bias else 0
                        m = 0
                        for t in range(tiles):
                            num_x = (num_rows - m + tiles - t - 1) // (tiles - t)
                            at = x + (m * num_steps + k * num_x) * vectors * VECTOR
                            kept = sums + ((n - n0) * num_rows + m * num_w) * VECTOR
                            to = out + (m * num_out + i) * size
                            fresh, whole = int(k == 0), int(k + steps == num_steps)
                            where = (w, row, at, kept, steps, soon, ahead + t * ahead_tile, ahead_row, ahead_step)
                            then = (fresh, whole, bias, to, num_out * size)
                            _tiles(num_w, num_x, chains, where + then, dtype)
                            m += num_x

    return work


def openmp() -> Callable[..., None] | None:
    """What begins a parallel region of the OpenMP that torch has loaded, whose threads are torch's own; None without."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # another system's, or none
        return None
    parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


_FORKED: list[bool] = []
if hasattr(os, "register_at_fork"):  # OpenMP's threads do not come along into a child, which would wait for them
    os.register_at_fork(after_in_child=lambda: _FORKED.append(True))


class _Own(threading.local):
    """What a thread calls with: where it keeps rows of x for its tiles, and the tasks it had, by dtype, sizes and threads."""

    size, buffer, address = 0, None, 0

    def __init__(self) -> None:
        self.tasks: dict[tuple[int, ...], Any] = {}

    def task(self, key: tuple[int, ...]) -> Any:
        dtype, num_rows, num_in, num_out, threads = key
        if num_rows * num_in * 4 > self.size:
            self.size = num_rows * num_in * 4
            self.buffer = (ctypes.c_char * (self.size + LINE))()
            self.address = -(-ctypes.addressof(self.buffer) // LINE) * LINE
            self.tasks.clear()  # they have the old address
        num_steps = num_in * (4 if dtype == FLOAT32 else 2) // VECTOR
        chunk = num_out if threads == 1 else -(-num_out // (4 * threads * BLOCK)) * BLOCK
        sizes = num_rows, num_steps, num_out, chunk, *plan(dtype, num_rows, num_steps)
        task = self.tasks[key] = _TASK_OF(*[0] * 6, self.address, *sizes)
        return task


_OWN = _Own()


def product(dtype: int) -> Callable[..., None]:
    """Compiles, or reads what was compiled before.

    Returns a function of addresses (x, w, bias or 0, out), sizes (M, K, N) and threads: x (M, K), w (N, K), bias (N),
    out (M, N), all of `dtype` and C-contiguous, 1 <= M <= MAX_ROWS, N >= 8, rows of full lines.
    """
    code = _compile(dtype)
    work, parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address), openmp()

    def run(x: int, w: int, bias: int, out: int, num_rows: int, num_in: int, num_out: int, threads: int) -> None:
        key = dtype, num_rows, num_in, num_out, threads
        task = _OWN.tasks.get(key) or _OWN.task(key)
        if threads == 1 or parallel is None or _FORKED:
            task[:6] = 0, PACK | MULTIPLY, x, w, bias, out
            work(task)
        else:
            task[:6] = 0, PACK, x, w, bias, out
            work(task)
            task[1] = MULTIPLY
            parallel(code.address, task, threads, 0)

    return run
