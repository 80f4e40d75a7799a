"""Stages that only sleep: the planned times and message sizes of a profile, without a model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from zbcompile.runtime.wiring import Saved
from zbcompile.schedule.costs import Profile

__all__ = ["Sleeping", "SleepingPort", "sleep_ns", "sleeping_stages"]

_SLEEP_NS, _SLEEPS = 10_000_000, 15


@dataclass(frozen=True, slots=True)
class SleepingPort:
    """A message of some bytes; the fields are those of `PortLike`."""

    name: str
    shape: tuple[int, ...]
    has_gradient: bool
    source: tuple[str, int]
    targets: tuple[int, ...] = ()
    device: torch.device = torch.device("cpu")
    stride: tuple[int, ...] = (1,)
    grad_stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    is_result: bool = False
    is_loss: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the message."""
        return self.shape[0]


class Sleeping:
    """One stage of a profile: F, B, W and BW sleep as long as planned; messages have the planned size.

    A message of no bytes is sent as one byte: channels need not wait for an empty tensor.
    """

    trainable: tuple[str, ...] = ()

    def __init__(self, index: int, profile: Profile, device: torch.device) -> None:
        self.index, self.cost = index, profile.stages[index]
        came = [e for e in profile.edges if e.target == index]
        left = [e for e in profile.edges if e.source == index]
        self.inputs = tuple(
            SleepingPort(
                f"{e.source}to{index}",
                (max(1, e.backward_bytes),),
                e.has_gradient,
                ("stage", e.source),
                device=device,
            )
            for e in came
        )
        self.outputs = tuple(
            SleepingPort(
                f"{index}to{e.target}",
                (max(1, e.forward_bytes),),
                e.has_gradient,
                ("stage", index),
                (e.target,),
                device=device,
            )
            for e in left
        )
        self._made = [torch.zeros(p.shape, dtype=p.dtype, device=device) for p in self.outputs]
        self._returned = [
            torch.zeros(p.shape, dtype=p.dtype, device=device) if p.has_gradient else None
            for p in self.inputs
        ]

    def run_forward(self, state: Mapping[str, Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], Saved]:
        """Sleep as long as F."""
        sleep_ns(self.cost.forward_ns)
        return list(self._made), []

    def run_backward_input(
        self, saved: Saved, output_grads: list[Tensor | None]
    ) -> tuple[list[Tensor | None], Saved]:
        """Sleep as long as B."""
        sleep_ns(self.cost.backward_input_ns)
        return list(self._returned), []

    def run_backward_weight(self, saved: Saved) -> dict[str, Tensor]:
        """Sleep as long as W."""
        sleep_ns(self.cost.backward_weight_ns)
        return {}

    def run_full_backward(
        self, saved: Saved, output_grads: list[Tensor | None]
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Sleep as long as BW."""
        sleep_ns(self.cost.full_backward_ns)
        return list(self._returned), {}


def sleep_ns(duration_ns: int) -> None:
    """Sleep for a duration, less what this machine oversleeps."""
    if duration_ns:
        time.sleep(max(0, duration_ns - _oversleep_ns()) / 1e9)


@cache
def _oversleep_ns() -> int:
    """Return how much longer than asked this process sleeps: the median, so half of all sleeps end late."""
    extra = []
    for _ in range(_SLEEPS):
        begin = time.perf_counter_ns()
        time.sleep(_SLEEP_NS / 1e9)
        extra.append(time.perf_counter_ns() - begin - _SLEEP_NS)
    return max(0, int(statistics.median(extra)))


def sleeping_stages(profile: Profile, device: torch.device) -> tuple[Sleeping, ...]:
    """Return all stages of a profile."""
    _oversleep_ns()
    return tuple(Sleeping(k, profile, device) for k in range(profile.num_stages))
