"""Planning from a problem to a certified order: the portfolio is run on it, and the outcome certified."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from zbcompile.errors import InfeasibleError, UsageError
from zbcompile.planner.assignments import fixed
from zbcompile.planner.core.instance import Fusing
from zbcompile.planner.core.unequal import alike_problem
from zbcompile.planner.incumbent import Order, Progress
from zbcompile.planner.joint_bound import offers_variants
from zbcompile.planner.parts import search
from zbcompile.planner.portfolio import PORTFOLIO, QUICK, names_to_leave_out
from zbcompile.planner.run import Effort, Options, PartRun, Run, level_of
from zbcompile.planner.unequal import plan_unequal
from zbcompile.planner.variants import plan_variants
from zbcompile.schedule.least_memory import check_caps
from zbcompile.schedule.limits import check_plannable, check_seed
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.renumber import Numbering
from zbcompile.schedule.solution import Solution

MOST_LEVEL = 10_000
"""Most that can be asked for: a day's worth."""

__all__ = ["MOST_LEVEL", "PartRun", "Progress", "plan", "plan_whole", "quick_value"]


def plan(
    problem: Problem,
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
    observer: Callable[[Progress], None] | None = None,
    fuse: str | Fusing = Fusing.AUTO,
    variants: bool = True,
    level: int | None = None,
    without: Collection[str] = (),
    trace: Callable[[PartRun], None] | None = None,
) -> Solution:
    """Find the best order that the time allows, with a certificate.

    Ctrl-C ends the search and keeps the best order.

    Parameters
    ----------
    problem
        What to plan for.
    time_limit_s
        Outer limit in seconds. The search is counted in tries, more of them for a higher limit, so that the
        same seed and limit give the same bytes wherever proof or count ends the search.
    seed
        Decides all random choices.
    observer
        Called with a `Progress` at every better order or bound.
    fuse
        ``auto`` (BW where it helps), ``never`` or ``always``.
    variants
        Whether stages may run as one of their variants.
    level
        How much to search, in tries, whatever the time limit: what a limit of ten times as many seconds
        would. By default the time limit says.
    without
        Names of parts to leave out (`zbcompile.planner.portfolio.NAMES`).
    trace
        Called with a `PartRun` after every part.

    Returns
    -------
    Solution
        The order with its certificate.

    Raises
    ------
    InfeasibleError
        No order fits under the caps; names the rank and the least cap that works.
    NoOrderError
        No order was found in the time given, or by the parts that are left.
    UsageError
        The choice of fusing or the name of a part is unknown, the seed is out of range, or the problem is too
        large or the level is out of range (`zbcompile.schedule.limits`).

    Notes
    -----
    The limit cuts the search off between tries. Making, judging and bounding one order is never cut off: that
    takes about a second for every 20,000 stages times microbatches, three where sends hold up their rank. The
    limits on the size keep it to twice the time limit and two seconds.
    """
    check_plannable(problem)
    check_seed(seed)
    if level is not None and not 1 <= level <= MOST_LEVEL:
        raise UsageError("unknown level of effort", needed=f"1 to {MOST_LEVEL}", given=level)
    options = Options(seed, Fusing.of(fuse), names_to_leave_out(without), trace, level)
    numbering = Numbering.by_first_stage(problem.placement)
    if not numbering.is_same:
        try:
            found = _plan(numbering.of_problem(problem), options, time_limit_s, observer, variants)
            return numbering.back().of_solution(found)
        except InfeasibleError:  # under any numbering: it is said of the ranks as given
            pass
    return _plan(problem, options, time_limit_s, observer, variants)


def plan_whole(problem: Problem, **options: Any) -> Solution:
    """Plan as `plan` does, for a comparison: what Ctrl-C cut short cannot be held against whole plans.

    ``options``: those of `plan`, but for the observer.

    Raises
    ------
    KeyboardInterrupt
        Ctrl-C.
    """
    reports: list[Progress] = []
    found = plan(problem, **options, observer=reports.append)
    if any(report.interrupted for report in reports):
        raise KeyboardInterrupt
    return found


def _plan(
    problem: Problem,
    options: Options,
    time_limit_s: float,
    observer: Callable[[Progress], None] | None,
    variants: bool,
) -> Solution:
    """Plan a problem, with variants or without."""
    if not offers_variants(problem):
        return _plan_order(problem, time_limit_s, observer, options=options)
    if not variants:
        plain = fixed(problem, (0,) * problem.num_stages)
        return _plan_order(plain, time_limit_s, observer, options=options)
    return plan_variants(
        problem,
        functools.partial(_plan_order, options=options),
        functools.partial(_quick_order, options=options),
        time_limit_s=time_limit_s,
        level=options.level,
        observer=observer,
        fusing=options.fusing is not Fusing.NEVER,
    )


def _plan_order(
    problem: Problem,
    time_limit_s: float,
    observer: Callable[[Progress], None] | None,
    known: Sequence[Order] = (),
    *,
    first: bool = False,
    options: Options,
) -> Solution:
    """Plan a problem without variants.

    Where microbatches are alike, known orders are offered, before the search (``first``) or after it.
    """
    if problem.microbatch_costs:
        return plan_unequal(
            problem,
            functools.partial(_plan_order, options=options),
            time_limit_s=time_limit_s,
            level=level_of(options.level, time_limit_s),
            seed=options.seed,
            fusing=options.fusing,
            without=options.without,
            observer=observer,
        )
    check_caps(problem, fusing=options.fusing is not Fusing.NEVER)
    run = Run(problem, options, time_limit_s=time_limit_s, observer=observer)
    try:
        if first:
            run.incumbent.offer_all(known)
        search(run, PORTFOLIO)
    except KeyboardInterrupt:
        run.incumbent.interrupt()
    run.incumbent.offer_all(known)
    return run.incumbent.solution()


def quick_value(problem: Problem, options: Options, time_limit_s: float = 2.0) -> int | None:
    """Return the value of the first orders alone, to rank assignments of variants and cuts.

    Where microbatches differ, of the problem in which they are alike.
    """
    found = _quick_order(problem, time_limit_s, options=options)
    return None if found is None else found[0]


def _quick_order(problem: Problem, time_limit_s: float, *, options: Options) -> tuple[int, Order] | None:
    """Return the same value with its order."""
    problem = alike_problem(problem)
    run = Run(problem, options, time_limit_s=time_limit_s, effort=Effort.quick(problem))
    search(run, QUICK)
    order = run.incumbent.order
    return None if order is None or run.value is None else (run.value, order)
