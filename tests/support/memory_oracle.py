"""What a rank holds, by hand: a bag of named tensors that actions put in and take out.

It shares nothing with `zbcompile.schedule.memory`. A change of the rule is made here a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zbcompile.schedule.ir import Action
from zbcompile.schedule.problem import Problem

__all__ = ["fits_by_hand", "held_by_hand"]


def held_by_hand(problem: Problem, rank: int, row: Iterable[Action]) -> list[tuple[int, int]]:
    """Return per action (most bytes while it runs, bytes after it) on a rank, static bytes included."""
    return list(_held(problem, rank, row))


def fits_by_hand(problem: Problem, rank: int, row: Iterable[Action]) -> bool:
    """Return whether a rank stays within its cap all the time."""
    cap = problem.caps[rank]
    return cap is None or all(most <= cap for most, _ in _held(problem, rank, row))


def _held(problem: Problem, rank: int, row: Iterable[Action]) -> Iterator[tuple[int, int]]:
    stages = problem.profile.stages
    own = problem.placement.stages_of(rank)
    static = sum(stages[s].static_bytes for s in own)
    static += sum(stages[s].gradient_bytes for s in own) * problem.kept_gradients
    bag: dict[tuple[str, int, int], int] = {}
    sums: dict[int, int] = {}
    for action in row:
        letter, s, i = action.kind.letter, action.stage, action.microbatch
        if letter == "F":
            bag["activations", s, i] = stages[s].saved_bytes
        most = static + _bytes(bag, sums)
        if letter in ("B", "BW"):
            del bag["activations", s, i]
        if letter == "B":
            bag["for W", s, i] = stages[s].saved_for_weight_bytes
        if letter == "W":
            del bag["for W", s, i]
        if letter in ("W", "BW") and problem.accumulate == "order":
            bag["gradients", s, i] = stages[s].gradient_bytes
            sums.setdefault(s, 0)
            while bag.pop(("gradients", s, sums[s]), None) is not None:
                sums[s] += 1
        held = static + _bytes(bag, sums)
        yield max(most, held), held


def _bytes(bag: dict[tuple[str, int, int], int], sums: dict[int, int]) -> int:
    """Return the bytes in a bag; of a stage without a sum one set of gradients has the sum's place.

    ``sums`` has per stage how many microbatches its sum holds.
    """
    held = sum(bag.values())
    for stage, done in sums.items():
        waiting = [size for (what, s, _), size in bag.items() if (what, s) == ("gradients", stage)]
        held -= max(waiting, default=0) if done == 0 else 0
    return held
