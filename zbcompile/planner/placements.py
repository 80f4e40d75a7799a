"""Placement ``auto``: plan for every placement that the stages and ranks allow, and keep the best.

All are judged under the same caps. The most promising by its lower bound goes first; a placement whose bound
is no better than an order already found is settled without a search.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from zbcompile.errors import InfeasibleError, UsageError
from zbcompile.planner.core.compiled import SearchClock
from zbcompile.planner.core.instance import Fusing
from zbcompile.planner.incumbent import PlanState, Progress
from zbcompile.planner.joint_bound import bounds_in, joint_bound
from zbcompile.planner.plan import plan
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.limits import check_plannable, check_seed
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Solution
from zbcompile.schedule.speeds import on_ranks

__all__ = ["AutoResult", "Tried", "contiguous", "placements_for", "plan_auto"]

_MOST_CUTS = 20_000_000
"""Ranks times pairs of stages up to which all ways to cut are compared."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One placement and what came of it.

    Attributes
    ----------
    placement, name
        The placement, and what it is called.
    value_ns
        Value of its best order, ``None`` if it was not searched.
    bound_ns
        Its lower bound, ``None`` if nothing fits.
    note
        Why it was not searched, or why nothing fits.
    """

    placement: Placement
    name: str
    value_ns: int | None
    bound_ns: int | None
    note: str = ""

    def __str__(self) -> str:
        if self.bound_ns is None:
            return f"{self.name}: {self.note}"
        value = "not searched" if self.value_ns is None else f"{self.value_ns:,} ns"
        text = f"{self.name}: {value}, bound {self.bound_ns:,} ns"
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True, slots=True)
class AutoResult:
    """The best solution and all that was tried.

    Attributes
    ----------
    solution
        The best solution.
    tried
        All placements in the order in which they were tried.
    """

    solution: Solution
    tried: tuple[Tried, ...]

    @property
    def bound_ns(self) -> int:
        """The least bound of the placements that fit: no order of any of them is shorter."""
        return min(t.bound_ns for t in self.tried if t.bound_ns is not None)


def contiguous(problem: Problem, ranks: int, speeds: Sequence[int] = ()) -> Placement:
    """Return the placement of neighbouring stages with the busiest rank's work as small as possible.

    ``speeds`` of the ranks in millionths; empty: all alike.
    """
    profile = problem.profile
    work = [
        min(stage.backward_input_ns + stage.backward_weight_ns, stage.full_backward_ns) + stage.forward_ns
        for stage in profile.stages
    ]
    total = [0, *itertools.accumulate(work)]
    count = len(work)
    if ranks * count * count > _MOST_CUTS and not speeds:
        return _filled(work, ranks)
    price = [math.lcm(*speeds) // speed for speed in speeds] or [1] * ranks
    best: list[list[tuple[int, tuple[int, ...]]]] = [[(price[0] * total[k], (k,)) for k in range(count + 1)]]
    for part in range(1, ranks):
        row: list[tuple[int, tuple[int, ...]]] = [(sum(price) * total[count] + 1, ())] * (count + 1)
        for end in range(part + 1, count + 1):
            row[end] = min(
                (max(best[-1][cut][0], price[part] * (total[end] - total[cut])), (*best[-1][cut][1], end))
                for cut in range(part, end)
            )
        best.append(row)
    ends = best[-1][count][1]
    return Placement(tuple(sum(end <= s for end in ends) for s in range(count)))


def _filled(work: Sequence[int], ranks: int) -> Placement:
    """Return the same by filling one rank after the other up to the least work that does."""

    def fill(most: int) -> list[int] | None:
        rank_of: list[int] = []
        rank = done = 0
        for s, length in enumerate(work):
            left = len(work) - s
            if rank_of and (done + length > most or left == ranks - 1 - rank) and rank < ranks - 1:
                rank, done = rank + 1, 0
            done += length
            if done > most:
                return None
            rank_of.append(rank)
        return rank_of

    low, high = max(work), sum(work)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fill(middle) is not None else (middle + 1, high)
    filled = fill(low)
    assert filled is not None
    return Placement(tuple(filled))


def placements_for(problem: Problem, ranks: int, speeds: Sequence[int] = ()) -> list[tuple[str, Placement]]:
    """Return the placements to try, named: contiguous (linear for one stage per rank), looped and V.

    No two are alike. Where the stages do not divide, looped and V leave some ranks with one stage fewer.
    Where ranks differ in speed and have one stage each, also ``matched``: more work on faster ranks.

    Raises
    ------
    UsageError
        There are more ranks than stages, or none.
    """
    stages = problem.profile.num_stages
    if not 1 <= ranks <= stages:
        raise UsageError(
            f"{ranks} ranks cannot share {stages} stages", needed=f"1 to {stages} ranks", given=ranks
        )
    per_rank = -(-stages // ranks)
    named = [
        ("linear" if stages == ranks else "contiguous", contiguous(problem, ranks, speeds)),
        ("v", Placement(Placement.v(ranks, per_rank).rank_of[:stages])),
        ("looped", Placement(Placement.looped(ranks, per_rank).rank_of[:stages])),
    ]
    if len(set(speeds)) > 1 and stages == ranks:
        named.append(("matched", _matched(problem, speeds)))
    result: list[tuple[str, Placement]] = []
    for name, placement in named:
        if all(placement != other for _, other in result):
            result.append((name, placement))
    return result


def _matched(problem: Problem, speeds: Sequence[int]) -> Placement:
    """Return the placement that gives the stage with the most work to the fastest rank, and so on."""
    work = [stage.work_ns for stage in problem.profile.stages]
    heavy = sorted(range(len(work)), key=lambda s: (-work[s], s))
    fast = sorted(range(len(speeds)), key=lambda r: (-speeds[r], r))
    rank_of = [0] * len(work)
    for stage, rank in zip(heavy, fast, strict=True):
        rank_of[stage] = rank
    return Placement(tuple(rank_of))


def plan_auto(
    problem: Problem,
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
    observer: Callable[[Progress], None] | None = None,
    fuse: str | Fusing = Fusing.AUTO,
    variants: bool = True,
    without: Collection[str] = (),
    speeds: Sequence[int] = (),
) -> AutoResult:
    """Plan for every placement of the problem's stages on its ranks.

    The time left is shared evenly among the placements still to be searched.

    Parameters
    ----------
    problem
        What to plan for; its own placement only says how many ranks there are.
    time_limit_s, seed, observer, fuse, variants, without
        As in `zbcompile.planner.plan.plan`.
    speeds
        Speeds of the ranks in millionths (`zbcompile.schedule.speeds`): the problem's times are for a rank as
        profiled, those of the solution for the ranks of its placement. Empty: all as profiled.

    Returns
    -------
    AutoResult
        The best solution, and all that was tried.

    Raises
    ------
    InfeasibleError
        No placement fits under the caps; the error is that of the first placement.
    """
    check_plannable(problem)
    check_seed(seed)
    started, searched, fusing = time.monotonic(), SearchClock(), Fusing.of(fuse)
    order, tried, refused = [], [], None
    named = placements_for(problem, problem.num_ranks, speeds)
    for rank, (name, placement) in enumerate(named):
        here = problem.with_(placement=placement, profile=on_ranks(problem.profile, placement, speeds))
        found_bound = joint_bound(here, bounds_in(here, time_limit_s / len(named)))
        order.append((found_bound.value_ns, rank, name, here))
    order.sort(key=lambda entry: entry[:2])
    relay = _Relay(order[0][0], observer, started)
    best: Solution | None = None
    for k, (bound, _, name, here) in enumerate(order):
        if best is not None and bound >= best.certificate.value_ns:
            tried.append(Tried(here.placement, name, None, bound, "its bound is no better"))
            continue
        if best is not None and relay.interrupted:
            tried.append(Tried(here.placement, name, None, bound, "interrupted"))
            continue
        left = time_limit_s - searched.seconds
        if best is not None and left <= 0:
            tried.append(Tried(here.placement, name, None, bound, "the time is over"))
            continue
        limit = max(0.2, left / (len(order) - k))
        relay.name = name
        try:
            found = plan(
                here,
                time_limit_s=limit,
                seed=seed,
                observer=relay,
                fuse=fusing,
                variants=variants,
                without=without,
            )
        except InfeasibleError as error:
            refused = refused or error
            tried.append(Tried(here.placement, name, None, None, error.what))
            continue
        certificate = found.certificate
        tried.append(Tried(here.placement, name, certificate.value_ns, certificate.bound_ns))
        if best is None or certificate.value_ns < best.certificate.value_ns:
            best = replace(found, origin=f"{name}: {found.origin}")
    if best is None:
        assert refused is not None
        raise refused
    return AutoResult(best, tuple(tried))


class _Relay:
    """Progress over all placements: the best of any, and a bound that holds for all of them."""

    def __init__(self, bound: int, observer: Callable[[Progress], None] | None, started: float) -> None:
        self.bound, self.observer, self.started = bound, observer, started
        self.best: int | None = None
        self.state, self.name = PlanState.SEARCHING, ""

    @property
    def interrupted(self) -> bool:
        """Whether the user ended the search."""
        return self.state is PlanState.INTERRUPTED

    def __call__(self, progress: Progress) -> None:
        if progress.state is PlanState.INTERRUPTED:
            self.state = progress.state
        if progress.best_ns is not None and (self.best is None or progress.best_ns < self.best):
            self.best = progress.best_ns
        if self.observer is not None:
            seconds = time.monotonic() - self.started
            step = progress.step if self.interrupted else f"{self.name}: {progress.step}"
            self.observer(Progress(self.best, self.bound, seconds, step, progress.state))
