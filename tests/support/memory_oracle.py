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
    held = sum(stages[s].static_bytes for s in problem.placement.stages_of(rank))
    bag: dict[tuple[str, int, int], int] = {}
    for action in row:
        letter, s, i = action.kind.letter, action.stage, action.microbatch
        if letter == "F":
            bag["activations", s, i] = stages[s].saved_bytes
            held += stages[s].saved_bytes
        most = held
        if letter in ("B", "BW"):
            held -= bag.pop(("activations", s, i))
        if letter == "B":
            bag["for W", s, i] = stages[s].saved_for_weight_bytes
            held += stages[s].saved_for_weight_bytes
        if letter == "W":
            held -= bag.pop(("for W", s, i))
        yield max(most, held), held
