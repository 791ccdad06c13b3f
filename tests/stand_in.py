"""Stand-ins for a CUDA device and its graphs, where there is neither: what code for one does wrong shows up on a CPU.

`Device`: tensors that say they are on CUDA and are computed on the CPU. Mixing them with the host's raises what CUDA raises; what
makes the host wait for a device is counted; and while a graph is captured, waiting and uploading are errors. `Replayed`: a program
as a graph has it, operations over buffers without Python. Neither knows kernels, streams, memory or speed.
"""

import contextlib
import time
import warnings

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from specplug import graphs

CUDA = torch.device("cuda", 0)
# What looks at values to know how large its result is, or whether its input is allowed.
WAITING = ("nonzero", "masked_select", "unique", "multinomial", "repeat_interleave.Tensor", "bincount")
MOVING = ("aten._to_copy", "aten.copy_", "aten.to.", "aten.index.", "aten.index_put", "aten._index_put_impl_")


class OnDevice(torch.Tensor):
    """Holds a tensor of the host in `inner`. For torch's own code it is a meta tensor, since a build for CPUs knows no CUDA."""

    def __new__(cls, inner):
        with torch.inference_mode(False):  # in it views cannot be made of what was made outside
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device="meta",
            )
        made.inner = inner
        return made

    def __init__(self, inner):
        pass

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    def __repr__(self):
        return f"OnDevice({self.inner})"

    def tolist(self):
        Device.current.wait("tolist")
        return self.inner.tolist()

    def new_tensor(self, values, dtype=None):
        return torch.tensor(values, dtype=dtype or self.dtype, device=CUDA)

    def __getitem__(self, index):
        return OnDevice(self.inner[self._on_host(index)])

    def __setitem__(self, index, value):
        if isinstance(value, torch.Tensor) and not isinstance(value, OnDevice):
            Device.current.upload("setitem", value, non_blocking=False)
        self.inner[self._on_host(index)] = _inner(value)

    def _on_host(self, index):
        for each in index if isinstance(index, tuple) else (index,):
            if isinstance(each, list):
                Device.current.wait("an index that is a list")
            elif isinstance(each, OnDevice) and each.dtype == torch.bool:
                Device.current.wait("a mask as index")
            elif isinstance(each, torch.Tensor) and not isinstance(each, OnDevice):
                Device.current.upload("index", each, non_blocking=False)
        return tuple(map(_inner, index)) if isinstance(index, tuple) else _inner(index)

    def data_ptr(self):
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return Device.current.run(function, args, kwargs or {})


def _inner(each):
    return each.inner if isinstance(each, OnDevice) else torch.device("cpu") if isinstance(each, torch.device) else each


def _each(change, given):
    """`change` of each argument or result of an operation, lists, tuples and a dict of them as well. torch's tree_map does the
    same for whatever else holds tensors, and takes most of a test's time."""
    if type(given) in (list, tuple):
        return type(given)([_each(change, each) for each in given])
    if type(given) is dict:
        return {key: _each(change, each) for key, each in given.items()}
    return change(given)


def _leaves(given):
    found = []
    _each(found.append, given)
    return found


class Event:
    """What was copied to pinned memory before it is there once it was waited for, and not before."""

    def __init__(self, enable_timing=False):
        self.timed, self.arriving, self.at = enable_timing, [], None

    def record(self, stream=None):
        self.arriving, Device.current.arriving = Device.current.arriving, []
        self.at = time.perf_counter()

    def synchronize(self):
        assert self.at is not None
        Device.current.wait("an event", warn=False)
        while self.arriving:
            to, values = self.arriving.pop()
            to.copy_(values)

    def wait(self, stream):
        assert self.at is not None  # the device waits, not the host

    def elapsed_time(self, end):
        assert self.timed and end.timed and end.at >= self.at
        return 1e3 * (end.at - self.at)


class HostGenerator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls)


def _pinned(tensor):
    pinned = tensor.clone()
    pinned.is_pinned_for_stand_in = True
    return pinned


def _is_pinned(tensor):
    return getattr(tensor, "is_pinned_for_stand_in", False)


class Device(TorchDispatchMode):
    """Within it there is a CUDA device, for this thread. `waits`: why the host waited for it, one entry each time."""

    current = None

    def __init__(self):
        super().__init__()
        self.waits, self.capturing, self.debug_mode = [], False, 0
        self.arriving = []  # pinned memory that is being copied to, and what will be in it
        self._restore = contextlib.ExitStack()

    def __enter__(self):
        if Device.current is not self:
            self._restore.callback(setattr, Device, "current", Device.current)
            Device.current = self
            self._patch(torch.cuda, "_lazy_init", lambda: None)
            for name, value in (
                ("synchronize", None), ("get_device_name", "a stand-in"), ("max_memory_allocated", 0), ("reset_peak_memory_stats", None)
            ):  # fmt: skip
                self._patch(torch.cuda, name, lambda *_, value=value: value)
            self._patch(torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state())
            self._patch(torch, "Generator", HostGenerator)
            self._patch(torch.cuda, "Event", Event)
            self._patch(torch.cuda, "current_stream", lambda *_: None)
            self._patch(torch.cuda, "device", lambda *_: contextlib.nullcontext())
            self._patch(torch.cuda, "get_sync_debug_mode", lambda: self.debug_mode)
            self._patch(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(self, "debug_mode", mode))
            self._patch(nn.Module, "to", self._moving(nn.Module.to))
            self._patch(torch.Tensor, "pin_memory", _pinned)
            self._restore.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
            torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(..., device=) goes by here
            before = graphs.GRAPHS["cuda"]
            self._restore.callback(graphs.GRAPHS.__setitem__, "cuda", before)
            graphs.GRAPHS["cuda"] = self._graph
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        if not self.capturing:
            self._restore.close()

    def _patch(self, holder, name, value):
        self._restore.callback(setattr, holder, name, getattr(holder, name))
        setattr(holder, name, value)

    def _moving(self, to):
        def moved(module, *args, **kwargs):
            if any(str(each).startswith("cuda") for each in (*args, *kwargs.values())):
                return self.put(module)
            return to(module, *args, **kwargs)

        return moved

    def _graph(self, program, device, shared):
        return Replayed(program, device, shared, within=self)

    @contextlib.contextmanager
    def capture(self):
        """What is within comes by here first, and by what was entered before only as it is computed."""
        self.capturing = True
        try:
            with self:
                yield
        finally:
            self.capturing = False

    def put(self, model):
        """The model, on the device from now on."""
        for module in model.modules():
            for name, each in module._parameters.items():
                if each is not None:
                    module._parameters[name] = nn.Parameter(OnDevice(each.detach()), requires_grad=False)
            for name, each in module._buffers.items():
                if each is not None:
                    module._buffers[name] = OnDevice(each)
        return model

    def wait(self, reason, warn=True):
        if self.capturing:
            raise RuntimeError(f"operation not permitted when stream is capturing: {reason}")
        self.waits.append(reason)
        if self.debug_mode == "warn" and warn:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    def upload(self, name, tensor, non_blocking):
        if self.capturing:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name} of the host's tensor")
        if not (non_blocking and _is_pinned(tensor)):
            self.wait(f"{name} of the host's tensor")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.run(function, args, kwargs or {})

    def run(self, function, args, kwargs):
        name, leaves = str(function), _leaves((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        held = [each for each in tensors if isinstance(each, OnDevice)]
        hosts = [each for each in tensors if not isinstance(each, OnDevice) and each.dim() > 0]
        named = next((each.type for each in leaves if isinstance(each, torch.device)), None)
        on_device = bool(held) if named is None else named in ("cuda", "meta")
        if name.startswith("aten.copy_"):
            on_device = isinstance(args[0], OnDevice)
        if held and hosts and not name.startswith(MOVING):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got cuda:0 and cpu")
        summed = held and name.startswith("aten.cumsum") and (kwargs.get("dtype") or args[0].dtype)
        if summed and summed.is_floating_point and torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        if name.startswith("aten.copy_") and held and not on_device and args[2:] == (True,) and _is_pinned(args[0]):
            self.arriving.append((args[0], args[1].inner.clone()))
            return args[0].fill_(-7)  # what is there meanwhile is nothing to go by
        if on_device and hosts:
            self.upload(name, hosts[0], kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))
        elif held and (not on_device or any(each in name for each in WAITING)):
            self.wait(name)
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        made = function(*_each(_inner, args), **_each(_inner, kwargs))
        if held and any(isinstance(each, bool | int | float) for each in _leaves(made)):
            self.wait(name)
        if not on_device:
            return made
        known = {id(each.inner): each for each in held}

        def outside(each):
            if not isinstance(each, torch.Tensor):
                return each
            return known[id(each)] if id(each) in known else OnDevice(each)

        return _each(outside, made)


class Recorder(TorchDispatchMode):
    """Writes down which operations are run on which tensors. As with a graph, nothing may be read meanwhile."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        made = function(*args, **(kwargs or {}))
        self.steps.append((function, args, kwargs or {}, made))
        return made


class Replayed:
    """A program as a graph would have it: the same operations on the same buffers, and nothing of Python."""

    made = 0
    replays = 0

    def __init__(self, program, device, shared, within=None):
        program()
        with Recorder() as recorder, contextlib.nullcontext() if within is None else within.capture():
            program()
        self.steps = recorder.steps
        Replayed.made += 1

    def __call__(self):
        made = {}  # what the recording made -> what this replay makes
        for function, args, kwargs, outputs in self.steps:
            given, named = _each(lambda each: made.get(id(each), each), (args, kwargs))
            for old, each in zip(_leaves(outputs), _leaves(function(*given, **named)), strict=True):
                if isinstance(old, torch.Tensor):
                    made[id(old)] = each
        Replayed.replays += 1
