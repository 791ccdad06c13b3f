"""A linear layer for a few rows on the CPU, in place of torch's while a call is decoded.

A target pass over five positions should cost about what one costs, since the weights are read once either way. torch's own
`F.linear` does not keep that promise in fp32 (docs/algorithm.md has figures), and its product with a single row does not read
memory as fast as it could. This one reads each weight once and feeds all rows. It serves plain `nn.Linear` modules in fp32 on
the CPU, without hooks, for 1 to MAX_ROWS rows and one thread; everything else stays torch's. Results differ from torch's by
rounding, as torch's own do between batch shapes.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from specplug.config import first_line

log = logging.getLogger(__name__)

KERNELS = ("auto", "torch", "numba")
MAX_ROWS = 17
MIN_WEIGHTS = 1 << 14  # below this many weights the call costs more than it saves
TOLERANCE = 1e-4  # of the self-check, relative to the length of rows and weights


def prepare(kernel: str, model: Any) -> None:
    """Compile before the first call, where there is something to serve. Raises ValueError where "numba" cannot be had."""
    if kernel == "torch":
        return
    reason: Any = None
    if torch.get_num_threads() > 1:
        reason = (
            f"it serves one thread, and torch has {torch.get_num_threads()}; torch.set_num_threads(1), or threads=1"
        )
    elif not _served(model):
        reason = "it serves plain linear layers in fp32 on the CPU, and this model has none that are large enough"
    elif isinstance(_compiled(), str):
        reason = _compiled()
    if reason and kernel == "numba":
        raise ValueError(f"kernel=numba: {reason}; or take kernel=auto, which does what it can")


@contextlib.contextmanager
def swapped(kernel: str, *models: Any) -> Iterator[bool]:
    """Within it, the linear layers of `models` use our product where it serves them. Yields whether any does."""
    modules = [] if kernel == "torch" or torch.get_num_threads() > 1 else _served(*models)
    if modules and isinstance(_compiled(), str):
        modules = []
    entered: list[nn.Module] = []
    try:
        with _ENTERING:
            for module in modules:
                _enter(module)
                entered.append(module)
        yield bool(modules)
    finally:
        with _ENTERING:
            for module in entered:
                _leave(module)


_ENTERING = threading.Lock()
# Modules of models that several threads decode with at once: how many of them are inside.
_INSIDE: dict[nn.Module, int] = {}


class FewRows(nn.Linear):
    """What a layer is while a call is decoded. A copy of it, or what is read back from a pickle, is a plain layer."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            return nn.functional.linear(input, self.weight, self.bias)
        return torch.ops.specplug.few_rows(input, self.weight, self.bias)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (nn.Linear,), vars(self)


def _enter(module: nn.Module) -> None:
    _INSIDE[module] = _INSIDE.get(module, 0) + 1
    module.__class__ = FewRows


def _leave(module: nn.Module) -> None:
    _INSIDE[module] -= 1
    if not _INSIDE[module]:
        del _INSIDE[module]
        if type(module) is FewRows:
            module.__class__ = nn.Linear  # type: ignore[assignment]


def _served(*models: Any) -> list[nn.Module]:
    return [module for model in models for module in model.modules() if _serves(module)]


def _serves(module: Any) -> bool:
    """A plain linear layer: no subclass (quantized, an adapter's), no hooks, no forward of somebody else's."""
    if type(module) not in (nn.Linear, FewRows) or "forward" in vars(module):
        return False
    weight = module.weight
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and weight.is_contiguous()
        and weight.numel() >= MIN_WEIGHTS
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "parametrizations" not in module._modules
    )


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `F.linear` returns."""
    product = _compiled()
    num_columns, num_out = x.shape[-1], weight.shape[0]
    num_rows = x.numel() // num_columns
    if (
        isinstance(product, str)
        or not 1 <= num_rows <= MAX_ROWS
        or x.dtype is not torch.float32
        or torch.get_num_threads() > 1
    ):
        return nn.functional.linear(x, weight, bias)
    out = torch.empty((*x.shape[:-1], num_out))
    rows = x.contiguous()
    product(rows.data_ptr(), weight.data_ptr(), out.data_ptr(), num_rows, num_columns, num_out)
    if bias is not None:
        out += bias
    return out


# An operator of torch, so that capture.py can write it down.
LIBRARY = torch.library.Library("specplug", "FRAGMENT")
LIBRARY.define("few_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
LIBRARY.impl("few_rows", _few_rows, "CPU")


@functools.cache
def _compiled() -> Callable[..., None] | str:
    """Compiled and checked once a process; or the reason why there is none."""
    try:
        from specplug.skinny import product_at as product
    except ImportError as error:
        return f"numba cannot be imported ({first_line(error)})"
    try:
        difference = self_check(product)
    except Exception as error:  # whatever a compiler may raise on a machine nobody has seen
        log.warning("specplug: the linear layer for a few rows is left out, it does not compile: %s", first_line(error))
        return f"it does not compile here ({first_line(error)})"
    if difference > TOLERANCE:
        log.warning(
            "specplug: the linear layer for a few rows is left out, it differs from torch's by %.1e", difference
        )
        return f"it computes something else than torch here (by {difference:.1e})"
    return product


def self_check(product: Callable[..., None]) -> float:
    """Largest difference from torch's product, over odd shapes and every number of rows, relative to the lengths."""
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for num_rows in range(1, MAX_ROWS + 1):
        for num_out, num_in in ((1, 1), (7, 33), (64, 130)):
            x = torch.randn((num_rows, num_in), generator=generator)
            weight = torch.randn((num_out, num_in), generator=generator)
            out = torch.full((num_rows, num_out), float("nan"))
            product(x.data_ptr(), weight.data_ptr(), out.data_ptr(), num_rows, num_in, num_out)
            scale = x.norm(dim=-1)[:, None] * weight.norm(dim=-1)[None]
            largest = max(largest, float(((out - x @ weight.T).abs() / scale).nan_to_num(float("inf")).max()))
    return largest
