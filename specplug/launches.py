"""Host reads and launches of a round: how often it waits for the device, and how many operations it asks of it.

On CUDA a host read is what torch itself calls a synchronizing operation, or to wait for an event, and a launch is one of a kernel, a graph or a copy. On
the CPU nothing is waited for; there a host read is a call that would have to wait for a device, and a launch is an operation
that Python asks torch for, views included. A pass that is replayed is one. Not seen on the CPU: copies to the device, and what
a library reads without a tensor's methods.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import profile, record_function

from specplug.schedule import Schedule, without_tree

# Methods of a tensor, and functions of torch, that hand the host values, or a shape that depends on values.
METHODS = (
    "item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "equal", "allclose",
    "__bool__", "__int__", "__float__", "__index__", "__array__",
)  # fmt: skip
FUNCTIONS = ("nonzero", "masked_select", "unique", "equal", "allclose")
# As CUDA's runtime and driver call them, before an underscore and a version or the like.
LAUNCHES = (
    "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaMemcpyAsync",
    "cudaMemsetAsync",
)  # fmt: skip
MARK = "specplug: a round is over"


class Counts(NamedTuple):
    num_rounds: int
    host_reads: int
    launches: int


def count(call: Callable[[], Any], schedule: Schedule, device_type: str) -> Counts | None:
    """Those of `call`, which decodes under this schedule, from the end of its first round to the end of its last.

    None if it has no two rounds. The process must do nothing else meanwhile.
    """
    reads_at: list[int] = []
    with host_reads(device_type) as reads, _profiled(device_type) as profiler:

        def over() -> None:
            reads_at.append(reads())
            with record_function(MARK):
                pass

        with contextlib.ExitStack() as marked:
            for each in {id(each): each for each in (schedule, without_tree(schedule))}.values():
                marked.enter_context(_at_each_end(each, over))
            call()
    if len(reads_at) < 2:
        return None
    return Counts(len(reads_at) - 1, reads_at[-1] - reads_at[0], _launches(profiler, device_type))


@contextlib.contextmanager
def host_reads(device_type: str) -> Iterator[Callable[[], int]]:
    """Within it they are counted; yields what tells how many there were. Other threads are counted as well."""
    if device_type == "cuda":
        mode, event, awaited = torch.cuda.get_sync_debug_mode(), torch.cuda.Event, 0
        synchronize = event.synchronize

        def awaiting(self: Any) -> None:  # of which torch does not warn
            nonlocal awaited
            awaited += 1
            synchronize(self)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            event.synchronize = awaiting  # type: ignore[method-assign]
            try:
                yield lambda: awaited + sum("called a synchronizing" in str(each.message) for each in caught)
            finally:
                event.synchronize = synchronize  # type: ignore[method-assign]
                torch.cuda.set_sync_debug_mode(mode)
        return
    num, inside = 0, False

    def counting(call: Any, reads: Callable[..., bool]) -> Any:
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal num, inside
            if inside or not reads(*args):  # what a read is made of is not another one
                return call(*args, **kwargs)
            num, inside = num + 1, True
            try:
                return call(*args, **kwargs)
            finally:
                inside = False

        return counted

    places: list[tuple[Any, str, Callable[..., bool]]] = [(Tensor, "__getitem__", _by_mask)]
    places += [(holder, name, _always) for holder, names in ((Tensor, METHODS), (torch, FUNCTIONS)) for name in names]
    own = [(holder, name, vars(holder).get(name)) for holder, name, _ in places]
    try:
        for holder, name, reads in places:
            setattr(holder, name, counting(getattr(holder, name), reads))
        yield lambda: num
    finally:
        for holder, name, before in own:
            if before is not None:
                setattr(holder, name, before)
            elif name in vars(holder):  # it was inherited
                delattr(holder, name)


def _always(*_: Any) -> bool:
    return True


def _by_mask(_: Tensor, index: Any) -> bool:
    """Does the shape of a tensor with this index depend on values?"""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(each, Tensor) and each.dtype == torch.bool and each.ndim > 0 for each in parts)


@contextlib.contextmanager
def _at_each_end(schedule: Any, over: Callable[[], None]) -> Iterator[None]:
    """Within it `over` is called when a round of a call under this schedule is over: all loops tell the plan."""
    start, plans = schedule.start, []

    def started(*args: Any) -> Any:
        plan = start(*args)
        observe = plan.observe

        def observed(*args: Any) -> None:
            observe(*args)
            over()

        plan.observe = observed
        plans.append(plan)
        return plan

    schedule.start = started
    try:
        yield
    finally:
        del schedule.start
        for plan in plans:
            vars(plan).pop("observe", None)  # a fixed schedule is its own plan


@contextlib.contextmanager
def _profiled(device_type: str) -> Iterator[Any]:
    """The profiler of torch, which writes lines of its own to stderr unless it is told not to before it first runs."""
    name = "KINETO_LOG_LEVEL"
    given = name in os.environ
    os.environ.setdefault(name, "99")
    try:
        with profile(use_device=device_type if device_type == "cuda" else None) as profiler:
            yield profiler
    finally:
        if not given:
            del os.environ[name]


def _launches(profiler: Any, device_type: str) -> int:
    """Between the first mark and the last. From the raw events: to hang them together in a tree takes torch minutes."""
    events = [
        (each.start_ns(), each.start_ns() + each.duration_ns(), each.name())
        for each in profiler.kineto_results.events()
    ]
    marks = [each for each in events if each[2] == MARK]
    first, last = min(end for _, end, _ in marks), max(start for start, _, _ in marks)
    if device_type == "cuda":
        return sum(name.partition("_")[0] in LAUNCHES and first <= start < last for start, _, name in events)
    num, over = 0, first
    for start, end, name in sorted(events, key=lambda each: (each[0], -each[1])):
        if over <= start < last:  # else it is before the first mark, or part of the operation before
            num, over = num + (name != MARK), max(end, start + 1)
    return num
