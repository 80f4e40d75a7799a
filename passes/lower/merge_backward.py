"""Merge a B and its W that stands right behind it into one BW, where that costs nothing.

``2B0 2W0 --> 2BW0``. Contract in: a legal compute order under its caps. Contract out: the same order with
some pairs merged, still under the caps and never longer (span or makespan, as the problem's objective says),
in which no further group of merges tried was free. No torch is loaded.

A fused backward saves what the profile says (one collective, one gather, one launch), but hands its gradient
on only when it ends. So where a neighbour waits for the gradient, splitting stays better (arXiv 2401.10241,
section 4).
"""

from __future__ import annotations

from collections.abc import Sequence

from zbcompile.schedule.check import judge
from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate, timeline_of

__all__ = ["merge_backward"]

_WORK = 1 << 18
"""Tries times actions that merging may cost: about three seconds."""

Pair = tuple[int, int]
"""Rank, and position of the B in its order; the W stands behind it."""


def merge_backward(schedule: Schedule, problem: Problem) -> Schedule:
    """Return the order with as many pairs merged as are free.

    Pairs are tried by halving: all at once, else each half by itself, down to one pair; in long orders, where
    each try takes longer, down to groups of which `_WORK` allows a try for each.
    """
    pairs = [
        (rank, k)
        for rank, row in enumerate(schedule.order)
        for k in range(len(row) - 1)
        if _is_pair(row[k], row[k + 1]) and not _takes_longer(row[k], problem)
    ]
    limit = simulate(schedule, problem).value_ns
    actions = sum(map(len, schedule.order))
    least = max(1, 2 * len(pairs) * actions // _WORK)
    return _merged(schedule, _free(schedule, problem, pairs, [], limit, least))


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


def _free(
    schedule: Schedule, problem: Problem, pairs: Sequence[Pair], taken: list[Pair], limit: int, least: int
) -> list[Pair]:
    """Return ``taken`` and those of ``pairs`` that can be merged as well within ``limit`` ns.

    Groups of ``least`` pairs or fewer are not halved.
    """
    if not pairs:
        return taken
    merged = _merged(schedule, [*taken, *pairs])
    _, graph = judge(merged, problem)
    if graph is not None and timeline_of(graph).value_ns <= limit:
        return [*taken, *pairs]
    if len(pairs) <= least:
        return taken
    half = len(pairs) // 2
    taken = _free(schedule, problem, pairs[:half], taken, limit, least)
    return _free(schedule, problem, pairs[half:], taken, limit, least)


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
