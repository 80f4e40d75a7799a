"""Rehearse: run an order on real processes and real channels with sleeping compute, and calibrate.

The result shows planned and measured times side by side. From them comes the host time per action, and from a
ping-pong between two ranks the latency and bandwidth of the links. A profile with these three predicts the
next run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from zbcompile.formats.measured_json import Measured
from zbcompile.runtime.distributed_runner import DistributedRunner
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.sleeping import sleeping_stages
from zbcompile.runtime.sleeping_once import SleepingStages
from zbcompile.runtime.spec import PipelineSpec, Step
from zbcompile.schedule.costs import Link, Profile
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import Timeline, simulate
from zbcompile.schedule.stage_actions import update_ns

__all__ = ["Rehearsal", "Row", "rehearse_rank"]

_LARGE = 1 << 21
"""Bytes of the large message."""

_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Row:
    """Planned and measured time of one kind of action on one rank, in ns over the whole step.

    ``kind`` is None for the optimizer's step.
    """

    rank: int
    kind: Kind | None
    count: int
    planned_ns: int
    measured_ns: int


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found. Times in ns.

    Attributes
    ----------
    measured
        The fastest of the steps that ran.
    planned_ns, measured_ns
        Makespan, planned and measured.
    calibrated_ns
        The plan's makespan under ``calibrated``.
    planned_span_ns, measured_span_ns
        Span, planned and measured.
    rows
        Planned and measured times per rank and kind of action.
    calibrated
        The profile with the measured link and host time.
    """

    measured: Measured
    planned_ns: int
    measured_ns: int
    calibrated_ns: int
    planned_span_ns: int
    measured_span_ns: int
    rows: tuple[Row, ...]
    calibrated: Profile

    @property
    def excess(self) -> float:
        """Measured over planned makespan, minus 1."""
        return self.measured_ns / self.planned_ns - 1 if self.planned_ns else 0.0

    @property
    def excess_calibrated(self) -> float:
        """Measured over the makespan that the calibrated profile predicts, minus 1."""
        return self.measured_ns / self.calibrated_ns - 1 if self.calibrated_ns else 0.0


def rehearse_rank(
    group: PipelineGroup, schedule: Schedule, problem: Problem, text: str, *, steps: int
) -> Rehearsal:
    """Do one rank's part of a rehearsal. Every rank returns the same.

    Parameters
    ----------
    group
        The processes, one per rank.
    schedule, problem
        The order and what it was planned for.
    text
        This rank's program.
    steps
        How many steps to run.

    Returns
    -------
    Rehearsal
        Planned against measured, and the calibrated profile.

    Raises
    ------
    PipelineError
        A rank fails, or the ranks differ in schedule or profile.
    """
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    stages = sleeping_stages(problem.profile, device)
    spec = PipelineSpec(stages, schedule.placement, schedule.num_microbatches)
    runner = DistributedRunner(group, spec, text, device)
    best: _Step | None = None
    batch: list[list[torch.Tensor]] = [[] for _ in range(schedule.num_microbatches)]
    once = SleepingStages(problem.profile, schedule.placement.stages_of(group.rank), group.rank)
    runner.sharded = once
    try:
        with group.calls.building("the rehearsal"):
            group.agree({"schedule": str(schedule), "profile": repr(problem.profile)})
            runner.connect()
            link = _measure_link(group)
        for _ in range(steps):
            group.synchronize()
            runner.run(Step(batch), {})
            update_ns = once.update()
            measured = Measured.of(runner.actions(), "rehearsed")
            step = _Step(measured, _updates(group, update_ns, problem))
            if best is None or step.makespan_ns < best.makespan_ns:
                best = step
    finally:
        runner.close()
        once.close()
    assert best is not None
    return _compare(best, simulate(schedule, problem), link)


@dataclass(frozen=True)
class _Step:
    """A step that ran: its actions, and how long each rank's optimizer took."""

    measured: Measured
    updates_ns: tuple[int, ...]

    @property
    def makespan_ns(self) -> int:
        """The last end of all ranks."""
        return max(self._ends())

    @property
    def span_ns(self) -> int:
        """The longest time on one rank from the first start to the last end."""
        begins = [
            min((start for start, _ in self._own(rank)), default=0) for rank in range(len(self._ends()))
        ]
        return max(end - begin for begin, end in zip(begins, self._ends(), strict=True))

    def _own(self, rank: int) -> list[tuple[int, int]]:
        """Return starts and ends of what a rank does itself; it may wait for messages from the beginning."""
        return [(start, end) for a, start, end in self.measured.ranks[rank] if not a.kind.is_message]

    def _ends(self) -> list[int]:
        updates = enumerate(self.updates_ns)
        return [max((end for _, end in self._own(rank)), default=0) + update for rank, update in updates]


def _updates(group: PipelineGroup, own_ns: int, problem: Problem) -> tuple[int, ...]:
    """Return how long every rank's optimizer took; none where it is not planned to take any time."""
    if not any(stage.update_ns for stage in problem.profile.stages):
        return (0,) * group.size
    return tuple(int(text) for text in group.gather(str(own_ns), "the optimizers' steps"))


def _compare(step: _Step, planned: Timeline, link: Link) -> Rehearsal:
    measured = step.measured
    profile = replace(planned.problem.profile, overhead_ns=_host_ns(measured, planned), link=link, links=())
    again = simulate(planned.schedule, planned.problem.with_(profile=profile))
    return Rehearsal(
        measured,
        planned.makespan_ns,
        step.makespan_ns,
        again.makespan_ns,
        planned.span_ns,
        step.span_ns,
        tuple(_rows(step, planned)),
        profile,
    )


def _rows(step: _Step, planned: Timeline) -> list[Row]:
    rows = []
    for rank, entries in enumerate(step.measured.ranks):
        times = _planned_durations(planned, rank)
        for kind in (k for k in Kind if k.is_compute or k in (Kind.UNSHARD, Kind.REDUCE_GRAD)):
            mine = [(a, e - s) for a, s, e in entries if a.kind is kind]
            if mine:
                rows.append(
                    Row(rank, kind, len(mine), sum(times[a] for a, _ in mine), sum(d for _, d in mine))
                )
        if update := update_ns(planned.problem, rank):
            rows.append(Row(rank, None, 1, update, step.updates_ns[rank]))
    return rows


def _planned_durations(planned: Timeline, rank: int) -> dict[Action, int]:
    row = planned.schedule.order[rank]
    return {a: planned.end[rank][k] - planned.start[rank][k] for k, a in enumerate(row)}


def _host_ns(measured: Measured, planned: Timeline) -> int:
    """Return the host time per action: the planned one plus what the actions took beyond the plan.

    That is the median of their excess over the planned duration, plus the median pause to the next action
    where the plan has none and no message is awaited.
    """
    extra, pauses = [], []
    for rank, entries in enumerate(measured.ranks):
        compute = [entry for entry in entries if entry[0].kind.is_compute]
        times = _planned_durations(planned, rank)
        place = {a: k for k, a in enumerate(planned.schedule.order[rank])}
        extra += [e - s - times[a] for a, s, e in compute]
        for (before, _, end), (after, start, _) in zip(compute, compute[1:], strict=False):
            tight = planned.start[rank][place[after]] == planned.end[rank][place[before]]
            if tight and not _receives(after, planned, rank):
                pauses.append(start - end)
    own = planned.problem.profile.overhead_ns
    return own + max(0, int(statistics.median(extra)) + (int(statistics.median(pauses)) if pauses else 0))


def _receives(action: Action, planned: Timeline, rank: int) -> bool:
    """Whether the action waits for a message from another rank."""
    rank_of = planned.schedule.placement.rank_of
    for edge in planned.problem.profile.edges:
        forward = action.kind is Kind.FORWARD and edge.target == action.stage
        backward = (
            action.kind in (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)
            and edge.source == action.stage
            and edge.has_gradient
        )
        other = edge.source if forward else edge.target
        if (forward or backward) and rank_of[other] != rank:
            return True
    return False


def _measure_link(group: PipelineGroup) -> Link:
    """Return the link from rank 0 to rank 1, from the one-way times of a small and a large message."""
    small, large = (_one_way(group, size) for size in (8, _LARGE))
    answer = group.from_first(f"{small} {large}" if group.rank == 0 else None)
    first, second = (int(word) for word in answer.split())
    if second <= first:
        return Link(first)
    return Link(first, (_LARGE - 8) * 1_000_000_000 // (second - first))


def _one_way(group: PipelineGroup, size: int) -> int:
    """Return half of the median round trip of ``size`` bytes in ns; 0 on ranks that take no part."""
    data = torch.zeros(size, dtype=torch.uint8)
    trips: Sequence[int] = ()
    if group.rank < 2:
        other, trips = 1 - group.rank, []
        for _ in range(_ROUNDS):
            begin = time.perf_counter_ns()
            if group.rank == 0:
                group.send(data, other)
                group.receive(data, other)
            else:
                group.receive(data, other)
                group.send(data, other)
            trips.append(time.perf_counter_ns() - begin)
    return int(statistics.median(trips)) // 2 if trips else 0
