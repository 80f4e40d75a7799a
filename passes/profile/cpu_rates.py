"""Measure the rates of this CPU, for counted costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from zbcompile.schedule.devices import DEVICES, Device

__all__ = ["measure_cpu"]

_SLOW: dict[str, Callable[[Tensor], object]] = {
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "erf": torch.erf,
    "cos": torch.cos,
    "sin": torch.sin,
    "_softmax": lambda x: torch.softmax(x, -1),
    "native_dropout": lambda x: torch.native_dropout(x, 0.1, True),
    "rand": torch.rand_like,
}
"""Element-wise functions that are bounded neither by bandwidth nor by the matrix rate."""


def measure_cpu(repeats: int = 7) -> Device:
    """Return the CPU entry of the table with rates measured now, on torch's present number of threads.

    Matrix rate: a 768 x 768 float32 product; bandwidth: one read and one write of 32 MB;
    launch: an addition of one element; slow functions: 256 K elements each.

    Parameters
    ----------
    repeats
        Runs of each after one warm-up; the median counts.
    """
    left = torch.ones(768, 768)
    block = torch.ones(8 << 20)
    target = torch.empty_like(block)
    one, values = torch.ones(1), torch.ones(1 << 10, 1 << 8)
    matrix = _median_ns(lambda: torch.mm(left, left), repeats)
    copy = _median_ns(lambda: target.copy_(block), repeats)
    launch = _median_ns(lambda: [torch.add(one, one) for _ in range(100)], repeats) // 100
    base = DEVICES["CPU"]
    rate = 2 * 768**3 * 10**9 // matrix
    rates = {**base.flops_per_second, "float32": rate, "float64": rate // 2}
    return replace(
        base,
        flops_per_second=rates,
        bytes_per_second=2 * block.nbytes * 10**9 // copy,
        launch_ns=launch,
        source=f"measured on this CPU with {torch.get_num_threads()} thread(s)",
        element_ps={
            name: _median_ns(partial(work, values), repeats) * 1000 // values.numel()
            for name, work in _SLOW.items()
        },
    )


def _median_ns(work: Callable[[], object], repeats: int) -> int:
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - begin)
    return max(1, int(statistics.median(times)))
