"""What most models do between their products, in recordings: the norm by the root mean square, and the rotation of positions.

transformers writes them as five and seven operations of torch. In a pass of a small model each of these takes longer than what it
computes: together up to a third of it. As an operator each, compiled by numba, they take a tenth of that. Every sum and rounding is
torch's own, in its order, so that a recording still returns what the pass does, bit by bit; where that does not hold, on another
processor or with another torch, nothing is changed.

Served: fp32 on the CPU, half-precision models' norms too, which compute in fp32. Needs what stable.py needs.
"""

import functools
import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import register_jitable
from torch import Tensor

from specplug import stable
from specplug.config import first_line
from specplug.folding import END, PASSES
from specplug.kernel import LIBRARY
from specplug.stable import (
    MAX_DIM,
    VERSION,
    copy_to,
    data_of,
    delete_tensor,
    dim_of,
    dtype_of,
    empty,
    is_contiguous,
    number,
    put,
    size_of,
    stride_of,
    undefined,
)
from specplug.tiles import INT, pointer, pointer32, words

log = logging.getLogger(__name__)

LIBRARY.define("rms(Tensor x, float eps) -> Tensor")
LIBRARY.define("rotated(Tensor x, Tensor cos, Tensor sin) -> Tensor")
_INSTALLING = threading.Lock()

# How torch adds up what lies side by side (aten/src/ATen/native/cpu/SumKernel.cpp): with registers of 8 sums, also where the processor has
# larger ones; four of them in turn, and after so many steps into those of a higher level.
LANES, CHAINS, LEVELS = 8, 4, 4


@register_jitable
def _sum_of_squares(row, size, level_power, sums):  # type: ignore[no-untyped-def]
    """Of `row`, fp32, as torch would. `sums`: room for LEVELS times CHAINS * LANES of them."""
    wide = CHAINS * LANES
    num_vectors = size // LANES
    num_steps, level_step = num_vectors // CHAINS, 1 << level_power
    for i in range(LEVELS * wide):
        sums[i] = np.float32(0)
    step = 0
    while step + level_step <= num_steps:
        for at in range(step, step + level_step):
            for lane in range(wide):
                value = row[at * wide + lane]
                sums[lane] += value * value
        step += level_step
        for level in range(1, LEVELS):
            for lane in range(wide):
                sums[level * wide + lane] += sums[(level - 1) * wide + lane]
                sums[(level - 1) * wide + lane] = np.float32(0)
            if step & ((level_step - 1) << (level * level_power)) != 0:
                break
    for at in range(step, num_steps):
        for lane in range(wide):
            value = row[at * wide + lane]
            sums[lane] += value * value
    for level in range(1, LEVELS):
        for lane in range(wide):
            sums[lane] += sums[level * wide + lane]
    for at in range(num_steps * CHAINS, num_vectors):
        for lane in range(LANES):
            value = row[at * LANES + lane]
            sums[lane] += value * value
    for chain in range(1, CHAINS):
        for lane in range(LANES):
            sums[lane] += sums[chain * LANES + lane]
    total = np.float32(0)
    for i in range(num_vectors * LANES, size):
        total += row[i] * row[i]
    for lane in range(LANES):
        total += sums[lane]
    return total


@register_jitable
def _rms(x, eps, fp32, cpu):  # type: ignore[no-untyped-def]
    """A new tensor, or 0."""
    at, sizes_at = words(1), words(MAX_DIM)
    dim = dim_of(x, at)
    if dim < 1 or dim > MAX_DIM or dtype_of(x, at) != fp32:
        return 0
    num_rows = 1
    for d in range(dim):
        size = size_of(x, d, at)
        put(sizes_at + 8 * d, size)
        num_rows *= size if d < dim - 1 else 1
    size = number(sizes_at + 8 * (dim - 1))
    rows = x
    if not is_contiguous(x, at):
        rows = empty(sizes_at, dim, fp32, cpu, at)
        if rows == 0:
            return 0
        copy_to(rows, x, types.int32(0))
    out = empty(sizes_at, dim, fp32, cpu, at)
    if out != 0:
        source, to, sums = data_of(rows, at), data_of(out, at), numba.carray(pointer32(words(64)), (128,))
        level_power, num_steps = 0, size // LANES // CHAINS
        while (1 << level_power) < num_steps:
            level_power += 1
        level_power = max(4, level_power // LEVELS)
        for i in range(num_rows):
            row = numba.carray(pointer32(source + 4 * size * i), (size,))
            made = numba.carray(pointer32(to + 4 * size * i), (size,))
            mean = _sum_of_squares(row, size, level_power, sums) / np.float32(size)
            scale = np.float32(1) / math.sqrt(mean + eps)
            for k in range(size):
                made[k] = row[k] * scale
    if rows != x:
        delete_tensor(rows)
    return out


@register_jitable
def _steps(tensor, sizes_at, at, steps_at):  # type: ignore[no-untyped-def]
    """Bytes from one place to the next, in each of the first three dimensions of an (B, H, W, D) tensor, to `steps_at`: 0 where it has
    one for all. Whether it fits to these sizes, its rows one value behind another."""
    if dim_of(tensor, at) != 4 or size_of(tensor, 3, at) != number(sizes_at + 24) or stride_of(tensor, 3, at) != 1:
        return False
    for d in range(3):
        size, step = size_of(tensor, d, at), 4 * stride_of(tensor, d, at)
        if size != 1 and size != number(sizes_at + 8 * d):
            return False
        put(steps_at + 8 * d, step if size != 1 else 0)
    return True


@register_jitable
def _rotated(x, cos, sin, fp32, cpu):  # type: ignore[no-untyped-def]
    """A new tensor, or 0 where they do not fit."""
    at, sizes_at = words(1), words(MAX_DIM)
    if dim_of(x, at) != 4 or dtype_of(x, at) != fp32 or dtype_of(cos, at) != fp32 or dtype_of(sin, at) != fp32:
        return 0
    for d in range(4):
        put(sizes_at + 8 * d, size_of(x, d, at))
    x_at, cos_at, sin_at = words(3), words(3), words(3)
    fits = _steps(x, sizes_at, at, x_at) and _steps(cos, sizes_at, at, cos_at) and _steps(sin, sizes_at, at, sin_at)
    size = number(sizes_at + 24)
    if not fits or size % 2 != 0:
        return 0
    out = empty(sizes_at, 4, fp32, cpu, at)
    if out == 0:
        return 0
    half, to = size // 2, data_of(out, at)
    sources = data_of(x, at), data_of(cos, at), data_of(sin, at)
    for b in range(number(sizes_at)):
        for h in range(number(sizes_at + 8)):
            for w in range(number(sizes_at + 16)):
                row = numba.carray(pointer32(sources[0] + _place(x_at, b, h, w)), (size,))
                c = numba.carray(pointer32(sources[1] + _place(cos_at, b, h, w)), (size,))
                s = numba.carray(pointer32(sources[2] + _place(sin_at, b, h, w)), (size,))
                made = numba.carray(pointer32(to), (size,))
                for i in range(half):
                    made[i] = row[i] * c[i] + -row[half + i] * s[i]
                for i in range(half, size):
                    made[i] = row[i] * c[i] + row[i - half] * s[i]
                to += 4 * size
    return out


@register_jitable
def _place(steps_at, b, h, w):  # type: ignore[no-untyped-def]
    return b * number(steps_at) + h * number(steps_at + 8) + w * number(steps_at + 16)


def _compile(fp32: int, cpu: int, version: int) -> tuple[Any, Any]:
    """`fp32`, `cpu`: torch's numbers of them; `version`: stable.py's."""
    signature = types.void(INT, INT, INT)

    @numba.cfunc(signature, cache=True, error_model="numpy")
    def rms(stack_at, num_arguments, num_results):  # type: ignore[no-untyped-def]
        if version == 0:
            return
        x, eps = number(stack_at), numba.carray(pointer(stack_at + 8), (1,)).view(np.float64)[0]
        out = _rms(x, np.float32(eps), fp32, cpu)
        delete_tensor(x)
        put(stack_at, out)
        if out == 0:
            undefined(stack_at)

    @numba.cfunc(signature, cache=True, error_model="numpy")
    def rotated(stack_at, num_arguments, num_results):  # type: ignore[no-untyped-def]
        if version == 0:
            return
        x, cos, sin = number(stack_at), number(stack_at + 8), number(stack_at + 16)
        out = _rotated(x, cos, sin, fp32, cpu)
        delete_tensor(x)
        delete_tensor(cos)
        delete_tensor(sin)
        put(stack_at, out)
        if out == 0:
            undefined(stack_at)

    return rms, rotated


def operators() -> tuple[Any, Any] | None:
    """`specplug::rms` and `specplug::rotated`, which recordings have from now on; or None where they cannot be had. They return None for
    what they do not serve. Compiled once for a machine, in about 3 seconds."""
    with _INSTALLING:
        return _install()


@functools.cache
def _install() -> tuple[Any, Any] | None:
    try:
        rms, rotated = _compile(stable.dtype_code("float32"), stable.cpu_code(), VERSION)
        found = stable.register("rms", rms), stable.register("rotated", rotated)
    except Exception as error:  # whatever another torch or a compiler may raise
        log.debug("specplug: recordings have norms and rotations as they are: %s", first_line(error))
        return None
    PASSES.append(fuse)
    return found


def norm(x: Tensor, eps: float) -> Tensor:
    """As transformers has it, before the weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers has it, for two halves."""
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)


@functools.cache
def is_torchs(size: int) -> tuple[bool, bool]:
    """Whether the two operators return torch's bits for rows of that size."""
    found = operators()
    if found is None:
        return False, False
    generator = torch.Generator().manual_seed(size)
    with torch.no_grad():
        x = torch.randn((1, 33, 3, size), generator=generator).exp().mul_(torch.randn((33, 1, 1), generator=generator))
        same_norm = all(
            torch.equal(found[0](each, eps), norm(each, eps)) for each in (x, x * 1e-3) for eps in (1e-6, 1e-5)
        )
        angle = torch.randn((1, 1, 33, size), generator=generator)
        given = x.transpose(1, 2), angle.cos(), angle.sin()
        same_rotation = size % 2 == 0 and torch.equal(found[1](*given), rotation(*given))
    return same_norm, same_rotation


def fuse(graph: Any) -> None:
    """Put the operators into a traced graph, in the place of what they do."""
    replacements: dict[str, Callable[[Any, Any], Any]] = {"aten::mul": _as_rms, "aten::add": _as_rotated}
    for node in list(graph.nodes()):
        replacement = replacements.get(node.kind(), _none)(graph, node)
        if replacement is not None:
            replacement.insertBefore(node)
            replacement.output().setType(node.output().type())
            node.output().replaceAllUsesWith(replacement.output())


def _none(graph: Any, node: Any) -> None:
    return None


def _as_rms(graph: Any, node: Any) -> Any:
    """x * rsqrt(mean(pow(x, 2), -1, True) + eps)"""
    for x, scale in (_two(node), _two(node)[::-1]):
        above = _made_by(scale, "aten::rsqrt")
        above = above and _made_by(above.inputsAt(0), "aten::add")
        eps = above and _constant(above.inputsAt(1))
        if above is None or _constant(above.inputsAt(2)) != 1 or not isinstance(eps, float):
            continue
        mean = _made_by(above.inputsAt(0), "aten::mean")
        power = mean and _made_by(mean.inputsAt(0), "aten::pow")
        if power is None or power.inputsAt(0).unique() != x.unique() or _constant(power.inputsAt(1)) != 2:
            continue
        sizes = _sizes(x)
        if (
            _constants(mean.inputsAt(1)) != [-1]
            or _constant(mean.inputsAt(2)) is not True
            or not sizes
            or not _sizes(mean.output())
        ):
            continue
        if is_torchs(sizes[-1])[0]:
            graph.setInsertPoint(node)
            return graph.create("specplug::rms", [x, graph.insertConstant(eps)], 1)
    return None


def _as_rotated(graph: Any, node: Any) -> Any:
    """x * cos + cat([-x[..., half:], x[..., :half]], -1) * sin"""
    if node.inputsSize() != 3 or _constant(node.inputsAt(2)) != 1:
        return None
    straight, turned = (_made_by(each, "aten::mul") for each in _two(node))
    if straight is None or turned is None:
        return None
    x, cos = _two(straight)
    joined, sin = _made_by(turned.inputsAt(0), "aten::cat"), turned.inputsAt(1)
    halves = joined and _made_by(joined.inputsAt(0), "prim::ListConstruct")
    sizes = _sizes(x)
    if halves is None or halves.inputsSize() != 2 or len(sizes) != 4 or _constant(joined.inputsAt(1)) not in (-1, 3):
        return None
    half, negated = sizes[3] // 2, _made_by(halves.inputsAt(0), "aten::neg")
    if (
        negated is None
        or not _is_slice(negated.inputsAt(0), x, half, END)
        or not _is_slice(halves.inputsAt(1), x, 0, half)
    ):
        return None
    fits = all(
        len(_sizes(each)) == 4
        and _sizes(each)[3] == sizes[3]
        and all(a in (1, b) for a, b in zip(_sizes(each), sizes, strict=True))
        for each in (cos, sin)
    )
    return graph.create("specplug::rotated", [x, cos, sin], 1) if fits and is_torchs(sizes[3])[1] else None


def _two(node: Any) -> tuple[Any, Any]:
    return node.inputsAt(0), node.inputsAt(1)


def _made_by(value: Any, kind: str) -> Any:
    """The operation that makes it, if it is of that kind."""
    return value.node() if value.node().kind() == kind else None


def _constant(value: Any) -> Any:
    """A plain number, if it is one."""
    if value.node().kind() != "prim::Constant":
        return None
    found = value.toIValue()
    return found.item() if isinstance(found, Tensor) and found.ndim == 0 else found


def _constants(value: Any) -> list[Any] | None:
    made = _made_by(value, "prim::ListConstruct")
    return _constant(value) if made is None else [_constant(each) for each in made.inputs()]


def _sizes(value: Any) -> list[int]:
    """Of a tensor in fp32 on the CPU, as it was traced; [] of anything else."""
    kind = value.type()
    if kind.kind() != "TensorType" or kind.scalarType() != "Float" or str(kind.device()) != "cpu":
        return []
    return list(kind.sizes() or [])


def _is_slice(value: Any, x: Any, start: int, end: int) -> bool:
    """x[..., start:end]"""
    node = _made_by(value, "aten::slice")
    if node is None or node.inputsAt(0).unique() != x.unique():
        return False
    dim, first, last, step = (_constant(node.inputsAt(place)) for place in range(1, 5))
    return dim in (-1, 3) and (first or 0) == start and last == end and step == 1
