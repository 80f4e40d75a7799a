"""Assignments of variants to stages: which ones are worth a whole plan.

Many are weighed by their lower bounds: none, one level everywhere or on the first or last ranks, what lets so
many microbatches be in flight, and what lies around the most promising ones. The best of these get a quick
plan each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from zbcompile.errors import InfeasibleError
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.bounds.blocking_send import blocking_send_bound
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.incumbent import Order, PlanState, Progress
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.least_memory import check_caps
from zbcompile.schedule.memory import uses_of
from zbcompile.schedule.problem import Problem

__all__ = [
    "RANK_SHARE",
    "Assignment",
    "Quick",
    "Ranked",
    "RankingClock",
    "bound_of",
    "candidates",
    "fixed",
    "rank",
    "uniform",
]

Assignment = tuple[int, ...]
"""The variant of every stage, 0 for the stage as it is."""

Quick = Callable[[Problem, float], tuple[int, Order] | None]
"""Plans a problem in a moment, in so many seconds at most: its value and the order; None if it found none."""

_FINALISTS = 3
"""Most assignments that are planned in full."""

RANK_SHARE = 0.4
"""Most of the time that ranking takes."""

_BOUND_STAGES = 400
"""Bounds of assignments for every second of the limit, times stages."""

_PLAN_ACTIONS = 1200
"""Quick plans of assignments for every second of the limit, times actions."""

_LEAST_TRIES = 12
"""Of each, however short the limit."""

_QUICK_S = 2.0
"""Most seconds of a quick plan."""

_CLOSE = 1.02
"""Assignments whose quick plans are longer than the best by this factor are not planned in full."""

_WIDTH = 8
"""Assignments of the least bounds around which others are looked for."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """Assignments worth a whole plan.

    Attributes
    ----------
    finalists
        The best few, in the order in which to plan them.
    others
        Other uniform ones that fit, the most promising first.
    uniform
        All of one variant everywhere.
    orders
        Orders from the quick plans of the finalists.
    """

    finalists: tuple[Assignment, ...]
    others: tuple[Assignment, ...]
    uniform: frozenset[Assignment]
    orders: tuple[Order, ...] = ()


class RankingClock(Protocol):
    """Is told of progress, and knows the time: until the limit, and that for which tries are counted."""

    limit: float
    nominal_s: float

    def seconds_left(self) -> float: ...
    def __call__(self, progress: Progress) -> None: ...


def fixed(problem: Problem, assignment: Sequence[int]) -> Problem:
    """Return the problem with one variant per stage."""
    return problem.with_(profile=problem.profile.choose(assignment))


def bound_of(problem: Problem) -> Bound:
    """Return the best analytic bound of a problem without variants."""
    bound, blocking = best_bound(problem), blocking_send_bound(problem)
    return blocking if blocking is not None and blocking.value_ns > bound.value_ns else bound


def candidates(problem: Problem) -> Iterator[Assignment]:
    """Yield whole assignments to weigh first, none twice."""
    seen: set[Assignment] = set()
    for made in (*_by_level(problem), *_by_flight(problem)):
        if made not in seen:
            seen.add(made)
            yield made


def _by_level(problem: Problem) -> Iterator[Assignment]:
    """Yield no variant; then each level on all ranks, on the first k, on the last k."""
    profile, rank_of, p = problem.profile, problem.placement.rank_of, problem.num_ranks
    for level in range(1 + max(len(stage.variants) for stage in profile.stages)):
        for count in (p, *range(1, p)):
            for first in (True, False):
                yield tuple(
                    min(level, len(stage.variants)) if (r < count if first else r >= p - count) else 0
                    for stage, r in zip(profile.stages, rank_of, strict=True)
                )


def uniform(problem: Problem) -> list[Assignment]:
    """Return what a user would choose by hand: one name of a variant, or one level, on all stages.

    A stage without variants runs as it is; one with fewer levels than others at its last one. The same name
    may be another level of each stage.
    """
    stages = problem.profile.stages
    depths = [len(stage.variants) for stage in stages]
    found = [tuple(min(level, depth) for depth in depths) for level in range(max(depths) + 1)]
    names = [[_own_name(way, stage) for way in _ways(stage)] for stage in stages]
    for name in dict.fromkeys(itertools.chain(*names)):
        if all(name in row or len(row) == 1 for row in names):
            found.append(tuple(row.index(name) if name in row else 0 for row in names))
    return list(dict.fromkeys(found))


def _own_name(way: StageCost, stage: StageCost) -> str:
    """Return the name of a variant without that of its stage (``stage 2, recompute=full``)."""
    return way.name.removeprefix(stage.name).lstrip(", ")


def _by_flight(problem: Problem) -> Iterator[Assignment]:
    """Yield the levels that allow so many microbatches in flight on rank 0, and fewer on later ones."""
    p = problem.num_ranks
    for most in range(1, 2 * p + 1):
        for fewer in (0, 1, 2):
            levels = [0] * problem.num_stages
            for rank in range(p):
                wanted = min(problem.num_microbatches, max(1, most - fewer * rank))
                _fit(problem, rank, wanted, levels)
            yield tuple(levels)


def _fit(problem: Problem, rank: int, wanted: int, levels: list[int]) -> None:
    """Raise levels of a rank's stages, the most bytes for a ns first, until so many microbatches fit."""
    headroom = problem.headroom(rank)
    ways = {s: _ways(problem.profile.stages[s]) for s in problem.placement.stages_of(rank)}

    def worth(s: int) -> tuple[float, int]:
        now, then = ways[s][levels[s]], ways[s][levels[s] + 1]
        saved = now.saved_bytes - then.saved_bytes
        return saved / max(1, _work_ns(then) - _work_ns(now)), -s

    while headroom is not None:
        held = sum(row[levels[s]].saved_bytes for s, row in ways.items())
        leaner = [s for s, row in ways.items() if levels[s] + 1 < len(row)]
        if held * wanted <= headroom or not leaner:
            return
        levels[max(leaner, key=worth)] += 1


def _ways(stage: StageCost) -> tuple[StageCost, ...]:
    return (stage, *stage.variants)


def _work_ns(way: StageCost) -> int:
    """Return the least time of one microbatch on a stage."""
    backward = min(way.full_backward_ns, way.backward_input_ns + way.backward_weight_ns)
    return way.forward_ns + backward


class _Ranking:
    """Assignments, weighed by their bounds, a millisecond each; the most promising by a quick plan each.

    Both are counted, so that the same problem and limit give the same order of assignments.
    """

    def __init__(
        self,
        problem: Problem,
        quick: Quick,
        relay: RankingClock,
        fusing: bool,
    ) -> None:
        self.problem, self.quick, self.relay, self.fusing = problem, quick, relay, fusing
        stages = problem.num_stages
        actions = 3 * stages * problem.num_microbatches
        self.bounds_left = max(_LEAST_TRIES, int(relay.nominal_s * _BOUND_STAGES / stages))
        self.plans_left = max(_LEAST_TRIES, int(relay.nominal_s * _PLAN_ACTIONS / actions))
        self.bounds: dict[Assignment, int | None] = {}
        self.values: dict[Assignment, int] = {}
        self.orders: dict[Assignment, Order] = {}

    @property
    def best(self) -> int | None:
        """The least value of a quick plan."""
        return min(self.values.values(), default=None)

    def seconds_left(self) -> float:
        """Return the seconds left for ranking, at most those of one quick plan."""
        left = self.relay.seconds_left() - (1 - RANK_SHARE) * self.relay.limit
        return min(_QUICK_S, left)

    def over(self) -> bool:
        """Return whether the time for ranking is over, whatever is left to try."""
        return self.seconds_left() < 0

    def weigh(self, assignments: Iterable[Assignment], *, always: bool = False) -> None:
        """Bound assignments, as many as may be, or all; those that no order fits get none."""
        for assignment in assignments:
            if assignment in self.bounds or not (always or (self.bounds_left > 0 and not self.over())):
                continue
            self.bounds_left -= 1
            problem = fixed(self.problem, assignment)
            try:
                check_caps(problem, fusing=self.fusing)
            except InfeasibleError:
                self.bounds[assignment] = None
            else:
                self.bounds[assignment] = bound_of(problem).value_ns

    def promising(self) -> list[Assignment]:
        """Return the assignments that fit, those of the least bound first, then those of the least work."""
        stages = self.problem.profile.stages

        def key(assignment: Assignment) -> tuple[int, int, Assignment]:
            work = sum(_work_ns(_ways(s)[k]) for s, k in zip(stages, assignment, strict=True))
            return self.bounds[assignment] or 0, work, assignment

        return sorted((a for a, bound in self.bounds.items() if bound is not None), key=key)

    def climb(self) -> None:
        """Weigh what lies around the most promising assignments."""
        around: set[Assignment] = set()
        while self.bounds_left > 0 and not self.over():
            here = next((a for a in self.promising()[:_WIDTH] if a not in around), None)
            if here is None:
                return
            around.add(here)
            self.weigh(self._around(here))

    def plan(self, assignments: Iterable[Assignment], most: int, *, always: bool = False) -> bool:
        """Plan quickly, at most so many, what may be better than the best; return whether one is.

        ``always``: where the time is over, too, with the orders that take a moment.
        """
        before = self.best
        for assignment in assignments:
            bound = self.bounds.get(assignment)
            if assignment in self.values or bound is None or (self.best is not None and bound >= self.best):
                continue
            if most <= 0 or self.plans_left <= 0 or (self.over() and not always):
                break
            most, self.plans_left = most - 1, self.plans_left - 1
            found = self.quick(fixed(self.problem, assignment), max(0.0, self.seconds_left()))
            if found is not None:
                self.values[assignment], self.orders[assignment] = found
                self.relay(Progress(found[0], 0, 0.0, "variants"))
        return self.best is not None and (before is None or self.best < before)

    def improve(self) -> None:
        """Change the level of one stage, or swap those of two ranks, until nothing is better."""
        better = True
        while better and self.values:
            here = min(self.values, key=lambda a: (self.values[a], a))
            near = set(self._around(here))
            self.bounds_left += len(near)
            self.weigh(sorted(near))
            better = self.plan((a for a in self.promising() if a in near), len(near))

    def _around(self, here: Assignment) -> Iterator[Assignment]:
        stages, rank_of = self.problem.profile.stages, self.problem.placement.rank_of
        for s, stage in enumerate(stages):
            for level in range(len(stage.variants) + 1):
                yield (*here[:s], level, *here[s + 1 :])
        for a, b in itertools.combinations(range(len(here)), 2):
            legal = here[b] <= len(stages[a].variants) and here[a] <= len(stages[b].variants)
            if legal and here[a] != here[b] and rank_of[a] != rank_of[b]:
                levels = list(here)
                levels[a], levels[b] = here[b], here[a]
                yield tuple(levels)

    def ranked(self) -> Ranked:
        """Return the best few, none more than a fiftieth behind, and the best uniform one.

        The uniform one comes first where it is among these, else last.
        """
        known = sorted((value, a) for a, value in self.values.items())
        close = [assignment for value, assignment in known if value <= _CLOSE * known[0][0]]
        single = uniform(self.problem)
        known_single = [assignment for _, assignment in known if assignment in single]
        first = [a for a in known_single if a in close][:1]
        found = [*first, *[a for a in close if a not in first][:_FINALISTS]]
        found += [a for a in known_single if a not in found][: 1 - len(first)]
        left = [a for a in self.promising() if a in single and a not in found]
        return Ranked(tuple(found), tuple(left), frozenset(single), tuple(self.orders[a] for a in found))


def rank(
    problem: Problem,
    quick: Quick,
    bound: Bound,
    relay: RankingClock,
    fusing: bool,
) -> Ranked:
    """Return the best few assignments by bounds and quick plans, and those of one variant everywhere.

    Raises
    ------
    InfeasibleError
        No assignment fits under the caps.
    """
    ranking = _Ranking(problem, quick, relay, fusing)
    single, leanest = uniform(problem), _leanest(problem.profile, fusing)
    try:
        ranking.weigh([*single, leanest], always=True)
        fitting = [a for a in ranking.promising() if a in single]
        ranking.plan(fitting, _LEAST_TRIES)
        ranking.plan([leanest], 1, always=True)  # more orders fit it than others
        if ranking.best is None or ranking.best > bound.value_ns:
            ranking.weigh(candidates(problem))
            ranking.plan(ranking.promising(), ranking.plans_left // 4)
            ranking.climb()
            ranking.plan(ranking.promising(), ranking.plans_left // 2)
            ranking.improve()
    except KeyboardInterrupt:
        relay(Progress(None, 0, 0.0, "interrupted", PlanState.INTERRUPTED))
    if ranking.values:
        return ranking.ranked()
    if weighed := ranking.promising():
        return Ranked(tuple(weighed[:1]), tuple(a for a in weighed[1:] if a in single), frozenset(single))
    check_caps(fixed(problem, leanest), fusing=fusing)
    return Ranked((leanest,), (), frozenset(single))


def _leanest(profile: Profile, fusing: bool) -> Assignment:
    """Return per stage the variant whose microbatch needs the fewest bytes by itself."""

    result = []
    for stage in profile.stages:
        ways = [uses_of(way) for way in (stage, *stage.variants)]
        held = [(way.alone(fusing=fusing), way.alone(fusing=True)) for way in ways]
        result.append(held.index(min(held)))
    return tuple(result)
