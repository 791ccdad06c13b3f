"""A linear layer for a few rows on the CPU, in place of torch's while a call is decoded.

A target pass over five positions should cost about what one costs, since the weights are read once either way. torch's own
`F.linear` does not keep that promise (docs/algorithm.md has figures), and its product with a single row does not read
memory as fast as it could. This one reads each weight once and feeds all rows. It serves plain `nn.Linear` modules in fp32,
bf16 and fp16 on the CPU, without hooks, for as many rows as it is quicker for; everything else stays torch's.
It takes as many threads as torch has, and they are torch's own: those of the OpenMP that torch has loaded, so that none wait
beside them. Results differ from torch's by rounding, as torch's own do between batch shapes, and do not depend on the number of
threads.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from specplug.choices import Kernel
from specplug.config import first_line
from specplug.swapping import entered, modules_of

log = logging.getLogger(__name__)

KERNELS = tuple(each.value for each in Kernel)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_WEIGHTS = 1 << 14  # below this many weights the call costs more than it saves
MIN_SHARED = 1 << 19  # bytes of weights; with fewer, one thread is done before the others have begun
MOST_CHECKED = 40  # rows
TOLERANCE = 1e-4  # of the self-check, relative to the length of rows and weights


def prepare(kernel: str, model: Any) -> None:
    """Compile before the first call, where there is something to serve. Raises ValueError where "numba" cannot be had."""
    if kernel == "torch":
        return
    served = _served(model)
    reasons: list[Any] = [
        _compiled(dtype, torch.get_num_threads()) for dtype in {module.weight.dtype for module in served}
    ]
    if not served:
        reasons = [
            "it serves plain linear layers in fp32, bf16 and fp16 on the CPU, and this model has none that are large enough"
        ]
    reason = next((each for each in reasons if isinstance(each, str)), None)
    if reason and kernel == "numba":
        raise ValueError(f"kernel=numba: {reason}; or take kernel=auto, which does what it can")
    if served and not reason:
        from specplug import fused

        fused.operators()


@contextlib.contextmanager
def swapped(kernel: str, *models: Any) -> Iterator[bool]:
    """Within it, the linear layers of `models` use our product where it serves them. Yields whether any does."""
    served, threads = [] if kernel == "torch" else _served(*models), torch.get_num_threads()
    modules = [module for module in served if not isinstance(_compiled(module.weight.dtype, threads), str)]
    with entered(modules, _enter, _leave):
        yield bool(modules)


# Modules of models that several threads decode with at once: how many of them are inside.
_INSIDE: dict[nn.Module, int] = {}


class FewRows(nn.Linear):
    """What a layer is while a call is decoded. A copy of it, or what is read back from a pickle, is a plain layer."""

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self._parameters["weight"]  # past the look-ups of a module's own, here and below
        bias = self._parameters["bias"]
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            return nn.functional.linear(input, weight, bias)
        result = _operator(input, weight, bias)
        return nn.functional.linear(input, weight, bias) if result is None else result  # which says what is wrong

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (nn.Linear,), vars(self)


def _enter(module: nn.Module) -> None:
    _INSIDE[module] = _INSIDE.get(module, 0) + 1
    object.__setattr__(module, "__class__", FewRows)


def _leave(module: nn.Module) -> None:
    _INSIDE[module] -= 1
    if not _INSIDE[module]:
        del _INSIDE[module]
        if type(module) is FewRows:
            object.__setattr__(module, "__class__", nn.Linear)


def _served(*models: Any) -> list[nn.Linear]:
    return [module for model in models for module in modules_of(model) if _serves(module)]


def _serves(module: nn.Module) -> TypeGuard[nn.Linear]:
    """A plain linear layer: no subclass (quantized, an adapter's), no hooks, no forward of somebody else's."""
    if type(module) not in (nn.Linear, FewRows) or "forward" in vars(module):
        return False
    weight: Any = module._parameters.get("weight")
    bias = module._parameters.get("bias")
    return (
        type(weight) is nn.Parameter
        and weight.is_cpu
        and weight.dtype in DTYPES
        and weight.is_contiguous()
        and weight.numel() >= MIN_WEIGHTS
        and weight.shape[0] >= 8
        and weight.shape[1] * weight.itemsize % 64 == 0  # rows of full cache lines, as models have
        and (bias is None or (bias.dtype is weight.dtype and bias.is_contiguous()))
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "parametrizations" not in module._modules
    )


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `F.linear` returns."""
    product = _compiled(weight.dtype, torch.get_num_threads())
    if isinstance(product, str) or x.dtype is not weight.dtype or x.size(-1) != weight.size(1):
        return nn.functional.linear(x, weight, bias)
    if not 1 <= x.numel() // weight.size(1) <= most_rows(x.dtype):
        return nn.functional.linear(x, weight, bias)
    return _multiplied(product, x, weight, bias)


def _multiplied(product: Callable[..., None], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_out, num_in = weight.shape
    out, rows = x.new_empty(*x.shape[:-1], num_out), x.contiguous()
    threads = 1 if num_out * num_in * x.itemsize < MIN_SHARED else torch.get_num_threads()
    to_add = 0 if bias is None else bias.data_ptr()
    addresses = rows.data_ptr(), weight.data_ptr(), to_add, out.data_ptr()
    product(*addresses, x.numel() // num_in, num_in, num_out, threads)
    return out


# Operators of torch, so that capture.py can write them down. The first is in Python; the second is boxed.py's.
SCHEMA = "(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
LIBRARY = torch.library.Library("specplug", "FRAGMENT")
LIBRARY.define(f"few_rows{SCHEMA}")
LIBRARY.define(f"few_rows_boxed{SCHEMA}")
LIBRARY.impl("few_rows", _few_rows, "CPU")
_operator: Any = torch.ops.specplug.few_rows.default  # what layers call


@functools.cache
def _compiled(dtype: torch.dtype, threads: int) -> Callable[..., None] | str:
    """Compiled and checked once a process for each dtype and number of threads; or the reason why there is none."""
    try:
        from specplug import skinny, tiles
    except ImportError as error:
        return f"numba cannot be imported ({first_line(error)})"
    if DTYPES.index(dtype) not in tiles.DTYPES:
        return f"this processor does not convert {str(dtype).removeprefix('torch.')}"
    if threads > 1 and skinny.openmp() is None:
        return (
            f"it serves one thread here, where no OpenMP has GOMP_parallel, and torch has {threads}; "
            "torch.set_num_threads(1), or threads=1"
        )
    try:
        product = _product(dtype)
        difference = max(self_check(product, dtype, each) for each in {1, threads})
    except Exception as error:  # whatever a compiler may raise on a machine nobody has seen
        log.warning("specplug: the linear layer for a few rows is left out, it does not compile: %s", first_line(error))
        return f"it does not compile here ({first_line(error)})"
    if difference > TOLERANCE:
        tiles.STATE[tiles.RUN + DTYPES.index(dtype)] = 0
        log.warning(
            "specplug: the linear layer for a few rows is left out, in %s it differs from torch's by %.1e",
            str(dtype).removeprefix("torch."),
            difference,
        )
        return f"it computes something else than torch here (by {difference:.1e})"
    _choose(product, dtype)
    return product


def _choose(product: Callable[..., None], dtype: torch.dtype) -> None:
    """From now on layers call the operator that needs no Python, if it can be had and returns the same, bit by bit."""
    global _operator
    from specplug import boxed

    operator, reference = boxed.operator(), torch.ops.specplug.few_rows.default
    if operator is None:
        return
    x, weight, bias = (torch.linspace(-1, 1, size, dtype=torch.float64).to(dtype) for size in (384, 2880, 45))
    x, weight = x.view(64, 2, 3).permute(1, 2, 0), weight.view(45, 64)
    same = all(
        torch.equal(operator(*each), _multiplied(product, *each))
        for each in ((x, weight, bias), (x.contiguous(), weight, bias), (x[0, :1], weight, None))
    )
    if not same:
        log.warning("specplug: the linear layer for a few rows goes through Python, where it returns what it should")
    _operator = operator if same else reference


@functools.cache
def most_rows(dtype: torch.dtype) -> int:
    """Up to which ours is used, on this processor."""
    from specplug import skinny

    return skinny.MOST_ROWS[DTYPES.index(dtype)]


def _product(dtype: torch.dtype) -> Callable[..., None]:
    from specplug import skinny

    return skinny.product(DTYPES.index(dtype))


def self_check(product: Callable[..., None], dtype: torch.dtype, threads: int) -> float:
    """Largest difference from the exact product, its rounding to `dtype` aside, relative to the lengths.

    Over every number of rows that are multiplied at once, and two that are not, and shapes that take every way through the
    product: short and long rows, numbers of outputs that divide by nothing, more of them than a thread takes at a time; with a
    bias and without.
    """
    generator = torch.Generator().manual_seed(0)
    largest = torch.zeros((), dtype=torch.float64)
    for num_out, num_in, biased in ((9, 32, True), (67, 160, False), (149, 576, True), (37, 8192, False)):
        x, weight = (torch.randn((n, num_in), generator=generator).to(dtype) for n in (MOST_CHECKED, num_out))
        bias = torch.randn(num_out, generator=generator).to(dtype) if biased else None
        exact = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        scale = x.double().norm(dim=-1)[:, None] * weight.double().norm(dim=-1)
        rounding = torch.finfo(dtype).eps / 2 * exact.abs()
        out = torch.empty((MOST_CHECKED, num_out), dtype=dtype)
        addresses = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        for num_rows in (*range(1, 19), 25, MOST_CHECKED):
            out.fill_(float("nan"))
            product(*addresses, out.data_ptr(), num_rows, num_in, num_out, threads)
            difference = ((out - exact).abs() - rounding)[:num_rows] / scale[:num_rows]
            largest = torch.maximum(largest, difference.nan_to_num(float("inf")).max())
    return float(largest)
