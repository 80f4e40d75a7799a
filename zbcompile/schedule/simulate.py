"""The clock: an order and a problem in, times and memory out. No other code computes either.

Span of an order (arXiv 2401.10241, section 2.2): first every action as early as possible, then,
with each rank's end fixed, every first action as late as possible; the span is the longest
distance that remains. Earliest times alone would overstate it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from zbcompile.errors import CheckError
from zbcompile.schedule.event_graph import EventGraph, describe_wait
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.problem import Problem

__all__ = ["Timeline", "memory_after", "memory_peaks", "simulate", "timeline_of"]


@dataclass(frozen=True)
class Timeline:
    """When everything happens, in ns from the first start, and what it holds, in bytes.

    start, end : per rank and position in ``schedule.order``. Communication actions have the times
        of the transfer; compute actions the times on the rank.
    latest_start : per rank, how late its first action may start with all ends kept.
    memory : per rank and position, bytes held right after the action began (F) or ended (others),
        static bytes included.
    """

    schedule: Schedule
    problem: Problem
    start: tuple[tuple[int, ...], ...]
    end: tuple[tuple[int, ...], ...]
    latest_start: tuple[int, ...]
    memory: tuple[tuple[int, ...], ...]

    @cached_property
    def rank_end(self) -> tuple[int, ...]:
        """End of each rank's last compute action."""
        return tuple(
            max((e for a, e in zip(row, ends, strict=True) if a.kind.is_compute), default=0)
            for row, ends in zip(self.schedule.order, self.end, strict=True)
        )

    @cached_property
    def rank_span(self) -> tuple[int, ...]:
        """Per rank: end of the last action minus the latest start of the first."""
        return tuple(e - s for e, s in zip(self.rank_end, self.latest_start, strict=True))

    @property
    def span_ns(self) -> int:
        """The longest rank span: what a step costs when steps may overlap."""
        return max(self.rank_span)

    @property
    def makespan_ns(self) -> int:
        """First start to last end over all ranks: what a step costs with a barrier."""
        return max(self.rank_end)

    @property
    def value_ns(self) -> int:
        """Span or makespan, as the problem's objective says."""
        return self.span_ns if self.problem.objective == "span" else self.makespan_ns

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Highest memory per rank."""
        return tuple(
            max(row, default=self.problem.static_bytes(rank)) for rank, row in enumerate(self.memory)
        )

    @cached_property
    def _busy(self) -> tuple[int, ...]:
        rows = zip(self.schedule.order, self.start, self.end, strict=True)
        return tuple(
            sum(e - s for a, s, e in zip(row, starts, ends, strict=True) if a.kind.is_compute)
            for row, starts, ends in rows
        )

    def busy_ns(self, rank: int) -> int:
        """Time of the rank's compute actions."""
        return self._busy[rank]

    def bubble(self, objective: str | None = None) -> float:
        """1 - (work of the busiest rank) / (span or makespan)."""
        whole = self.span_ns if (objective or self.problem.objective) == "span" else self.makespan_ns
        return 1.0 - max(self._busy) / whole if whole else 0.0


def memory_after(schedule: Schedule, problem: Problem, rank: int) -> list[int]:
    """Bytes held on a rank after each of its actions; M_B counts from the start of F.

    A prefix sum over the order: +M_B at F, -M_B + M_W at B, -M_W at W, -M_B at BW.
    """
    change = {
        Kind.FORWARD: [s.saved_bytes for s in problem.profile.stages],
        Kind.BACKWARD_INPUT: [s.saved_for_weight_bytes - s.saved_bytes for s in problem.profile.stages],
        Kind.BACKWARD_WEIGHT: [-s.saved_for_weight_bytes for s in problem.profile.stages],
        Kind.FULL_BACKWARD: [-s.saved_bytes for s in problem.profile.stages],
    }
    row = schedule.order[rank]
    changes = (change[a.kind][a.stage] if a.kind.is_compute else 0 for a in row)
    return list(accumulate(changes, initial=problem.static_bytes(rank)))[1:]


def memory_peaks(schedule: Schedule, problem: Problem) -> list[int]:
    """Highest memory per rank, from the order alone."""
    return [
        max([problem.static_bytes(rank), *memory_after(schedule, problem, rank)])
        for rank in range(schedule.num_ranks)
    ]


def simulate(schedule: Schedule, problem: Problem) -> Timeline:
    """Times of an order under a problem's costs, links and transport.

    A compute-only schedule is timed with sends that leave as soon as they can (``async``); for the
    other transports it is lowered first, and the timeline's schedule is the lowered one. Raises
    `CheckError` with the chain of waits when no rank can go on.
    """
    return timeline_of(EventGraph.of(schedule, problem))


def timeline_of(graph: EventGraph) -> Timeline:
    """The times of a graph's schedule. Raises `CheckError` with the chain of waits when it has a cycle."""
    early = graph.earliest()
    if early is None:
        raise CheckError(
            "deadlock: " + describe_wait(graph), fix="reorder the actions named; `zbcompile check` shows all"
        )
    schedule, problem, ranks = graph.schedule, graph.problem, range(graph.schedule.num_ranks)
    late = graph.latest_first_starts(early)
    times = [graph.times(rank, early) for rank in ranks]
    memory = tuple(tuple(memory_after(schedule, problem, rank)) for rank in ranks)
    start, end = tuple(s for s, _ in times), tuple(e for _, e in times)
    return Timeline(schedule, problem, start, end, tuple(late), memory)


def action_times(timeline: Timeline) -> dict[Action, tuple[int, int]]:
    """(start, end) of every action."""
    return {a: (timeline.start[r][k], timeline.end[r][k]) for r, k, a in timeline.schedule.actions()}
