"""Cuts chosen with the order: cut -> quick plan -> plan, with a bound over all cuts.

A model in small pieces (`zbcompile.schedule.cuts`) is joined into stages. Cuts are ranked by quick plans: a
climb from several beginnings, by moving pieces from one stage to another. The best of them are planned
a little longer, the best of these in full. The bound (`zbcompile.planner.bounds.cuts`) holds for all cuts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from zbcompile.errors import InfeasibleError
from zbcompile.planner.assignments import bound_of
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.bounds.cuts import best_cut, least_overflow, shared_bound
from zbcompile.planner.core.instance import Fusing
from zbcompile.planner.improve.halving import Anneal
from zbcompile.planner.incumbent import PlanState, Progress
from zbcompile.planner.parts import search
from zbcompile.planner.plan import plan, quick_value
from zbcompile.planner.portfolio import QUICK, names_to_leave_out
from zbcompile.planner.run import Effort, Options, Run
from zbcompile.planner.variants import Relay
from zbcompile.schedule.cuts import CutProblem
from zbcompile.schedule.least_memory import check_caps, least_headroom
from zbcompile.schedule.limits import check_pieces, check_plannable, check_seed
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Solution
from zbcompile.schedule.speeds import AS_PROFILED

__all__ = ["plan_cuts", "quick_cuts"]

Sizes = tuple[int, ...]
"""Pieces of every stage."""

_TRIES = 60
"""Quick plans per level of effort."""

_SHORT_PLANS = 6
"""Cuts planned a little longer, per level of effort."""

_FINALISTS = 2
"""Most cuts planned in full."""

_NO_LIMIT_S = 1e6
"""Seconds for what is counted in tries alone."""

_ABOUT_ONE_CUT = ("quick_crossing", "crossing", "from_below")
"""Parts that raise the bound of one cut: the bound over all cuts gains nothing."""


def plan_cuts(
    task: CutProblem,
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
    observer: Callable[[Progress], None] | None = None,
    fuse: str | Fusing = Fusing.AUTO,
    level: int | None = None,
    without: Collection[str] = (),
) -> Solution:
    """Choose the cuts and the order.

    Parameters
    ----------
    task
        The pieces and the rest of the problem.
    time_limit_s, seed, observer, fuse, level, without
        As in `zbcompile.planner.plan.plan`.

    Returns
    -------
    Solution
        The order of the stages that were cut, with ``cuts``. The bound of its certificate holds for every
        cut; where there is one only, it is that of the order alone.

    Raises
    ------
    InfeasibleError
        No cut fits under the caps, or none of those tried where ranks have several stages.
    NoOrderError, UsageError
        As in `zbcompile.planner.plan.plan`.
    """
    check_seed(seed)
    check_plannable(task.frame)
    check_pieces(task.pieces)
    fusing, count = Fusing.of(fuse), task.frame.num_stages
    level_here = max(1, round(time_limit_s / 10)) if level is None else level
    if task.pieces.num_stages == count:
        only = (1,) * count
        found = plan(
            task.problem(only),
            time_limit_s=time_limit_s,
            seed=seed,
            observer=observer,
            fuse=fusing,
            level=level,
            without=without,
        )
        return replace(found, cuts=task.cuts(only))
    options = Options(seed, fusing, names_to_leave_out(without), level=level)
    relay = Relay(observer, time_limit_s)
    bound, start = _bound(task, fusing)
    relay.bound = bound.value_ns
    ranking = _Ranking(task, bound, options, lambda: relay.seconds_left() < 0.65 * time_limit_s)
    finalists = _ranked(ranking, start, level_here, relay)
    chosen: tuple[Solution, Sizes] | None = None
    for k, sizes in enumerate(finalists):
        if chosen is not None and relay.seconds_left() <= 0:
            break
        solution = plan(
            task.problem(sizes),
            time_limit_s=max(0.2, relay.seconds_left() / (len(finalists) - k)),
            seed=seed,
            observer=relay,
            fuse=fusing,
            level=level_here,
            without={*without, *_ABOUT_ONE_CUT},
        )
        if chosen is None or solution.certificate.value_ns < chosen[0].certificate.value_ns:
            chosen = solution, sizes
        if chosen[0].certificate.value_ns <= bound.value_ns:
            break
    assert chosen is not None
    return _certified(*chosen, task, bound)


def quick_cuts(task: CutProblem, *, seed: int = 0, tries: int = _TRIES) -> Sizes:
    """Return the cut that quick plans prefer, in counted tries: the same wherever it is asked for.

    Raises
    ------
    InfeasibleError
        As `plan_cuts`.
    """
    if task.pieces.num_stages == task.frame.num_stages:
        return (1,) * task.frame.num_stages
    bound, start = _bound(task, Fusing.AUTO)
    ranking = _Ranking(task, bound, Options(seed), lambda: False)
    ranking.climb(start, tries)
    return ranking.best_first(start)[0]


def _bound(task: CutProblem, fusing: Fusing) -> tuple[Bound, Sizes]:
    """Return the bound over all cuts, and the cut to begin with."""
    balanced = _balanced(task)
    if not task.in_order:
        return shared_bound(task), _fitting(task, balanced, fusing)
    best = best_cut(task)
    if best is not None:
        return best.bound, best.sizes
    closest = least_overflow(task)
    try:
        check_caps(task.problem(closest))
    except InfeasibleError as error:
        text = f"no cut fits, nor does the closest, with {' '.join(map(str, closest))} pieces a stage"
        raise InfeasibleError(
            f"{text}: {error.what}",
            where=error.where,
            needed=error.needed,
            given=error.given,
            fix=f"raise the cap of {error.where} to {error.needed} bytes, or use more ranks",
        ) from None
    raise AssertionError("the closest cut fits")


def _fitting(task: CutProblem, sizes: Sizes, fusing: Fusing) -> Sizes:
    """Return a cut changed until it fits under the caps, or as close to that as moves of pieces come."""

    def above(cut: Sizes) -> int:
        """Return the bytes above the caps, of all ranks."""
        problem, total = task.problem(cut), 0
        for rank, cap in enumerate(problem.caps):
            if cap is not None:
                need = least_headroom(problem, rank, fusing=fusing is not Fusing.NEVER)
                total += max(0, problem.static_bytes(rank) + need - cap)
        return total

    here = above(sizes)
    while here:
        closer = next((cut for cut in _around(sizes) if above(cut) < here), None)
        if closer is None:
            return sizes
        sizes, here = closer, above(closer)
    return sizes


def _balanced(task: CutProblem) -> Sizes:
    """Return the cut whose stages' work, by the speed of their ranks, is shared best."""
    pieces, rank_of = task.pieces.stages, task.frame.placement.rank_of
    speeds = task.speeds or (AS_PROFILED,) * task.frame.num_ranks
    work = [0, *accumulate(piece.work_ns for piece in pieces)]
    count, stages = len(pieces), len(rank_of)

    def filled(most: int) -> list[int] | None:
        """Return the ends of stages that take at most ``most`` each, None if some piece is left."""
        ends, here = [], 0
        for stage in range(stages):
            last = count - (stages - 1 - stage)
            end = here + 1
            while end < last and (work[end + 1] - work[here]) * AS_PROFILED <= most * speeds[rank_of[stage]]:
                end += 1
            ends.append(end)
            here = end
        tail = (work[count] - work[ends[-2] if stages > 1 else 0]) * AS_PROFILED
        fits = all(
            (work[end] - work[begin]) * AS_PROFILED <= most * speeds[rank_of[stage]]
            for stage, (begin, end) in enumerate(pairwise([0, *ends]))
        )
        return ends if ends[-1] == count and fits and tail <= most * speeds[rank_of[-1]] else None

    low, high = 0, 1 + work[-1] * AS_PROFILED // min(speeds)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if filled(middle) is not None else (middle + 1, high)
    ends = filled(low)
    assert ends is not None
    return tuple(b - a for a, b in pairwise([0, *ends]))


class _Ranking:
    """Values of cuts by a quick plan each, none twice.

    Attributes
    ----------
    values
        Cut -> value of its quick plan; None where none fits, or its own bound is no better than the best.
    """

    def __init__(self, task: CutProblem, bound: Bound, options: Options, over: Callable[[], bool]) -> None:
        self.task, self.bound, self.options, self.over = task, bound, options, over
        self.values: dict[Sizes, int | None] = {}
        self.best: tuple[int, Sizes] | None = None
        self.plans = 0

    @property
    def proved(self) -> bool:
        """Whether no cut can be better."""
        return self.best is not None and self.best[0] <= self.bound.value_ns

    def value(self, sizes: Sizes) -> int | None:
        """Return the value of a cut's quick plan, None where it has none that matters."""
        if sizes not in self.values:
            self.values[sizes] = value = self._value(sizes)
            if value is not None and (self.best is None or (value, sizes) < self.best):
                self.best = value, sizes
        return self.values[sizes]

    def fits(self, sizes: Sizes) -> bool:
        """Return whether some order of a cut fits under the caps."""
        try:
            check_caps(self.task.problem(sizes), fusing=self.options.fusing is not Fusing.NEVER)
        except InfeasibleError:
            return False
        return True

    def _value(self, sizes: Sizes) -> int | None:
        if not self.fits(sizes):
            return None
        problem = self.task.problem(sizes)
        if self.best is not None and bound_of(problem).value_ns >= self.best[0]:
            return None
        self.plans += 1
        return quick_value(problem, self.options, _NO_LIMIT_S)

    def climb(self, start: Sizes, tries: int) -> None:
        """Climb from the start, then from the balanced cut, then from changes to the best cut."""
        rng = random.Random(self.options.seed)
        fruitless = 0
        for begin in (start, _balanced(self.task)):
            self._climb(begin, tries)
        while self.best is not None and fruitless < 3 and not self._ended(tries):
            before = self.best
            self._climb(_changed(before[1], rng), tries)
            fruitless = 0 if self.best < before else fruitless + 1

    def _climb(self, here: Sizes, tries: int) -> None:
        value, better = self.value(here), True
        while better and not self._ended(tries):
            better = False
            for other in _around(here):
                if self._ended(tries):
                    return
                found = self.value(other)
                if found is not None and (value is None or found < value):
                    here, value, better = other, found, True
                    break

    def _ended(self, tries: int) -> bool:
        return self.plans >= tries or len(self.values) >= 20 * tries or self.proved or self.over()

    def best_first(self, start: Sizes) -> list[Sizes]:
        """Return the cuts with a value, best first; the start if there is none.

        Raises
        ------
        InfeasibleError
            Not even the start fits.
        """
        known = sorted((value, sizes) for sizes, value in self.values.items() if value is not None)
        if not known:
            check_caps(self.task.problem(start), fusing=self.options.fusing is not Fusing.NEVER)
        return [sizes for _, sizes in known] or [start]


def _around(sizes: Sizes) -> Iterator[Sizes]:
    """Yield the cuts with pieces moved from a stage to a neighbour, then to any other, many pieces first."""
    step, count = max(1, max(sizes) // 4), len(sizes)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    pairs.sort(key=lambda pair: abs(pair[0] - pair[1]) > 1)
    while step:
        for giver, taker in pairs:
            if sizes[giver] > step:
                yield _moved(sizes, giver, taker, step)
        step //= 2


def _moved(sizes: Sizes, giver: int, taker: int, step: int) -> Sizes:
    changed = list(sizes)
    changed[giver] -= step
    changed[taker] += step
    return tuple(changed)


def _changed(sizes: Sizes, rng: random.Random) -> Sizes:
    """Return a cut with a few pieces moved at random."""
    for _ in range(3):
        giver, taker = rng.randrange(len(sizes)), rng.randrange(len(sizes))
        if giver != taker and sizes[giver] > 1:
            sizes = _moved(sizes, giver, taker, 1)
    return sizes


def _ranked(ranking: _Ranking, start: Sizes, level: int, relay: Relay) -> list[Sizes]:
    """Return the cuts to plan in full, best first."""
    values: list[tuple[int, Sizes]] = []
    known = [start]
    try:
        if ranking.fits(start):
            _plan_briefly(ranking, start, values, relay)
        if values and values[0][0] <= ranking.bound.value_ns:
            return [start]
        ranking.climb(start, _TRIES * level)
        known = ranking.best_first(start)
        if ranking.proved or len(known) == 1:
            return known[:1]
        for sizes in known[: _SHORT_PLANS * level]:
            if relay.seconds_left() < 0.4 * relay.limit or (
                values and min(values)[0] <= ranking.bound.value_ns
            ):
                break
            if sizes != start:
                _plan_briefly(ranking, sizes, values, relay)
    except KeyboardInterrupt:
        relay(Progress(None, 0, 0.0, "interrupted", PlanState.INTERRUPTED))
        known = ranking.best_first(start)
    values.sort()
    best = [sizes for value, sizes in values if value <= 1.01 * values[0][0]]
    return (best or known)[:_FINALISTS]


def _plan_briefly(ranking: _Ranking, sizes: Sizes, values: list[tuple[int, Sizes]], relay: Relay) -> None:
    """Add the value of a cut's short plan, unless its own bound is no better than the best."""
    problem = ranking.task.problem(sizes)
    if values and bound_of(problem).value_ns >= min(values)[0]:
        return
    value = _short_value(problem, ranking.options)
    if value is not None:
        values.append((value, sizes))
        relay(Progress(min(values)[0], 0, 0.0, "cuts"))


def _short_value(problem: Problem, options: Options) -> int | None:
    """Return the value of the first orders, the best two of them annealed for a moment."""
    effort = replace(Effort.quick(problem), list_schedules=24, anneal=1000, orders=2)
    run = Run(problem, options, time_limit_s=_NO_LIMIT_S, effort=effort)
    search(run, (*QUICK, Anneal()))
    return run.value


def _certified(solution: Solution, sizes: Sequence[int], task: CutProblem, bound: Bound) -> Solution:
    """Return the solution with its cuts and the certificate that holds over all of them."""
    certificate = replace(
        solution.certificate, bound_ns=bound.value_ns, method=bound.method, witness=bound.witness
    )
    return replace(solution, certificate=certificate, cuts=task.cuts(sizes))
