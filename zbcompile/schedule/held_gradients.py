"""Gradients of weights that wait for their turn in the sum.

Gradients are summed in microbatch order (``accumulate="order"``), so that the sum has the bits of a plain
loop. Where a W or BW runs before that of an earlier microbatch of its stage, its gradients wait::

    0BW1 0BW2 0W0   -->   after 0BW2 two sets of stage 0's gradients are held, one of them beside the sum's

A set is one gradient for every parameter of a stage. Static bytes count one set: the sum, or before it begins
the first set that waits. The others count `StageCost.gradient_bytes` each (`zbcompile.schedule.memory`). With
``accumulate="memory"`` every gradient is added as it comes, and none waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from zbcompile.schedule.ir import Action, Kind, Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.sum_order import numbered_by_turn

__all__ = ["MAKES_GRADIENTS", "SumInOrder", "gradients_words", "held_sets", "held_words", "set_bytes"]

MAKES_GRADIENTS = (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD)
"""The kinds of actions whose gradients go into the sum of their stage."""

_MOST_NAMED = 4
"""Most stages that `held_words` names."""


class SumInOrder:
    """The sum of one stage's gradients: whose turn it is, and who waits."""

    def __init__(self) -> None:
        self._turn = 0
        self._waiting: set[int] = set()

    def after(self, microbatch: int) -> int:
        """Return the sets held beyond one after the gradients of a microbatch have come."""
        waiting = self._waiting
        waiting.add(microbatch)
        while self._turn in waiting:
            waiting.remove(self._turn)
            self._turn += 1
        return len(waiting) if self._turn else len(waiting) - 1


def set_bytes(problem: Problem, stage: int) -> int:
    """Return the bytes of one set of a stage's gradients that waits; 0 where none ever does."""
    return problem.profile.stages[stage].gradient_bytes if problem.accumulate == "order" else 0


def held_sets(schedule: Schedule) -> tuple[int, ...]:
    """Return per stage the most sets that are held at once beyond one, where sums keep microbatch order."""
    found = _most(chain.from_iterable(schedule.order))
    return tuple(found.get(stage, 0) for stage in range(schedule.num_stages))


def _most(actions: Iterable[Action]) -> dict[int, int]:
    """Return the same for the stages of some actions that hold any."""
    most: dict[int, int] = {}
    sums: dict[int, SumInOrder] = {}
    for action in actions:
        if action.kind in MAKES_GRADIENTS:
            held = sums.setdefault(action.stage, SumInOrder()).after(action.microbatch)
            if held > most.get(action.stage, 0):
                most[action.stage] = held
    return most


def held_words(sets: Mapping[int, int]) -> str:
    """Say which sets are held, such as ``up to 6 gradients of stage 1's weights, 5 of stage 2's``.

    Parameters
    ----------
    sets
        The most sets of every stage that holds any.

    Returns
    -------
    str
        Empty where nothing is held.
    """
    found = sorted(sets.items())
    if not found:
        return ""
    first, count = found[0]
    words = [f"up to {count} gradient{'s' if count > 1 else ''} of stage {first}'s weights"]
    words += [f"{count} of stage {stage}'s" for stage, count in found[1:_MOST_NAMED]]
    more = found[_MOST_NAMED:]
    if more:
        words.append(f"at most {max(count for _, count in more)} of each of {len(more)} more stages'")
    return ", ".join(words)


def gradients_words(schedule: Schedule, problem: Problem, rank: int | None = None) -> str:
    """Say how gradients of weights are summed where that is worth a line, and which of them wait.

    Parameters
    ----------
    rank
        The rank to speak of; all if left out.

    Returns
    -------
    str
        Empty where gradients are summed in microbatch order and none waits, as in most orders.
    """
    if problem.accumulate == "memory":
        return "gradients are summed as they come, not in microbatch order"
    schedule = numbered_by_turn(schedule, problem)
    sets = _most(chain.from_iterable(schedule.order) if rank is None else schedule.order[rank])
    if not sets:
        return ""
    if not any(stage.gradient_bytes for stage in problem.profile.stages):
        return f"beyond the plan it holds {held_words(sets)}"
    counted = held_words({stage: count for stage, count in sets.items() if set_bytes(problem, stage)})
    return f"for their turn in the sum wait {counted}, counted in the peak" if counted else ""
