"""Gradients of weights that an order holds beyond what its plan counts.

A plan counts one gradient per parameter, in ``static_bytes``: the sum over the microbatches. It is taken in
microbatch order, so that it has the bits of a plain loop (`zbcompile.runtime.gradients`). Where a W or BW
runs before that of an earlier microbatch of its stage, its gradients wait, and no plan counts them::

    0BW1 0BW2 0W0   -->   after 0BW2 two sets of stage 0's gradients are held, one of them beyond the plan

A set is one gradient for every parameter of a stage. No torch is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbcompile.schedule.ir import Action, Kind, Schedule

__all__ = ["held_bytes", "held_sets", "held_words"]

_MOST_NAMED = 4
"""Most stages that `held_words` names."""


def held_sets(schedule: Schedule) -> tuple[int, ...]:
    """Return per stage the most sets of gradients that are held at once beyond the one that is counted."""
    most = [0] * schedule.num_stages
    for row in schedule.order:
        for stage, sets in _after_each(row):
            most[stage] = max(most[stage], sets)
    return tuple(most)


def held_bytes(schedule: Schedule, gradient_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return per rank the most bytes of gradients that are held at once beyond those that are counted.

    Parameters
    ----------
    gradient_bytes
        Bytes of one set of every stage.
    """
    most = [0] * schedule.num_ranks
    for rank, row in enumerate(schedule.order):
        held, now = dict[int, int](), 0
        for stage, sets in _after_each(row):
            now += (sets - held.get(stage, 0)) * gradient_bytes[stage]
            held[stage] = sets
            most[rank] = max(most[rank], now)
    return tuple(most)


def held_words(sets: Sequence[int], stages: Sequence[int] | None = None) -> str:
    """Say what is held beyond the plan, such as ``up to 6 gradients of stage 1's weights, 5 of stage 2's``.

    Parameters
    ----------
    sets
        What `held_sets` returned.
    stages
        The stages to speak of; all if left out.

    Returns
    -------
    str
        Empty where nothing is held.
    """
    found = [(stage, sets[stage]) for stage in stages or range(len(sets)) if sets[stage]]
    if not found:
        return ""
    first, count = found[0]
    words = [f"up to {count} gradient{'s' if count > 1 else ''} of stage {first}'s weights"]
    words += [f"{count} of stage {stage}'s" for stage, count in found[1:_MOST_NAMED]]
    more = found[_MOST_NAMED:]
    if more:
        words.append(f"at most {max(count for _, count in more)} of each of {len(more)} more stages'")
    return ", ".join(words)


def _after_each(row: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """Yield after each W and BW its stage and how many sets of the stage are held beyond one."""
    due: dict[int, int] = {}
    early: dict[int, set[int]] = {}
    for action in row:
        if action.kind is not Kind.BACKWARD_WEIGHT and action.kind is not Kind.FULL_BACKWARD:
            continue
        stage = action.stage
        waiting, turn = early.setdefault(stage, set()), due.get(stage, 0)
        waiting.add(action.microbatch)
        while turn in waiting:
            waiting.remove(turn)
            turn += 1
        due[stage] = turn
        yield stage, len(waiting) if turn else len(waiting) - 1
