"""Which variant every stage runs as, where stages offer several (for instance with recompute).

When memory binds, a variant that holds less and takes longer shortens the step more than any order can. So
assignments of variants are ranked before the search (`assignments`), and the best few are planned in full.
The bound of the result holds over all assignments: per rank the least over its own levels, every other stage
at the least of each of its costs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

from zbcompile.planner.assignments import RANK_SHARE, Assignment, bound_of, fixed, rank
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.compiled import SearchClock
from zbcompile.planner.incumbent import PlanState, Progress
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Certificate, Solution

__all__ = ["Relay", "bound_of", "cheapest", "fixed", "joint_bound", "offers_variants", "plan_variants"]

_MOST_LEVELS = 64
"""Combinations of levels on one rank up to which its bound looks at each of them."""

_MOST_COSTS = 8192
"""Stages times combinations of levels up to which the same holds."""

_LARGE = 4096
"""Stages times microbatches beyond which the joint bound looks at three ranks only."""


def offers_variants(problem: Problem) -> bool:
    """Return whether any stage has more than one way to run."""
    return any(stage.variants for stage in problem.profile.stages)


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
    finalists = rank(problem, quick, bound, relay, fusing)
    share = (1 - RANK_SHARE) * time_limit_s / (len(finalists) + 1)
    chosen: tuple[Solution, Assignment] | None = None
    for k, assignment in enumerate(finalists):
        here = fixed(problem, assignment)
        if chosen is not None and bound_of(here).value_ns >= chosen[0].certificate.value_ns:
            continue
        spare = relay.seconds_left() - share * (len(finalists) - 1 - k)
        found = find(here, _stretched(max(0.2, share if k else 2 * share), spare), relay)
        if chosen is None or found.certificate.value_ns < chosen[0].certificate.value_ns:
            chosen = found, assignment
        if chosen[0].certificate.value_ns <= bound.value_ns or relay.seconds_left() <= 0:
            break
    assert chosen is not None
    return _certified(*chosen, bound, problem.profile)


def _stretched(limit: float, spare: float) -> float:
    """Return a limit in seconds that uses time to spare, but for no more tries than it would have had.

    Tries are counted by the tens of seconds of a limit (`zbcompile.planner.run.Run.level`).
    """
    return max(limit, min(spare, 10 * max(1, round(limit / 10)) + 4.9))


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
