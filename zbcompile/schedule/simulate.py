"""The simulator: it takes an order and a problem and gives times and memory.

Times count the whole step: gathers before the first F's, reductions of gradients and the optimizer's step
after the last W's (`zbcompile.schedule.stage_actions`).

Span of an order (arXiv 2401.10241, section 2.2): first every action starts as early as possible; then, with
each rank's end fixed, every rank's first action starts as late as possible. The span is the longest distance
that remains. Earliest times alone would overstate it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zbcompile.errors import CheckError
from zbcompile.schedule.communication import lowered
from zbcompile.schedule.event_graph import EventGraph, describe_wait
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.memory import memory_after, memory_peaks
from zbcompile.schedule.problem import Objective, Problem
from zbcompile.schedule.stage_actions import update_ns

__all__ = ["Timeline", "simulate", "timeline_of"]


@dataclass(frozen=True)
class Timeline:
    """When every action happens and how much memory the ranks hold.

    Attributes
    ----------
    schedule, problem
        The order that was timed, and under what costs. A compute-only order that the send mode has lowered
        is the lowered one here.
    start, end
        Per rank and position in ``schedule.order``, in ns from the first start. Communication actions have
        the times of the transfer, actions of a stage as a whole those on their channel; compute actions have
        the times on the rank.
    rank_end
        Per rank, when its last action, its last reduction and its update have ended, in ns.
    latest_start
        Per rank, how late its first F or UNSHARD may start with all ends kept, in ns.
    memory
        Per rank and position, bytes held right after the action began (F) or ended (others), static bytes
        included (`zbcompile.schedule.memory`).
    """

    schedule: Schedule
    problem: Problem
    start: tuple[tuple[int, ...], ...]
    end: tuple[tuple[int, ...], ...]
    rank_end: tuple[int, ...]
    latest_start: tuple[int, ...]
    memory: tuple[tuple[int, ...], ...]

    @cached_property
    def compute_end(self) -> tuple[int, ...]:
        """End of each rank's last compute action, in ns."""
        return tuple(
            max((e for a, e in zip(row, ends, strict=True) if a.kind.is_compute), default=0)
            for row, ends in zip(self.schedule.order, self.end, strict=True)
        )

    def exposed_ns(self, rank: int) -> int:
        """Return how long a rank waits for reductions after its last compute action, before its update."""
        return self.rank_end[rank] - update_ns(self.problem, rank) - self.compute_end[rank]

    @cached_property
    def rank_span(self) -> tuple[int, ...]:
        """Per rank, its end minus the latest start of its first action, in ns."""
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
        return self.length_ns(self.problem.objective)

    def length_ns(self, objective: Objective) -> int:
        """Return the span or the makespan."""
        return self.span_ns if objective == "span" else self.makespan_ns

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Highest memory per rank, in bytes."""
        return tuple(memory_peaks(self.schedule, self.problem))

    @cached_property
    def _busy(self) -> tuple[int, ...]:
        rows = zip(self.schedule.order, self.start, self.end, strict=True)
        return tuple(
            sum(e - s for a, s, e in zip(row, starts, ends, strict=True) if a.kind.is_compute)
            for row, starts, ends in rows
        )

    def busy_ns(self, rank: int) -> int:
        """Return the time of the rank's compute actions."""
        return self._busy[rank]

    def bubble(self, objective: Objective | None = None) -> float:
        """Return 1 - (work of the busiest rank) / (span or makespan).

        Parameters
        ----------
        objective
            Which of the two; the problem's objective if left out.
        """
        whole = self.length_ns(objective or self.problem.objective)
        return 1.0 - max(self._busy) / whole if whole else 0.0


def simulate(schedule: Schedule, problem: Problem) -> Timeline:
    """Return the times of an order under a problem's costs, links and send mode.

    Under ``async`` the messages of a compute-only order leave as soon as they can. Under the other send modes
    such an order is lowered first, and the timeline's schedule is the lowered one.

    Raises
    ------
    CheckError
        An action is missing or occurs twice, or the order deadlocks; then the message is the chain of waits.
    """
    return timeline_of(EventGraph(lowered(schedule, problem), problem))


def timeline_of(graph: EventGraph) -> Timeline:
    """Return the times of an event graph's schedule.

    Raises
    ------
    CheckError
        The graph has a cycle; the message is the chain of waits.
    """
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
    return Timeline(schedule, problem, start, end, tuple(graph.rank_ends(early)), tuple(late), memory)
