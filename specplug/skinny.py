"""x @ w.T + bias for a few rows of x, compiled by numba: each weight is read from memory once for up to
18 rows.

The unit is a tile (tiles.py): a few rows of weights times a few rows of x. How rows come to tiles is a plan, by the number of
rows and their length: what takes time is memory, and it is quickest where it is read in order.

Every output is one thread's sum, in an order that does not depend on the number of threads. Knows addresses and sizes only;
kernel.py says who is served, boxed.py makes an operator of it.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
from numba import types
from numba.extending import register_jitable

from specplug.tiles import (
    BFLOAT16,
    DTYPES,
    FEATURES,
    FLOAT16,
    FLOAT32,
    INT,
    LINE,
    MAX_X,
    NUM_W,
    PARALLEL,
    RUN,
    SOON,
    STATE,
    VECTOR,
    VERSION,
    WIDE,
    WORK,
    ZEN,
    address_of,
    call,
    claim,
    free,
    malloc,
    multiply_tiles,
    num_vectors,
    pointer,
    spread,
    state,
    words,
)

AT_ONCE = 18  # rows of x, at most; more are multiplied in parts, which read the weights anew
# Where torch's product is the quicker one for more (tests/kernel_times.py). In fp16 torch's is slow on AMD's Zen for any number.
# With tiles of its own an Intel multiplies any few rows of bf16 as fast as one. Beyond what was tried it is torch's.
MOST_ROWS = {FLOAT32: 96, BFLOAT16: 96, FLOAT16: 1 << 20} if ZEN and WIDE else dict.fromkeys(DTYPES, 17)
if "+amx-bf16" in FEATURES:
    MOST_ROWS[BFLOAT16] = 6
NEAR = 28 << 10  # bytes of x that the nearest cache holds beside a stream of weights
FAR = 384 << 10  # the same of the second cache
BLOCK = 32  # rows of weights that share a block of x where all of it is more


class Plan(NamedTuple):
    num_w: int
    max_x: int  # rows of x in a tile, at most
    chains: int
    block: int  # rows of weights that go through all steps before the next
    block_steps: int  # steps that these rows make together, one after the other
    in_order: int  # 1: memory is asked for in its own order; 0: row beside row


@register_jitable
def plan(num_rows: int, num_steps: int, vectors: int, zen: bool) -> Plan:
    """The quickest of what was tried (tests/kernel_times.py), by the bytes of x. `vectors`: of tiles.py; `zen`: on AMD's Zen."""
    size = num_rows * num_steps * VECTOR * vectors
    # One row of weights after the other: quicker on AMD's Zen, and up to a third slower on Intel's Emerald Rapids.
    if num_rows <= 3 and size <= NEAR and zen:
        return Plan(8, num_rows, 4 if num_rows == 1 else 2, 8, num_steps, 1)
    waits = 3 <= num_rows < 10 and vectors == 1  # more rows, and weights to be widened, have more to compute
    if size <= (NEAR if waits else FAR):
        return Plan(NUM_W, MAX_X, 1, NUM_W, num_steps, 1)
    blocks = -(-num_steps // max(4, (16 << 10 if waits else 32 << 10) // (num_rows * VECTOR)))
    return Plan(2 if 3 <= num_rows <= 5 else NUM_W, MAX_X, 1, BLOCK, -(-num_steps // blocks), 0)


TASK, SUMS = 17, BLOCK * AT_ONCE * VECTOR // 8  # whole numbers
PACK, MULTIPLY = 1, 2


@functools.cache
def _compile(dtype: int, zen: bool) -> tuple[Any, Any]:
    """The code of a product, which returns 0 unless there is no memory for it, and of a thread's part of that.

    A part is a function of the address of a task: a counter that threads share, what to do, addresses, sizes and the plan.
    """
    size, vectors, version = (
        (4 if dtype == FLOAT32 else 2),
        num_vectors(dtype),
        VERSION,
    )  # closed over, as numba wants it

    @numba.cfunc(types.void(INT), cache=True)
    def work(task_at):  # type: ignore[no-untyped-def]
        if version == 0:
            return
        task = numba.carray(pointer(task_at), (TASK,))
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
                        spread(source + ((m + g) * num_steps + k) * VECTOR, to, num_x * VECTOR, dtype)
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
        sums = words(SUMS)
        while True:  # chunks of the rows of weights, until the threads have taken all
            first = claim(task_at) * chunk
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
                            multiply_tiles(num_w, num_x, chains, where + then, dtype)
                            m += num_x

    @numba.cfunc(INT(*[INT] * 8), cache=True)
    def run(x, w, bias, out, num_rows, num_in, num_out, threads):  # type: ignore[no-untyped-def]
        if version == 0:
            return 1
        parts = (num_rows + AT_ONCE - 1) // AT_ONCE
        most = (num_rows + parts - 1) // parts
        room = malloc(most * num_in * 4 + LINE)  # for rows of x as tiles want them
        if room == 0:
            return 1
        at, num_steps, done = words(TASK), num_in * size // VECTOR, 0
        shared = threads > 1 and state(PARALLEL) != 0
        task = numba.carray(pointer(at), (TASK,))
        for part in range(parts):
            rows = (num_rows - done + parts - part - 1) // (parts - part)
            how = plan(rows, num_steps, vectors, zen)
            task[0], task[1], task[2], task[3], task[4] = 0, PACK, x + done * num_in * size, w, bias
            task[5], task[6] = out + done * num_out * size, (room + LINE - 1) // LINE * LINE
            task[7], task[8], task[9] = rows, num_steps, num_out
            task[10] = (num_out + 4 * threads * BLOCK - 1) // (4 * threads * BLOCK) * BLOCK if shared else num_out
            task[11], task[12], task[13] = how.num_w, how.max_x, how.chains
            task[14], task[15], task[16] = how.block, how.block_steps, how.in_order
            call(state(WORK + dtype), (at,))
            task[1] = MULTIPLY
            if shared:
                call(state(PARALLEL), (state(WORK + dtype), at, threads, 0))
            else:
                call(state(WORK + dtype), (at,))
            done += rows
        free(room)
        return 0

    return run, work


def openmp() -> int | None:
    """The address of what begins a parallel region of the OpenMP that torch has loaded, whose threads are torch's own."""
    try:
        return address_of(ctypes.CDLL(None).GOMP_parallel)
    except (AttributeError, OSError, TypeError):  # another system's, or none
        return None


if hasattr(os, "register_at_fork"):  # OpenMP's threads do not come along into a child, which would wait for them
    os.register_at_fork(after_in_child=lambda: STATE.__setitem__(PARALLEL, 0))


def product(dtype: int, zen: bool = ZEN) -> Callable[..., None]:
    """Compiles, or reads what was compiled before.

    Returns a function of addresses (x, w, bias or 0, out), sizes (M, K, N) and threads: x (M, K), w (N, K), bias (N),
    out (M, N), all of `dtype` and C-contiguous, M >= 1, N >= 8, rows of full lines.
    """
    run, work = _compile(dtype, zen)
    STATE[PARALLEL] = openmp() or 0
    STATE[RUN + dtype], STATE[WORK + dtype] = run.address, work.address
    function = ctypes.CFUNCTYPE(*[ctypes.c_ssize_t] * 9)(run.address)

    def multiply(*arguments: int) -> None:
        if function(*arguments):
            raise MemoryError("there is no memory for the inputs of a linear layer")

    return multiply
