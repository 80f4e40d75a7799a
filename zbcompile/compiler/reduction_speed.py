"""How long stages take to sum gradients over replicas, and to gather weights that replicas share.

Measured on all ranks at once, with the calls that a step makes, or counted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from zbcompile.compiler.peers import reduced_stages, sharded_stages
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.runtime.channels.replicas import Replicas
from zbcompile.runtime.channels.sharded import ShardedStages
from zbcompile.runtime.gradients import sum_dtype, tied_holders
from zbcompile.runtime.group import PipelineGroup
from zbcompile.schedule.costs import Link, Profile

__all__ = ["StepSpeeds", "Timing", "counted_speeds", "measured_speeds", "with_step_times"]

_SMALL, _LARGE, _TRIES = 1 << 10, 4 << 20, 3
"""Bytes of the two stages that are timed, and how often each."""

_Call = Callable[[int], None]
"""Does something of a step for so many bytes, and returns when it is done."""


@dataclass(frozen=True)
class Timing:
    """Time of something by its bytes: ``latency_ns`` and ``ps_per_byte`` picoseconds for each."""

    latency_ns: int
    ps_per_byte: int

    def ns(self, num_bytes: int) -> int:
        """Return the time for so many bytes, in ns; at least 1, so that it is an action."""
        return max(1, self.latency_ns + num_bytes * self.ps_per_byte // 1000)


@dataclass(frozen=True)
class StepSpeeds:
    """What replicas do once a step.

    Attributes
    ----------
    reduce
        A sum of gradients over the replicas, by the bytes of the whole gradients; where replicas share
        weights it is scattered.
    gather
        A gather of weights that replicas share, by the bytes of the whole weights.
    """

    reduce: Timing
    gather: Timing


def counted_speeds(link: Link, num_shards: int, num_copies: int) -> StepSpeeds:
    """Return the times on rings of devices.

    A gather, and a sum that is scattered, takes every byte but those of one part over each link once; a sum
    over copies of a part takes the bytes of the part nearly twice.
    """
    around, again = num_shards - 1, 2 * (num_copies - 1)
    second = link.transfer_ns(1_000_000) - link.latency_ns  # of a million bytes
    gather = Timing(around * link.latency_ns, around * second // (num_shards * 1000))
    part = again * second // (num_copies * num_shards * 1000)
    return StepSpeeds(Timing(gather.latency_ns + again * link.latency_ns, gather.ps_per_byte + part), gather)


def measured_speeds(group: PipelineGroup, device: torch.device) -> StepSpeeds:
    """Time sums and gathers of all ranks at once, as at the end of a step: the slowest rank decides.

    All ranks come here, and get the same answer.
    """
    if len(group.shards) == 1:
        return StepSpeeds(_measured_sum(group, device), Timing(0, 0))
    whole = {size: {"": nn.Parameter(torch.zeros(size // 4, device=device))} for size in (_SMALL, _LARGE)}
    stages = ShardedStages(group, whole, device)
    group.watchdog.on_end.append(stages.abandon)

    def gather(size: int) -> None:
        stages.unshard(size).wait()

    def scatter(size: int) -> None:
        stages.reduce(size, {"": torch.zeros(size // 4, device=device)}).wait()

    try:
        found = _timed(
            group, device, {"a gather": gather, "a sum that is scattered": scatter}, stages.reshard
        )
    finally:
        group.watchdog.on_end.remove(stages.abandon)
        stages.close()
    return StepSpeeds(found["a sum that is scattered"], found["a gather"])


def _measured_sum(group: PipelineGroup, device: torch.device) -> Timing:
    """Return the time of a sum over replicas that have all weights."""
    replicas = Replicas(group, device)

    def abandon(fatal: bool) -> None:
        replicas.abandon()

    def reduce(size: int) -> None:
        replicas.start((0, "timed"), {"": torch.zeros(size // 4, device=device)}).wait()

    group.watchdog.on_end.append(abandon)
    try:
        return _timed(group, device, {"a sum": reduce})["a sum"]
    finally:
        group.watchdog.on_end.remove(abandon)
        replicas.close()


def _timed(
    group: PipelineGroup,
    device: torch.device,
    calls: Mapping[str, _Call],
    after: Callable[[int], object] = lambda size: None,
) -> dict[str, Timing]:
    """Time calls one after the other for each size, then call ``after``; return the times, alike on all."""

    def run() -> list[list[int]]:
        rows = []
        for size in (_SMALL, _LARGE):
            tries = []
            for _ in range(_TRIES):
                tries.append([_once(call, size, device) for call in calls.values()])
                after(size)
            rows.append([min(times) for times in zip(*tries, strict=True)])
        return rows

    own = group.alone(run, f"times {' and '.join(calls)} over the replicas")
    told = [json.loads(text) for text in group.gather(json.dumps(own), "the times of sums over replicas")]
    found = {}
    for k, name in enumerate(calls):
        small, large = (max(rows[size][k] for rows in told) for size in range(2))
        found[name] = Timing(small, max(0, large - small) * 1000 // (_LARGE - _SMALL))
    return found


def _once(call: _Call, size: int, device: torch.device) -> int:
    """Return how long a call takes, in ns."""
    begin = time.perf_counter_ns()
    call(size)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() - begin


def with_step_times(
    profile: Profile,
    staged: StagedModel,
    group: PipelineGroup | None,
    speeds: StepSpeeds,
    dtype: torch.dtype | None,
) -> Profile:
    """Return the profile with the times in which stages sum their gradients and gather their weights.

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
        stages[index] = replace(stages[index], reduce_ns=speeds.reduce.ns(size))
    for index in sharded_stages(staged, group):
        size = sum(state[name].nbytes for name in staged.stages[index].parameters)
        stages[index] = replace(stages[index], unshard_ns=speeds.gather.ns(size))
    return replace(profile, stages=tuple(stages))
