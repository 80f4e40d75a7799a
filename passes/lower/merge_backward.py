"""Merge a B and its W that stands right behind it into one BW, where that costs nothing.

``2B0 2W0 --> 2BW0``. Contract in: a legal compute order under its caps. Contract out: the same order with
some pairs merged, still under the caps and never longer (span or makespan, as the problem's objective says),
in which no further group of merges tried was free. No torch is loaded.

A fused backward saves what the profile says (one collective, one gather, one launch), but hands its gradient
on only when it ends. So where a neighbour waits for the gradient, splitting stays better (arXiv 2401.10241,
section 4).

Every group of merges is judged as a whole order, so judgements are counted: their number times the actions of
the order stays below `MOST_JUDGED`. Where that could cut the search short, large groups come first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from zbcompile.schedule.check import is_well_formed, judge
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate, timeline_of

__all__ = ["MOST_JUDGED", "merge_backward", "merge_backward_timed"]

MOST_JUDGED = 1_000_000
"""Most actions that are judged in all, every judgement of an order counting all of its actions."""

Pair = tuple[int, int]
"""Rank, and position of the B in its order; the W stands behind it."""

Times = Callable[[Sequence[Pair]], int | None]
"""Pairs to merge -> the value of the order in ns, or None if it hangs or exceeds a cap."""


def merge_backward(schedule: Schedule, problem: Problem) -> Schedule:
    """Return the order with as many pairs merged as are free.

    Pairs are tried by halving: all at once, else each half by itself.
    """
    return merge_backward_timed(schedule, problem)[0]


def merge_backward_timed(schedule: Schedule, problem: Problem) -> tuple[Schedule, int]:
    """Return the order with as many pairs merged as are free, and its value in ns."""
    pairs = [
        (rank, k)
        for rank, row in enumerate(schedule.order)
        for k in range(len(row) - 1)
        if _is_pair(row[k], row[k + 1]) and not _takes_longer(row[k], problem)
    ]
    quick = _quick_times(schedule, problem)
    times = quick or _judged_times(schedule, problem)
    known = None if quick is None else quick(())
    value = limit = simulate(schedule, problem).value_ns if known is None else known
    left = MOST_JUDGED // max(1, sum(map(len, schedule.order)))
    depth_first = 2 * len(pairs) - 1 <= left
    groups, taken = deque([pairs] if pairs else []), list[Pair]()
    while groups and left > 0:
        group, left = groups.popleft(), left - 1
        length = times([*taken, *group])
        if length is not None and length <= limit:
            taken, value = [*taken, *group], length
        elif len(group) > 1:
            half = len(group) // 2
            if depth_first:
                groups.extendleft((group[half:], group[:half]))
            else:
                groups.extend((group[:half], group[half:]))
    return (_merged(schedule, taken) if taken else schedule), value


def _judged_times(schedule: Schedule, problem: Problem) -> Times:
    """Return what judges and times the order with some pairs merged."""

    def times(pairs: Sequence[Pair]) -> int | None:
        _, graph = judge(_merged(schedule, pairs), problem)
        return None if graph is None else timeline_of(graph).value_ns

    return times


def _quick_times(schedule: Schedule, problem: Problem) -> Times | None:
    """Return the same by the planner's clocks, for orders whose microbatches are numbered as it numbers them.

    Those clocks equal `simulate` by test. None for other orders, and where microbatches differ in cost.
    """
    from zbcompile.planner.core.instance import BW, Instance, is_numbered, to_codes
    from zbcompile.planner.core.score import fits
    from zbcompile.planner.core.scorer import fast_value

    alike = not problem.microbatch_costs
    if not alike or not is_well_formed(schedule, problem) or not is_numbered(schedule):
        return None
    codes, instance, value = to_codes(schedule), Instance.of(problem), fast_value(problem)

    def times(pairs: Sequence[Pair]) -> int | None:
        merged = [list(row) for row in codes]
        for rank, k in sorted(pairs, reverse=True):
            merged[rank][k : k + 2] = [(BW, merged[rank][k][1])]
        return value(merged) if fits(instance, merged) else None

    return times


def _is_pair(first: Action, second: Action) -> bool:
    return (
        first.kind is Kind.BACKWARD_INPUT
        and second.kind is Kind.BACKWARD_WEIGHT
        and (first.stage, first.microbatch) == (second.stage, second.microbatch)
    )


def _takes_longer(action: Action, problem: Problem) -> bool:
    """Return whether BW of the action's stage takes longer than B and W."""
    cost = problem.profile.stages[action.stage]
    return cost.full_backward_ns > cost.backward_input_ns + cost.backward_weight_ns


def _merged(schedule: Schedule, pairs: Sequence[Pair]) -> Schedule:
    """Return the order with each of ``pairs`` as one BW."""
    first, gone = set(pairs), {(rank, k + 1) for rank, k in pairs}
    order = []
    for rank, row in enumerate(schedule.order):
        line = []
        for k, action in enumerate(row):
            if (rank, k) in first:
                line.append(Action(Kind.FULL_BACKWARD, action.stage, action.microbatch))
            elif (rank, k) not in gone:
                line.append(action)
        order.append(line)
    return Schedule.of(schedule.placement, schedule.num_microbatches, order)
