"""Seconds of work on a device. One that works while the host goes on is waited for before the clock is read."""

import time

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device, wait: bool) -> float:
    """`wait`: for the device, so that what was asked of it before is in the time. Costs overlap."""
    if wait:
        synchronize(device)
    return time.perf_counter()
