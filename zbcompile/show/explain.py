"""The facts behind an order: what `zbcompile explain` says in words and with ``--json``.

Nothing is solved. Times, memory and waits come from the clock, the rule for memory and
`zbcompile.schedule.waits`; the certificate's sum is derived again by `zbcompile.planner.certify` where no
solver is needed for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zbcompile.errors import InfeasibleError, UsageError
from zbcompile.formats.measured_json import Measured
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.schedule.communication import lowered
from zbcompile.schedule.critical_path import critical_path
from zbcompile.schedule.event_graph import EventGraph
from zbcompile.schedule.ir import Kind
from zbcompile.schedule.least_memory import check_caps, least_headroom
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import Timeline, timeline_of
from zbcompile.schedule.wait_roots import Stretch, stretches
from zbcompile.schedule.waits import Waits
from zbcompile.show.bubbles import Bubble, Moment, longest_bubbles, moments_at
from zbcompile.show.proof_words import ProofWords, proof_words
from zbcompile.show.rank_facts import RankFacts, facts_of
from zbcompile.show.summary import kind_means, unit_problem
from zbcompile.show.units import TimeUnit, time_unit

__all__ = ["Explanation", "Real", "explained"]

_MOST_LEAST_CAPS = 512
"""Most stages for which the least caps are looked for: beyond, that takes longer than reading the file."""


@dataclass(frozen=True, slots=True)
class Real:
    """What was measured of the step.

    Attributes
    ----------
    makespan_ns
        First start to last end.
    busy_ns
        Per rank, its computing.
    kinds
        Per kind of action (kind, mean planned ns, mean measured ns, count).
    """

    makespan_ns: int
    busy_ns: tuple[int, ...]
    kinds: tuple[tuple[Kind, int, int, int], ...]


@dataclass(frozen=True)
class Explanation:
    """An order with the reasons for its length.

    Attributes
    ----------
    file, timeline
        The order, its problem and its certificate, and its times.
    proof
        The certificate in words; None without one.
    deciding
        The ranks that decide the step.
    path
        The critical path of the first of them.
    ranks
        Facts per rank.
    bubbles
        The longest pauses between two actions, longest first.
    moments
        What ranks do at the time asked about.
    least_caps
        Per rank, the bytes that no order runs without; None where they are not known.
    least_cap_works
        Whether some order runs with the most of them as the cap of all ranks.
    measured
        What the step really cost, where that was measured.
    """

    file: ScheduleFile
    timeline: Timeline
    proof: ProofWords | None
    deciding: tuple[int, ...]
    path: tuple[Stretch, ...]
    ranks: tuple[RankFacts, ...]
    bubbles: tuple[Bubble, ...]
    moments: tuple[Moment, ...]
    least_caps: tuple[int, ...] | None
    least_cap_works: bool
    measured: Real | None

    @property
    def problem(self) -> Problem:
        """The problem that the order was timed under."""
        return self.timeline.problem

    @property
    def has_costs(self) -> bool:
        """Whether the file has costs; else times are those of F = B = W = 1."""
        return self.file.problem is not None

    @property
    def unit(self) -> TimeUnit:
        """The unit in which the times read well."""
        return time_unit(self.timeline.makespan_ns, abstract=not self.has_costs)

    @property
    def tight(self) -> tuple[int, ...]:
        """The ranks on which one more F does not fit where most is held."""
        problem = self.problem
        least = [
            min(problem.profile.stages[s].saved_bytes for s in problem.placement.stages_of(f.rank))
            for f in self.ranks
        ]
        return tuple(
            f.rank
            for f, cap in zip(self.ranks, problem.caps, strict=True)
            if cap is not None and f.peak.held_bytes + least[f.rank] > cap
        )

    def hands_on(self, rank: int) -> bool:
        """Return whether gradients of a rank go to another rank."""
        rank_of = self.problem.placement.rank_of
        return any(
            edge.has_gradient and rank_of[edge.target] == rank != rank_of[edge.source]
            for edge in self.problem.profile.edges
        )


def explained(
    file: ScheduleFile,
    *,
    bubbles: int = 3,
    rank: int | None = None,
    at: Callable[[int], int] | None = None,
    measured: Measured | None = None,
) -> Explanation:
    """Collect the reasons for an order's length.

    Parameters
    ----------
    file
        The order.
    bubbles
        How many of the longest pauses to follow to their roots.
    rank
        Pauses and moments of this rank alone.
    at
        The time to look at in ns, from the length of the step.
    measured
        The times of a step that ran.

    Raises
    ------
    CheckError
        The order cannot run.
    UsageError
        There is no such rank, the time lies outside the step, or another plan was measured.
    """
    problem = file.problem or unit_problem(file.schedule)
    if rank is not None and rank >= problem.num_ranks:
        raise UsageError("there is no such rank", needed=f"0 to {problem.num_ranks - 1}", given=rank)
    graph = EventGraph(lowered(file.schedule, problem), problem)
    timeline = timeline_of(graph)
    waits = Waits(graph, timeline)
    asked = range(problem.num_ranks) if rank is None else (rank,)
    deciding, least = _deciding(timeline), _least_caps(file, problem)
    return Explanation(
        file,
        timeline,
        proof_words(file, timeline),
        deciding,
        tuple(stretches(waits, critical_path(graph, timeline))),
        tuple(facts_of(waits, r) for r in range(problem.num_ranks)),
        longest_bubbles(waits, asked, bubbles),
        () if at is None else moments_at(waits, asked, at(timeline.makespan_ns)),
        least,
        least is not None and _works(problem, max(least)),
        None if measured is None else _real(timeline, measured),
    )


def _works(problem: Problem, cap: int) -> bool:
    """Return whether some order runs with one cap for all ranks."""
    try:
        check_caps(problem.with_(caps=(cap,) * problem.num_ranks))
    except InfeasibleError:
        return False
    return True


def _real(timeline: Timeline, measured: Measured) -> Real:
    ranks = timeline.schedule.num_ranks
    if len(measured.ranks) != ranks:
        raise UsageError(
            "the measured timeline is of another plan", needed=f"{ranks} ranks", given=len(measured.ranks)
        )
    busy = tuple(map(measured.busy_ns, range(ranks)))
    return Real(measured.makespan_ns, busy, tuple(kind_means(timeline, measured)))


def _deciding(timeline: Timeline) -> tuple[int, ...]:
    """Return the ranks whose span, or whose end for a makespan, is the order's value."""
    lengths = timeline.rank_span if timeline.problem.objective == "span" else timeline.rank_end
    return tuple(r for r, length in enumerate(lengths) if length == timeline.value_ns)


def _least_caps(file: ScheduleFile, problem: Problem) -> tuple[int, ...] | None:
    """Return per rank the least cap of any order; None without costs, or where too much is to be searched."""
    if file.problem is None or problem.num_stages > _MOST_LEAST_CAPS:
        return None
    ranks = range(problem.num_ranks)
    return tuple(least_headroom(problem, r) + problem.static_bytes(r) for r in ranks)
