"""Which variant every stage runs as, where stages offer several (for instance with recompute).

When memory binds, a variant that holds less and takes longer shortens the step more than any order can. So
assignments of variants are ranked before the search (`assignments`), and the best few are planned in full.
The bound of the result holds over all assignments (`joint_bound`).

One variant everywhere is what a user would choose by hand: it is planned as it would be alone, so that no
such choice is better. Its order is offered to the plans of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from zbcompile.planner.assignments import RANK_SHARE, Assignment, Quick, Ranked, bound_of, fixed, rank
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.compiled import SearchClock
from zbcompile.planner.core.instance import to_codes
from zbcompile.planner.incumbent import Order, PlanState, Progress
from zbcompile.planner.joint_bound import bounds_in, joint_bound
from zbcompile.planner.run import nominal_seconds
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Solution

__all__ = ["Find", "Relay", "plan_variants"]

_LEAST_S = 0.2
"""Least seconds of a plan in full."""


class Find(Protocol):
    """Plans a problem without variants in the seconds given, with some known orders.

    ``first``: the search starts from them. Else it takes one that is shorter than what it found by itself.
    """

    def __call__(
        self,
        problem: Problem,
        seconds: float,
        tell: Callable[[Progress], None],
        known: Sequence[Order],
        /,
        *,
        first: bool,
    ) -> Solution: ...


class Relay:
    """Progress over all assignments: the best value of any, the joint bound; knows of an interrupt."""

    def __init__(
        self,
        observer: Callable[[Progress], None] | None,
        time_limit_s: float,
        nominal_s: float | None = None,
    ) -> None:
        self.observer, self.started, self.limit = observer, time.monotonic(), time_limit_s
        self.nominal_s = time_limit_s if nominal_s is None else nominal_s
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
    find: Find,
    quick: Quick,
    *,
    time_limit_s: float,
    level: int | None = None,
    observer: Callable[[Progress], None] | None = None,
    fusing: bool = True,
) -> Solution:
    """Choose variants, plan the best few assignments in full, and certify over all assignments.

    Parameters
    ----------
    problem
        A problem with variants.
    find
        Plans a problem without variants.
    quick
        Plans a problem without variants in a moment.
    time_limit_s
        Outer limit in seconds.
    level
        How much to search, as `zbcompile.planner.plan.plan` takes it.
    observer
        Called with a `Progress` at every better order.
    fusing
        Whether backwards may be fused.

    Raises
    ------
    InfeasibleError
        No assignment fits under the caps.
    """
    relay = Relay(observer, time_limit_s, nominal_seconds(level, time_limit_s))
    bound = joint_bound(problem, bounds_in(problem, relay.nominal_s))
    relay.bound = bound.value_ns
    solution, assignment = _planned(problem, rank(problem, quick, bound, relay, fusing), find, relay)
    return _certified(solution, assignment, problem.profile, bound)


def _planned(problem: Problem, ranked: Ranked, find: Find, relay: Relay) -> tuple[Solution, Assignment]:
    """Plan assignments in full, as the time allows, and return the shortest plan.

    Assignments of one variant everywhere are searched from nothing: the same tries alone find the same. All
    others start from the orders found before, too.
    """
    share = (1 - RANK_SHARE) * relay.limit / (len(ranked.finalists) + 1)
    chosen: tuple[Solution, Assignment] | None = None
    known = list(ranked.orders)
    for k, assignment in enumerate((*ranked.finalists, *ranked.others)):
        here = fixed(problem, assignment)
        if chosen is not None and bound_of(here).value_ns >= chosen[0].certificate.value_ns:
            continue
        spare = relay.seconds_left() - share * (len(ranked.finalists) - 1 - k)
        seconds = _stretched(max(_LEAST_S, share if k else 2 * share), spare)
        found = find(here, seconds, relay, known, first=assignment not in ranked.uniform)
        known.append(Order(to_codes(found.schedule), found.certificate.lineage))
        if chosen is None or found.certificate.value_ns < chosen[0].certificate.value_ns:
            chosen = found, assignment
        if chosen[0].certificate.value_ns <= relay.bound or relay.seconds_left() <= 0:
            break
    assert chosen is not None
    return chosen


def _stretched(limit: float, spare: float) -> float:
    """Return a limit in seconds that uses time to spare, but for no more tries than it would have had.

    Tries are counted by the tens of seconds of a limit (`zbcompile.planner.run.Run.level`).
    """
    return max(limit, min(spare, 10 * max(1, round(limit / 10)) + 4.9))


def _certified(solution: Solution, assignment: Assignment, offered: Profile, bound: Bound) -> Solution:
    """Return the solution with the certificate that holds over all assignments."""
    certificate = replace(
        solution.certificate, bound_ns=bound.value_ns, method=bound.method, witness=bound.witness
    )
    return replace(solution, certificate=certificate, variants=assignment, offered=offered)
