"""How long a sum of gradients over replicas takes: measured on all ranks at once, or counted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from zbcompile.compiler.peers import reduced_stages
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.runtime.channels.replicas import Replicas
from zbcompile.runtime.gradients import sum_dtype, tied_holders
from zbcompile.runtime.group import PipelineGroup
from zbcompile.schedule.costs import Link, Profile

__all__ = ["ReductionSpeed", "counted_reduction", "measured_reduction", "with_reductions"]

_SMALL, _LARGE, _TRIES = 1 << 10, 4 << 20, 3
"""Bytes of the two sums that are timed, and how often each."""


@dataclass(frozen=True)
class ReductionSpeed:
    """Time of a sum over replicas: ``latency_ns`` and ``ps_per_byte`` picoseconds for each byte."""

    latency_ns: int
    ps_per_byte: int

    def ns(self, num_bytes: int) -> int:
        """Return the time of a sum of so many bytes, in ns; at least 1, so that it is an action."""
        return max(1, self.latency_ns + num_bytes * self.ps_per_byte // 1000)


def counted_reduction(link: Link, num_replicas: int) -> ReductionSpeed:
    """Return the time of a sum in a ring of devices: every byte goes over each link nearly twice."""
    trips = 2 * (num_replicas - 1)
    second = link.transfer_ns(1_000_000) - link.latency_ns
    return ReductionSpeed(trips * link.latency_ns, trips * second // (num_replicas * 1000))


def measured_reduction(group: PipelineGroup, device: torch.device) -> ReductionSpeed:
    """Time sums over the replicas of all ranks at once, as at the end of a step: the slowest rank decides.

    All ranks come here, and get the same answer.
    """
    replicas = Replicas(group, device)

    def abandon(fatal: bool) -> None:
        replicas.abandon()

    group.watchdog.on_end.append(abandon)
    try:
        times = []
        for size in (_SMALL, _LARGE):
            sums = {"": torch.zeros(size // 4, device=device)}
            times.append(group.alone(_best(replicas, sums, device), "times a sum over the replicas"))
    finally:
        group.watchdog.on_end.remove(abandon)
        replicas.close()
    everyone = [
        json.loads(text) for text in group.gather(json.dumps(times), "the times of sums over replicas")
    ]
    small, large = (max(row[k] for row in everyone) for k in range(2))
    return ReductionSpeed(small, max(0, large - small) * 1000 // (_LARGE - _SMALL))


def _best(replicas: Replicas, sums: dict[str, torch.Tensor], device: torch.device) -> Callable[[], int]:
    """Return a function that sums a few times, and returns the shortest time in ns."""

    def run() -> int:
        times = []
        for _ in range(_TRIES):
            begin = time.perf_counter_ns()
            replicas.start((0, "timed"), sums).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter_ns() - begin)
        return min(times)

    return run


def with_reductions(
    profile: Profile,
    staged: StagedModel,
    group: PipelineGroup | None,
    speed: ReductionSpeed,
    dtype: torch.dtype | None,
) -> Profile:
    """Return the profile with the times in which stages sum their gradients over replicas.

    Tied parameters are left out: they are summed at the end of the step, after their stages.

    Parameters
    ----------
    dtype
        What gradients of narrower parameters are summed in; None: their own dtype.
    """
    state, stages = staged.captured.state, list(profile.stages)
    tied = tied_holders([stage.trainable for stage in staged.stages])
    for index in reduced_stages(staged, group):
        own = [state[name] for name in staged.stages[index].trainable if name not in tied]
        size = sum(t.numel() * sum_dtype(t, dtype).itemsize for t in own)
        stages[index] = replace(stages[index], reduce_ns=speed.ns(size))
    return replace(profile, stages=tuple(stages))
