"""Times the linear layer for a few rows beside torch's, on the shapes of SmolLM2-135M and of a model of 1.5B.

    python tests/kernel_times.py [--dtype float32] [--threads 1] [--rows 1 2 5 9 17] [--shapes 576x576 ...] [--seconds 4]

Weights come from memory, not from a cache: each call takes others, of a pool that no cache holds. Large layers are timed in
pieces of 4 MB a thread. Columns are microseconds for the whole layer: for each piece the quickest of many calls, which take
turns, and of these the median. On a machine that does other things, compare within a row, and let it run for longer.
"""

import argparse
import statistics
import time

import torch
from torch import nn

from specplug import kernel

SHAPES = [
    "576x576",
    "1536x576",
    "576x1536",
    "49152x576",
    "1536x1536",
    "256x1536",
    "1536x8960",
    "8960x1536",
    "151936x1536",
]
POOL = 160 << 20  # bytes


def quickest(pieces, calls, seconds):
    """Microseconds a piece for each of `calls`."""
    best = [[float("inf")] * len(pieces) for _ in calls]
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        for mine, call in zip(best, calls, strict=True):
            for i, piece in enumerate(pieces):
                start = time.perf_counter()
                call(piece)
                mine[i] = min(mine[i], time.perf_counter() - start)
        rounds += 1
    return [statistics.median(each) * 1e6 for each in best]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--dtype", default="float32", choices=[str(each).removeprefix("torch.") for each in kernel.DTYPES]
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 5, 9, 17])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="outputs x inputs")
    parser.add_argument("--seconds", type=float, default=4, help="for each shape")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    product = kernel._compiled(dtype, options.threads)
    if isinstance(product, str):
        parser.error(product)
    pool = torch.randn(POOL // dtype.itemsize).to(dtype)
    print(f"{torch.__version__}, {options.dtype}, {options.threads} threads, microseconds")
    print("outputs x inputs  rows     torch      ours  torch/ours  width cost, torch  ours   GB/s, ours")
    for shape in options.shapes:
        num_out, num_in = (int(each) for each in shape.split("x"))
        part = min(num_out, max(64, options.threads * (4 << 20) // (num_in * dtype.itemsize) // 64 * 64))
        pieces = pool[: pool.numel() // (part * num_in) * part * num_in].view(-1, part, num_in).unbind()
        calls = []
        for rows in options.rows:
            x = torch.randn(rows, num_in).to(dtype)
            calls.append(lambda weight, x=x: nn.functional.linear(x, weight))
            # also with more rows than it is used for
            calls.append(lambda weight, x=x: kernel._multiplied(product, x, weight, None))
        with torch.inference_mode():
            times = [each * num_out / part for each in quickest(pieces, calls, options.seconds)]
        for i, rows in enumerate(options.rows):
            one, own = times[2 * i : 2 * i + 2]
            print(
                f"{shape:>16}  {rows:4}  {one:8.0f}  {own:8.0f}  {one / own:10.2f}  {one / times[0]:17.2f}  {own / times[1]:4.2f}"
                f"  {num_out * num_in * dtype.itemsize / own / 1e3:11.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
