"""What is known of the order at hand of the annealing: numbers, times, waits, longest ways to the end.

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.compiled`).
"""

from __future__ import annotations

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.improve.cells import (
    AFTER,
    AFTER_AT,
    AFTER_LAG,
    BEFORE,
    BEFORE_AT,
    CHANGED_ORDER,
    ENDS,
    FIRST,
    GAPS,
    GROUP,
    IS_SPAN,
    KEPT_ENDS,
    KEPT_LATE,
    KEPT_LATEST,
    KEPT_LINE,
    KEPT_NUMBER,
    KEPT_SCORE,
    KEPT_WORST,
    LATE,
    LATE_FROM,
    LATE_TO,
    LATEST,
    LENGTH,
    LINE,
    MICROBATCHES,
    NUMBER,
    ORDER,
    PLACE_OF,
    PLACES,
    POSITION,
    RANK_AT,
    RANKS,
    ROOT,
    ROW,
    SPARE,
    STATE,
    STOP,
    TAIL,
    TIMED_TO,
    WORST,
)

__all__ = [
    "copy_slots",
    "end_before",
    "keep",
    "last_tail",
    "noted_ahead",
    "place_from",
    "renumber",
]

_FAR = 1 << 60


@jit
def renumber(cells: Vector, low: int, high: int) -> None:
    """Number the actions at the places ``low`` to ``high`` of one row by their order.

    They are those of the order at hand, in another order.
    """
    for k in range(low, high + 1):
        code = cells[KEPT_LINE, k]
        group = cells[GROUP, code]
        cells[SPARE, code if group < 0 else group] = -1
    for k in range(low, high + 1):
        code = cells[KEPT_LINE, k]
        group = cells[GROUP, code]
        slot = code if group < 0 else group
        if cells[SPARE, slot] < 0:
            cells[SPARE, slot] = cells[KEPT_NUMBER, k]
    for k in range(low, high + 1):
        code = cells[LINE, k]
        group = cells[GROUP, code]
        slot = code if group < 0 else group
        cells[NUMBER, k] = cells[SPARE, slot]
        cells[SPARE, slot] += 1


@jit
def place_from(cells: Vector, rank: int, position: int) -> int:
    """Return the first place of a rank's row whose position is ``position`` or later."""
    low: int = cells[ROW, rank]
    high: int = cells[ROW, rank + 1]
    while low < high:
        middle = (low + high) >> 1
        if cells[POSITION, middle] < position:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def end_before(cells: Vector, rank: int, place: int) -> int:
    """Return when the rank is free for the action at a place, in the order at hand."""
    time, k = 0, place - 1
    while k >= cells[ROW, rank]:
        code = cells[KEPT_LINE, k]
        group = cells[GROUP, code]
        if group >= 0:
            end: int = cells[KEPT_ENDS, group * cells[STATE, MICROBATCHES] + cells[KEPT_NUMBER, k]]
            return time + end
        time += cells[LENGTH, code]
        k -= 1
    return time


@jit
def noted_ahead(cells: Vector, values: int, rank: int, place: int, last: int) -> int:
    """Return what holds at a place for the rank: its latest start, or the longest way to the end that counts.

    ``values`` is where that is noted per slot: `LATE`, `KEPT_LATE` or `TAIL`. W's have no slot: from
    the next F or B, or from ``last`` if there is none, their lengths are counted back.
    """
    k, end = place, cells[ROW, rank + 1]
    time = 0
    while k < end:
        code = cells[KEPT_LINE, k]
        group = cells[GROUP, code]
        if group >= 0:
            noted: int = cells[values, group * cells[STATE, MICROBATCHES] + cells[KEPT_NUMBER, k]]
            return noted + time if values == TAIL else noted - time
        time += cells[LENGTH, code]
        k += 1
    return last + time if values == TAIL else last - time


@jit
def last_tail(cells: Vector, rank: int) -> int:
    """Return the longest way from the end of a rank's row to the end that counts: none, or far below zero."""
    return 0 if cells[STATE, IS_SPAN] == 0 or rank == cells[STATE, ROOT] else -_FAR


@jit
def copy_slots(cells: Vector, target: int, source: int, begin: int, end: int) -> None:
    """Copy what is noted per slot for the positions ``begin`` to ``end`` of the order at hand."""
    for t in range(begin, end + 1):
        k = cells[ORDER, t]
        group = cells[GROUP, cells[KEPT_LINE, k]]
        if group >= 0:
            slot = group * cells[STATE, MICROBATCHES] + cells[KEPT_NUMBER, k]
            cells[target, slot] = cells[source, slot]


@jit
def keep(cells: Vector, begin: int, end: int, score: int) -> None:
    """Make the changed order, as `retime` timed it, the one at hand."""
    m = cells[STATE, MICROBATCHES]
    for r in range(cells[STATE, RANKS]):
        last = last_tail(cells, r)
        cells[LATEST, r] = noted_ahead(cells, TAIL, r, cells[STOP, r], last)
        cells[KEPT_LATEST, r] = noted_ahead(cells, TAIL, r, cells[FIRST, r], last)
    for t in range(begin, end + 1):
        k = cells[CHANGED_ORDER, t - begin]
        cells[ORDER, t] = k
        cells[POSITION, k] = t
        cells[KEPT_LINE, k] = cells[LINE, k]
        cells[KEPT_NUMBER, k] = cells[NUMBER, k]
        group = cells[GROUP, cells[LINE, k]]
        if group >= 0:
            cells[PLACE_OF, group * m + cells[NUMBER, k]] = k
    copy_slots(cells, KEPT_ENDS, ENDS, begin, cells[STATE, TIMED_TO])
    copy_slots(cells, KEPT_LATE, LATE, cells[STATE, LATE_FROM], cells[STATE, LATE_TO])
    cells[STATE, KEPT_SCORE] = score
    cells[STATE, KEPT_WORST] = cells[STATE, WORST]
    _note_gaps(cells)
    _note_tails(cells, begin, end)


@jit
def _note_gaps(cells: Vector) -> None:
    """Note the waits of the order at hand, from the window on as far as it was timed."""
    m = cells[STATE, MICROBATCHES]
    for r in range(cells[STATE, RANKS]):
        first, stop = cells[FIRST, r], cells[ROW, r + 1]
        now = end_before(cells, r, first)
        for k in range(first, stop):
            if cells[POSITION, k] > cells[STATE, TIMED_TO]:
                break
            code = cells[LINE, k]
            group = cells[GROUP, code]
            cells[GAPS, k] = 0
            if group >= 0:
                done = cells[KEPT_ENDS, group * m + cells[NUMBER, k]]
                cells[GAPS, k] = done - cells[LENGTH, code] - now
                now = done
            else:
                now += cells[LENGTH, code]


@jit
def _note_tails(cells: Vector, begin: int, end: int) -> None:
    """Note the longest ways to the end that counts, from the window back as long as something differs."""
    m = cells[STATE, MICROBATCHES]
    near, t = cells[STATE, PLACES], end + 1
    while t > begin or near < t:
        t -= 1
        k = cells[ORDER, t]
        r = cells[RANK_AT, k]
        code = cells[LINE, k]
        group = cells[GROUP, code]
        now = cells[LATEST, r] + cells[LENGTH, code]
        was = cells[KEPT_LATEST, r] + cells[LENGTH, code]
        if group >= 0:
            i = cells[NUMBER, k]
            slot = group * m + i
            for e in range(cells[AFTER_AT, group], cells[AFTER_AT, group + 1]):
                way = cells[AFTER_LAG, e] + cells[TAIL, cells[AFTER, e] * m + i]
                now = max(now, way + cells[LENGTH, code])
            was = cells[TAIL, slot]
            if now != was:
                cells[TAIL, slot] = now
                for e in range(cells[BEFORE_AT, group], cells[BEFORE_AT, group + 1]):
                    place = cells[PLACE_OF, cells[BEFORE, e] * m + i]
                    near = min(near, cells[POSITION, place])
        cells[LATEST, r] = now
        if t < begin:
            cells[KEPT_LATEST, r] = was
            if now != was and k > cells[ROW, r]:
                near = min(near, cells[POSITION, k - 1])
        if t == begin:
            for r in range(cells[STATE, RANKS]):
                first = cells[FIRST, r]
                if cells[LATEST, r] != cells[KEPT_LATEST, r] and first > cells[ROW, r]:
                    near = min(near, cells[POSITION, first - 1])
