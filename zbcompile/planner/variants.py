"""Which variant every stage runs as, where stages offer several (for instance with recompute).

When memory binds, a variant that holds less and takes longer shortens the step more than any order can. So
assignments of variants are ranked before the search: none, one level everywhere, one level on the first or
last ranks, then changes rank by rank. The lower bound holds over all assignments: per rank the least over its
own levels, every other stage at the least of each of its costs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from zbcompile.errors import InfeasibleError
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.bounds.blocking_send import blocking_send_bound
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.compiled import SearchClock
from zbcompile.planner.incumbent import PlanState, Progress
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.least_memory import check_caps
from zbcompile.schedule.memory import uses_of
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Certificate, Solution

__all__ = ["Relay", "bound_of", "cheapest", "fixed", "joint_bound", "offers_variants", "plan_variants"]

Assignment = tuple[int, ...]
"""The variant of every stage, 0 for the stage as it is."""

_MOST_LEVELS = 64
"""Combinations of levels on one rank up to which its bound looks at each of them."""

_MOST_COSTS = 8192
"""Stages times combinations of levels up to which the same holds."""

_FINALISTS = 3
"""Most assignments that are planned in full."""

_LARGE = 4096
"""Stages times microbatches beyond which the joint bound looks at three ranks only."""


def offers_variants(problem: Problem) -> bool:
    """Return whether any stage has more than one way to run."""
    return any(stage.variants for stage in problem.profile.stages)


def fixed(problem: Problem, assignment: Sequence[int]) -> Problem:
    """Return the problem with one variant per stage."""
    return problem.with_(profile=problem.profile.choose(assignment))


def cheapest(stage: StageCost) -> StageCost:
    """Return a stage that costs no more than any of its variants, in every time and in bytes.

    Valid in bounds: whatever runs with a variant runs with this one in its place, no later and with no more
    memory. A split B and W take at least the least B and W, a fused BW at least the least BW.

    Notes
    -----
    `zbcompile.planner.certify.certificate` computes the same from a witness, in code of its own: a fault here
    must not vouch for itself there.
    """
    return StageCost.combined((stage, *stage.variants), min).of_stage(stage)


def bound_of(problem: Problem) -> Bound:
    """Return the best analytic bound of a problem without variants."""
    bound, blocking = best_bound(problem), blocking_send_bound(problem)
    return blocking if blocking is not None and blocking.value_ns > bound.value_ns else bound


def joint_bound(problem: Problem) -> Bound:
    """Return a bound for every order under every assignment.

    It is the best over the ranks of the least over the rank's levels. Large problems look at the first, the
    middle and the last rank only. Without variants it is the problem's own analytic bound.
    """
    if not offers_variants(problem):
        return bound_of(problem)
    p = problem.num_ranks
    large = problem.num_stages * problem.num_microbatches > _LARGE
    known: dict[tuple[StageCost, ...], Bound] = {}
    ranks = sorted({0, p // 2, p - 1}) if large else range(p)
    return max((_rank_bound(problem, rank, known) for rank in ranks), key=lambda bound: bound.value_ns)


def _rank_bound(problem: Problem, rank: int, known: dict[tuple[StageCost, ...], Bound]) -> Bound:
    """Return the least bound over the levels of one rank's stages, all other stages at their cheapest.

    ``known`` keeps the bounds of profiles that other ranks have asked for.
    """
    profile, stages = problem.profile, problem.placement.stages_of(rank)
    low = tuple(cheapest(stage) for stage in profile.stages)
    levels = [range(len(profile.stages[s].variants) + 1) for s in stages]
    choices: list[Assignment | None] = list(itertools.product(*levels))
    if len(choices) > _MOST_LEVELS or len(choices) * len(low) > _MOST_COSTS:
        choices = [None]
    found: list[tuple[Bound, Assignment | None]] = []
    for choice in choices:
        costs = list(low)
        for s, level in zip(stages, choice or (), strict=choice is not None):
            costs[s] = _level(profile.stages[s], level)
        key = tuple(costs)
        if key not in known:
            known[key] = bound_of(problem.with_(profile=replace(profile, stages=key)))
        found.append((known[key], choice))
    least = min(bound.value_ns for bound, _ in found)
    witness = {
        "rank": rank,
        "levels": [
            {
                "choice": None if choice is None else list(choice),
                "bound_ns": bound.value_ns,
                "method": bound.method,
                "witness": dict(bound.witness),
            }
            for bound, choice in found
        ],
        "costs": [[_numbers(way) for way in (stage, *stage.variants)] for stage in profile.stages],
    }
    return Bound(least, "variants", problem.objective, witness)


def _level(stage: StageCost, level: int) -> StageCost:
    """Return a stage as one of its variants (0: as it is)."""
    chosen = stage if level == 0 else stage.variants[level - 1]
    return chosen.of_stage(stage)


def _numbers(way: StageCost) -> list[int]:
    """Return the costs of a way to run as a witness lists them."""
    return [
        way.forward_ns,
        way.backward_input_ns,
        way.backward_weight_ns,
        way.full_backward_ns,
        way.saved_bytes,
        way.saved_for_weight_bytes,
    ]


def candidates(problem: Problem) -> Iterator[Assignment]:
    """Yield whole assignments to try first: none, a level on all ranks, on the first k, on the last k."""
    profile, rank_of, p = problem.profile, problem.placement.rank_of, problem.num_ranks
    seen: set[Assignment] = set()
    for level in range(1 + max(len(stage.variants) for stage in profile.stages)):
        for count in (p, *range(1, p)):
            for first in (True, False):
                made = tuple(
                    min(level, len(stage.variants)) if (r < count if first else r >= p - count) else 0
                    for stage, r in zip(profile.stages, rank_of, strict=True)
                )
                if made not in seen:
                    seen.add(made)
                    yield made


class _Ranking:
    """Values of assignments by a quick plan each, none twice."""

    def __init__(
        self,
        problem: Problem,
        quick: Callable[[Problem], int | None],
        over: Callable[[], bool],
        fusing: bool,
    ) -> None:
        self.problem, self.quick, self.over, self.fusing = problem, quick, over, fusing
        self.values: dict[Assignment, int | None] = {}
        self.best: tuple[int, Assignment] | None = None

    def try_(self, assignment: Assignment) -> bool:
        """Value an assignment; return whether it is the best so far."""
        if assignment in self.values or self.over():
            return False
        self.values[assignment] = value = self._value(assignment)
        if value is None or (self.best is not None and (value, assignment) >= self.best):
            return False
        self.best = value, assignment
        return True

    def _value(self, assignment: Assignment) -> int | None:
        problem = fixed(self.problem, assignment)
        try:
            check_caps(problem, fusing=self.fusing)
        except InfeasibleError:
            return None
        if self.best is not None and bound_of(problem).value_ns >= self.best[0]:
            return None
        return self.quick(problem)

    def improve(self) -> None:
        """Change the levels of one rank, then swap two ranks, until nothing is better."""
        better = True
        while better and self.best is not None:
            better = any(self.try_(other) for other in self._around(self.best[1]))

    def _around(self, here: Assignment) -> Iterator[Assignment]:
        profile, rank_of = self.problem.profile, self.problem.placement.rank_of
        for s, stage in enumerate(profile.stages):
            if self.over():
                return
            for level in range(len(stage.variants) + 1):
                yield (*here[:s], level, *here[s + 1 :])
        for a, b in itertools.combinations(range(len(here)), 2):
            if self.over():
                return
            levels = list(here)
            levels[a], levels[b] = here[b], here[a]
            legal = all(level <= len(profile.stages[s].variants) for s, level in enumerate(levels))
            if legal and here[a] != here[b] and rank_of[a] != rank_of[b]:
                yield tuple(levels)

    def finalists(self) -> list[Assignment]:
        """Return the best few, best first, none more than a fiftieth behind."""
        known = sorted((v, a) for a, v in self.values.items() if v is not None)
        return [assignment for value, assignment in known[:_FINALISTS] if value <= 1.02 * known[0][0]]


class Relay:
    """Progress over all assignments: the best value of any, the joint bound; knows of an interrupt."""

    def __init__(self, observer: Callable[[Progress], None] | None, time_limit_s: float) -> None:
        self.observer, self.started, self.limit = observer, time.monotonic(), time_limit_s
        self.searched = SearchClock()
        self.best: int | None = None
        self.bound, self.state = 0, PlanState.SEARCHING

    def seconds_left(self) -> float:
        """Return the time until the limit in seconds, none after an interrupt."""
        if self.state is PlanState.INTERRUPTED:
            return 0.0
        return self.limit - self.searched.seconds

    def __call__(self, progress: Progress) -> None:
        if progress.state is PlanState.INTERRUPTED:
            self.state = progress.state
        if progress.best_ns is not None and (self.best is None or progress.best_ns < self.best):
            self.best = progress.best_ns
        if self.observer is not None:
            seconds = time.monotonic() - self.started
            self.observer(Progress(self.best, self.bound, seconds, progress.step, progress.state))


def plan_variants(
    problem: Problem,
    find: Callable[[Problem, float, Callable[[Progress], None]], Solution],
    quick: Callable[[Problem], int | None],
    *,
    time_limit_s: float,
    observer: Callable[[Progress], None] | None = None,
    fusing: bool = True,
) -> Solution:
    """Choose variants, plan the best few assignments in full, and certify over all assignments.

    Parameters
    ----------
    problem
        A problem with variants.
    find
        Plans a problem without variants in the seconds given, telling an observer.
    quick
        Returns the value of a fast plan, or ``None``.
    time_limit_s
        Outer limit in seconds.
    observer
        Called with a `Progress` at every better order.
    fusing
        Whether backwards may be fused.

    Raises
    ------
    InfeasibleError
        No assignment fits under the caps.
    """
    relay = Relay(observer, time_limit_s)
    bound = joint_bound(problem)
    relay.bound = bound.value_ns
    finalists = _rank(problem, quick, bound, relay, fusing)
    chosen: tuple[Solution, Assignment] | None = None
    for k, assignment in enumerate(finalists):
        share = max(0.2, relay.seconds_left() / (len(finalists) - k))
        found = find(fixed(problem, assignment), share, relay)
        if chosen is None or found.certificate.value_ns < chosen[0].certificate.value_ns:
            chosen = found, assignment
        if chosen[0].certificate.value_ns <= bound.value_ns or relay.seconds_left() <= 0:
            break
    assert chosen is not None
    return _certified(*chosen, bound, problem.profile)


def _rank(
    problem: Problem,
    quick: Callable[[Problem], int | None],
    bound: Bound,
    relay: Relay,
    fusing: bool,
) -> list[Assignment]:
    """Return the best few assignments by quick plans, in two fifths of the time."""
    spare = 0.6 * relay.limit
    ranking = _Ranking(problem, quick, lambda: relay.seconds_left() < spare, fusing)
    try:
        for assignment in candidates(problem):
            if ranking.try_(assignment):
                relay(Progress(ranking.best[0] if ranking.best else None, 0, 0.0, "variants"))
            if ranking.best is not None and ranking.best[0] <= bound.value_ns:
                return ranking.finalists()[:1]
            if ranking.over():
                break
        ranking.improve()
    except KeyboardInterrupt:
        relay(Progress(None, 0, 0.0, "interrupted", PlanState.INTERRUPTED))
    if ranking.best is None:
        leanest = _leanest(problem.profile, fusing)
        check_caps(fixed(problem, leanest), fusing=fusing)
        return [leanest]
    return ranking.finalists()


def _leanest(profile: Profile, fusing: bool) -> Assignment:
    """Return per stage the variant whose microbatch needs the fewest bytes by itself."""

    result = []
    for stage in profile.stages:
        ways = [uses_of(way) for way in (stage, *stage.variants)]
        held = [(way.alone(fusing=fusing), way.alone(fusing=True)) for way in ways]
        result.append(held.index(min(held)))
    return tuple(result)


def _certified(solution: Solution, assignment: Assignment, bound: Bound, offered: Profile) -> Solution:
    """Return the solution with the certificate that holds over all assignments."""
    value = solution.certificate.value_ns
    certificate = Certificate(
        solution.certificate.objective,
        value,
        bound.value_ns,
        bound.method,
        bound.witness,
        solution.certificate.lineage,
    )
    return replace(solution, certificate=certificate, variants=assignment, offered=offered)
