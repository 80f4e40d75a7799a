"""Fold the actions of a rank: the longest stretches that repeat with other microbatches become loops.

``row of actions --> row of actions and loops``; a row that is unrolled again is the same row::

    0F0 0B0 0F1 0B1 0F2 0B2   -->   3 times (0F i, 0B i), i from 0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zbcompile.schedule.ir import Action, Kind

__all__ = ["Loop", "fold"]

_LONGEST_PERIOD = 128
_FEWEST_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Loop:
    """Actions that are done several times.

    Attributes
    ----------
    body
        The actions of the first time; None: wait until what was posted is done.
    count
        How often they are done.
    step
        What is added to their microbatches each time.
    """

    body: tuple[Action | None, ...]
    count: int
    step: int

    @property
    def saved(self) -> int:
        """How many actions need no line of their own."""
        return len(self.body) * (self.count - 1)


def fold(row: Sequence[Action | None]) -> list[Action | Loop | None]:
    """Return the row with its longest repeating stretches as loops; None stays a wait for what was posted."""
    widest = max((abs(a.microbatch) for a in row if a is not None), default=0)
    return _fold(row, _codes(row, widest), widest)


def _fold(row: Sequence[Action | None], codes: Sequence[int], widest: int) -> list[Action | Loop | None]:
    best, start = _best_loop(row, codes, widest)
    if best is None:
        return list(row)
    end = start + len(best.body) * best.count
    return [*_fold(row[:start], codes[:start], widest), best, *_fold(row[end:], codes[end:], widest)]


def _codes(row: Sequence[Action | None], widest: int) -> list[int]:
    """Return a number per action, and 0 for None.

    The numbers of two actions that differ by the microbatch alone differ by just that; those of all others
    differ by more than 2 ``widest``, where ``widest`` is the largest microbatch.
    """
    numbers: dict[tuple[Kind, int, int | None], int] = {}
    codes = []
    for action in row:
        if action is None:
            codes.append(0)
        else:
            number = numbers.setdefault((action.kind, action.stage, action.peer), len(numbers) + 1)
            codes.append(number * (4 * widest + 1) + action.microbatch)
    return codes


def _best_loop(row: Sequence[Action | None], codes: Sequence[int], widest: int) -> tuple[Loop | None, int]:
    """Return the loop that saves most, and where it starts."""
    best: Loop | None = None
    where = 0
    for period in range(1, min(_LONGEST_PERIOD, len(row) // _FEWEST_REPEATS) + 1):
        for start, length, step in _runs(codes, period, widest, best.saved if best else 0):
            count = length // period + 1
            if count < _FEWEST_REPEATS or not any(codes[start : start + period]):
                continue
            if best is None or period * (count - 1) > best.saved:
                best, where = Loop(tuple(row[start : start + period]), count, step), start
    return best, where


def _runs(codes: Sequence[int], period: int, widest: int, least: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, length, step) of the stretches longer than ``least`` that repeat after ``period`` places.

    There, what stands a period later is the same action with ``step`` added to its microbatch, the same step
    all along, or None again.
    """
    start, step, end = 0, 0, len(codes) - period
    for k, (before, after) in enumerate(zip(codes, codes[period:], strict=False)):
        moved = after - before
        if moved == step and moved:
            continue
        alike = 0 < moved <= 2 * widest or before == after == 0
        if not alike or (moved and step):
            if step:
                yield start, k - start, step
            start, step = (k, moved) if alike else (k + 1, 0)
            if end - start <= least:
                return
        else:
            step = step or moved
    if step:
        yield start, end - start, step
