"""The order in which gradients of the microbatches are summed.

It is that of the microbatches' numbers, as in a plain loop over them. Where microbatches differ in cost their
order is planned, and the sums follow it: a plain loop in that order has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zbcompile.schedule.ir import Kind, Schedule
from zbcompile.schedule.problem import Problem

__all__ = ["numbered_by_turn", "renumbered", "sum_order"]

_BACKWARD = (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)


def sum_order(schedule: Schedule, problem: Problem) -> tuple[int, ...]:
    """Return the microbatches in the order of the sums.

    Where microbatches differ in cost and every stage takes them backward in one order, that order; else
    0, 1, 2, ...
    """
    given = tuple(range(schedule.num_microbatches))
    if not problem.microbatch_costs:
        return given
    rows: list[list[int]] = [[] for _ in range(schedule.num_stages)]
    for _, _, action in schedule.actions():
        if action.kind in _BACKWARD:
            rows[action.stage].append(action.microbatch)
    return tuple(rows[0]) if all(row == rows[0] for row in rows) and sorted(rows[0]) == list(given) else given


def numbered_by_turn(schedule: Schedule, problem: Problem) -> Schedule:
    """Return the order with every microbatch called by its place in the sums, for what counts their turns."""
    if not problem.microbatch_costs:
        return schedule
    order = sum_order(schedule, problem)
    turns = [0] * len(order)
    for turn, microbatch in enumerate(order):
        turns[microbatch] = turn
    return schedule if turns == list(range(len(order))) else renumbered(schedule, turns)


def renumbered(schedule: Schedule, names: Sequence[int]) -> Schedule:
    """Return the order with microbatch i called ``names[i]``; actions of whole stages have none."""
    rows = [
        [a if a.kind.is_of_stage else replace(a, microbatch=names[a.microbatch]) for a in row]
        for row in schedule.order
    ]
    return Schedule.of(schedule.placement, schedule.num_microbatches, rows)
