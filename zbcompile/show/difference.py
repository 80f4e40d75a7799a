"""How two schedules differ: in their problems, in their orders rank by rank, and in what that comes to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from zbcompile.errors import CheckError
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import Timeline, simulate
from zbcompile.show.summary import unit_problem
from zbcompile.show.units import format_bytes

__all__ = ["Difference", "RankDifference", "Side", "differences"]

_TOLD_APART = ("profile", "placement", "num_microbatches", "caps")
_MOST_STAGES = 4
"""Most stages or links whose costs are told one by one."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two schedules with its times."""

    file: ScheduleFile
    timeline: Timeline

    @property
    def problem(self) -> Problem:
        """The problem that it was timed under."""
        return self.timeline.problem

    def splits(self, rank: int) -> int:
        """Return how many backwards of a rank are split."""
        return sum(action.kind is Kind.BACKWARD_WEIGHT for action in self.file.schedule.order[rank])


@dataclass(frozen=True, slots=True)
class RankDifference:
    """How the order of one rank differs.

    Attributes
    ----------
    rank
        The rank.
    position
        The first place, among its compute actions, at which they differ; None where those are alike.
    first, second
        The actions there; None where a row has ended.
    moved
        The least number of actions to take out and put back elsewhere, among those that both have.
    only_first, only_second
        Actions that one alone has: a backward that is split on one side and fused on the other.
    messages
        Whether sends and receives are elsewhere, while the compute actions are alike.
    """

    rank: int
    position: int | None
    first: Action | None
    second: Action | None
    moved: int
    only_first: int
    only_second: int
    messages: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """All that differs between two schedules.

    Attributes
    ----------
    first, second
        The schedules.
    problems
        What differs between their problems, a sentence each.
    comparable
        Whether their orders are of the same stages, ranks and microbatches.
    ranks
        The ranks whose orders differ; empty where the orders are not comparable.
    second_under_first_ns
        The second order's value under the first one's problem; None where the problems are alike, or it
        does not run there.
    notes
        What differs beside problem and order.
    """

    first: Side
    second: Side
    problems: tuple[str, ...]
    comparable: bool
    ranks: tuple[RankDifference, ...]
    second_under_first_ns: int | None
    notes: tuple[str, ...]

    @property
    def alike_costs(self) -> bool:
        """Whether both have costs or neither has any: else their times cannot be held against each other."""
        return (self.first.file.problem is None) == (self.second.file.problem is None)

    @property
    def same(self) -> bool:
        """Whether both are the same order of the same problem."""
        return not self.problems and not self.ranks and self.comparable


def differences(first: ScheduleFile, second: ScheduleFile) -> Difference:
    """Compare two schedules.

    Raises
    ------
    CheckError
        One of them cannot run.
    """
    sides = [Side(f, simulate(f.schedule, f.problem or unit_problem(f.schedule))) for f in (first, second)]
    one, other = sides
    schedules = first.schedule, second.schedule
    comparable = (
        schedules[0].placement == schedules[1].placement
        and schedules[0].num_microbatches == schedules[1].num_microbatches
    )
    problems = tuple(_problems(first, second))
    under = _value(second.schedule, one.problem) if comparable and problems else None
    ranks = tuple(_ranks(*schedules)) if comparable else ()
    return Difference(one, other, problems, comparable, ranks, under, tuple(_notes(first, second)))


def _value(schedule: Schedule, problem: Problem) -> int | None:
    try:
        return simulate(schedule, problem).value_ns
    except CheckError:
        return None


def _ranks(first: Schedule, second: Schedule) -> Iterator[RankDifference]:
    """Yield how the orders of the ranks differ that do."""
    for rank, rows in enumerate(zip(first.order, second.order, strict=True)):
        if rows[0] == rows[1]:
            continue
        one, other = ([action for action in row if action.kind.is_compute] for row in rows)
        if one == other:
            yield RankDifference(rank, None, None, None, 0, 0, 0, messages=True)
            continue
        place = next(
            (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
            min(len(one), len(other)),
        )
        where = {action: k for k, action in enumerate(other)}
        both = [where[action] for action in one if action in where]
        yield RankDifference(
            rank,
            place,
            one[place] if place < len(one) else None,
            other[place] if place < len(other) else None,
            len(both) - _longest_rise(both),
            len(one) - len(both),
            len(other) - len(both),
            messages=False,
        )


def _longest_rise(numbers: Sequence[int]) -> int:
    """Return the length of the longest increasing subsequence."""
    ends: list[int] = []
    for number in numbers:
        place = bisect_left(ends, number)
        ends[place : place + 1] = [number]
    return len(ends)


def _problems(first: ScheduleFile, second: ScheduleFile) -> Iterator[str]:
    """Yield what differs between the problems of two files."""
    a, b = first.schedule, second.schedule
    for name, one, other in (
        ("ranks", a.num_ranks, b.num_ranks),
        ("stages", a.num_stages, b.num_stages),
        ("microbatches", a.num_microbatches, b.num_microbatches),
    ):
        if one != other:
            yield f"{name}: {one} against {other}"
    if (a.num_ranks, a.num_stages) == (b.num_ranks, b.num_stages) and a.placement != b.placement:
        yield f"placement: {_placed(a)} against {_placed(b)}"
    if first.problem is None or second.problem is None:
        if first.problem is not second.problem:
            yield f"costs: only the {'second' if first.problem is None else 'first'} has any"
        return
    for field in fields(Problem):
        if field.name not in _TOLD_APART:
            yield from _field(field.name, first.problem, second.problem)
    if a.num_ranks == b.num_ranks:
        yield from _caps(first.problem.caps, second.problem.caps)
    yield from _profiles(first.problem.profile, second.problem.profile)


def _placed(schedule: Schedule) -> str:
    name = schedule.placement.name
    return name if name != "map" else f"ranks {','.join(map(str, schedule.placement.rank_of[:16]))}"


def _caps(first: Sequence[int | None], second: Sequence[int | None]) -> Iterator[str]:
    """Yield which caps differ, in one line where all differ alike."""
    pairs = list(zip(first, second, strict=True))
    lines = [f"cap of rank {r}: {_cap(a)} against {_cap(b)}" for r, (a, b) in enumerate(pairs) if a != b]
    if len(lines) == len(pairs) > 1 and len(set(pairs)) == 1:
        lines = [f"cap of every rank: {_cap(pairs[0][0])} against {_cap(pairs[0][1])}"]
    yield from _first_ones(lines, "caps")


def _cap(cap: int | None) -> str:
    return "none" if cap is None else f"{format_bytes(cap)} ({cap} bytes)"


def _profiles(a: Profile, b: Profile) -> Iterator[str]:
    """Yield what differs between two profiles."""
    if a.num_stages != b.num_stages:
        return
    yield from _first_ones(
        [
            f"stage {s}: {field.name} {getattr(x, field.name)} against {getattr(y, field.name)}"
            for s, (x, y) in enumerate(zip(a.stages, b.stages, strict=True))
            for field in fields(x)
            if field.name not in ("name", "variants") and getattr(x, field.name) != getattr(y, field.name)
        ],
        "costs of stages",
    )
    for field in fields(Profile):
        if field.name not in ("stages", "source"):
            yield from _field(field.name, a, b)


def _field(name: str, a: object, b: object) -> Iterator[str]:
    """Yield a sentence on a field that differs; only numbers and words are quoted."""
    one, other = getattr(a, name), getattr(b, name)
    if one != other:
        short = isinstance(one, (int, str)) and isinstance(other, (int, str))
        yield f"{name}: {one} against {other}" if short else f"{name} differ{'s' * (name[-1] != 's')}"


def _first_ones(lines: Sequence[str], what: str) -> Iterator[str]:
    yield from lines[:_MOST_STAGES]
    if len(lines) > _MOST_STAGES:
        yield f"{len(lines) - _MOST_STAGES} more {what} differ"


def _notes(first: ScheduleFile, second: ScheduleFile) -> Iterator[str]:
    """Yield what differs in the files beside problem and order."""
    a, b = first.certificate, second.certificate
    if (a is None) != (b is None):
        yield f"only the {'first' if b is None else 'second'} has a certificate"
    elif a is not None and b is not None and (a.bound_ns, a.method) != (b.bound_ns, b.method):
        yield f"bounds: {a.bound_ns:,} ns ({a.method}) against {b.bound_ns:,} ns ({b.method})"
    if first.variants != second.variants:
        yield "the variants chosen differ"
    if first.offered != second.offered:
        yield "the variants offered differ"
