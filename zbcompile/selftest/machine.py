"""The few lines that differ between a CPU and a GPU: which device, its clock, its bytes in use, its name."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable

import torch

import zbcompile

__all__ = ["bytes_in_use", "device_of", "free_cached", "num_devices", "settle", "timed_ns", "versions"]


def num_devices(kind: str) -> int:
    """Return how many ranks can have a device of their own; a CPU counts as two."""
    return torch.cuda.device_count() if kind == "cuda" else 2


def device_of(kind: str, rank: int = 0) -> torch.device:
    """Return a rank's device and make it the current one; ranks share the last where they are too few."""
    if kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", min(rank, torch.cuda.device_count() - 1))
    torch.cuda.set_device(device)
    return device


def settle(device: torch.device) -> None:
    """Return when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_ns(device: torch.device, call: Callable[[], object]) -> int:
    """Return the time of a call on the device, from idle to idle."""
    settle(device)
    begin = time.perf_counter_ns()
    call()
    settle(device)
    return time.perf_counter_ns() - begin


def bytes_in_use(device: torch.device) -> int:
    """Return the bytes that the device's allocator has handed out and not got back.

    On a GPU torch's own allocator is asked, which counts in blocks of 512 bytes; on a CPU the C allocator
    (glibc 2.33 or later).
    """
    settle(device)
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _of_the_c_allocator()


def free_cached(device: torch.device) -> None:
    """Give back memory that the allocator keeps for later, and forget the peak so far."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def versions(kind: str) -> dict[str, object]:
    """Return what a report says of the machine."""
    found: dict[str, object] = {
        "zbcompile": zbcompile.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cores": os.cpu_count() or 0,
        "devices": num_devices(kind),
    }
    if kind != "cuda":
        found["note"] = "on a CPU; no time or ratio here says anything about a GPU, only the lines are tested"
    else:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device_name": properties.name,
            "device_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        }
    return found


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2: ten counters."""

    _fields_ = [(f"counter_{i}", ctypes.c_size_t) for i in range(10)]


def _of_the_c_allocator() -> int:
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Mallinfo
    info = library.mallinfo2()
    return int(info.counter_7 + info.counter_4)  # in arenas, in pages of their own
