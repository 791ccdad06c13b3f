"""What the host asks of a device beside its work: numbers from it, and how long passes take, without more waiting than that needs.

Knows tensors and events, no models.
"""

import time
from typing import Any

import torch
from torch import Tensor


class Read:
    """Values on their way to the host: those of the device's work so far, whatever it is given to do before they are asked for."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.arrived: Any = None
        if values.device.type == "cuda":
            self.values = torch.empty(values.shape, dtype=values.dtype).pin_memory()
            self.values.copy_(values, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(values.device))

    def tolist(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        found: list[int] = self.values.tolist()
        return found


class Clock:
    """Seconds that passes take. On CUDA, if `exact`, the device's own, by events among its operations; else the host's, which there
    are no more than those of asking."""

    def __init__(self, device: torch.device, exact: bool) -> None:
        self.device = device if exact and device.type == "cuda" else None
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []  # that the device may not have come to yet

    def now(self) -> Any:
        if self.device is None:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def add(self, began: Any, without: float = 0.0) -> None:
        """What has passed since `began`, which `now` gave, but for so many seconds."""
        ended = self.now()
        self._seconds -= without
        if self.device is None:
            self._seconds += ended - began
        else:
            self._events.append((began, ended))

    @property
    def seconds(self) -> float:
        """All that was added. Waits for the device."""
        for began, ended in self._events:
            ended.synchronize()
            self._seconds += began.elapsed_time(ended) / 1e3  # milliseconds
        self._events.clear()
        return self._seconds
