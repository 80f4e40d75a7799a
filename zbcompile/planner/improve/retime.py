"""What an order takes after a small change: only what the change can reach is timed again.

The order at hand is kept with a topological order of its actions. A change concerns a window of it. Before
the window nothing changes. The window is timed anew. What follows it is known as the longest way from each of
its actions to the end that counts: so the window alone gives a lower bound on the new score, by which most
changes are dropped. Where a change has no effect behind the window, nothing there is timed; nor before it,
where latest starts stay as they are. The scores are those of `zbcompile.planner.core.kernel.evaluate_line`.

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
    BEFORE_LAG,
    CHANGED_ORDER,
    CLOCK,
    ENDS,
    FIRST,
    GROUP,
    IS_SPAN,
    KEPT_CLOCK,
    KEPT_ENDS,
    KEPT_LATE,
    KEPT_LATEST,
    KEPT_LINE,
    KEPT_NUMBER,
    LATE,
    LATE_FROM,
    LATE_TO,
    LATEST,
    LENGTH,
    LINE,
    MICROBATCHES,
    NEXT,
    NUMBER,
    ORDER,
    OTHERS_WORK,
    PLACE_OF,
    PLACES,
    POSITION,
    RANK_AT,
    RANKS,
    ROOT,
    ROW,
    ROWS_DIFFER,
    SPARE,
    STAGES,
    STATE,
    STOP,
    TAIL,
    TIMED_TO,
    WORST,
)
from zbcompile.planner.improve.kept_order import (
    copy_slots,
    end_before,
    keep,
    last_tail,
    noted_ahead,
    place_from,
)

__all__ = ["rebuild", "restore", "retime"]

_FAR = 1 << 60


@jit
def _open(cells: Vector, begin: int, end: int) -> None:
    """Make the positions ``begin`` to ``end`` of the topological order the window."""
    for r in range(cells[STATE, RANKS]):
        first = place_from(cells, r, begin)
        stop = place_from(cells, r, end + 1)
        cells[FIRST, r] = first
        cells[NEXT, r] = first
        cells[STOP, r] = stop
        cells[CLOCK, r] = end_before(cells, r, first)
        cells[KEPT_CLOCK, r] = end_before(cells, r, stop)
        for k in range(first, stop):
            group = cells[GROUP, cells[LINE, k]]
            if group >= 0:
                cells[ENDS, group * cells[STATE, MICROBATCHES] + cells[NUMBER, k]] = -1


@jit
def _sweep(cells: Vector, end: int, limit: int) -> int:
    """Time the window: all ranks in turn, as far as their messages are there.

    Returns
    -------
    int
        -2 as soon as the end that counts must lie behind ``limit``, -1 on deadlock, else the last position
        behind the window that finds its rank or a message at another time than in the order at hand, 0 if
        none does.
    """
    m, p = cells[STATE, MICROBATCHES], cells[STATE, RANKS]
    done, left, far = 0, 0, 0
    for r in range(p):
        left += cells[STOP, r] - cells[FIRST, r]
    moved, upward = True, False
    while moved and left > 0:
        moved = False
        upward = not upward
        for q in range(p):
            r = p - 1 - q if upward else q
            k, stop, now = cells[NEXT, r], cells[STOP, r], cells[CLOCK, r]
            begin = k
            while k < stop:
                code = cells[LINE, k]
                group = cells[GROUP, code]
                if group < 0:
                    now += cells[LENGTH, code]
                else:
                    i = cells[NUMBER, k]
                    start = now
                    blocked = False
                    for e in range(cells[BEFORE_AT, group], cells[BEFORE_AT, group + 1]):
                        sent = cells[ENDS, cells[BEFORE, e] * m + i]
                        if sent < 0:
                            blocked = True
                            break
                        start = max(start, sent + cells[BEFORE_LAG, e])
                    if blocked:
                        break
                    now = start + cells[LENGTH, code]
                    slot = group * m + i
                    cells[ENDS, slot] = now
                    for e in range(cells[AFTER_AT, group], cells[AFTER_AT, group + 1]):
                        other = cells[AFTER, e] * m + i
                        position = cells[POSITION, cells[PLACE_OF, other]]
                        if position > end:
                            if now + cells[AFTER_LAG, e] + cells[TAIL, other] > limit:
                                return -2
                            if now != cells[KEPT_ENDS, slot]:
                                far = max(far, position)
                cells[CHANGED_ORDER, done] = k
                done += 1
                k += 1
            if k == begin:
                continue
            moved = True
            left -= k - begin
            cells[NEXT, r] = k
            cells[CLOCK, r] = now
            if k == stop and now != cells[KEPT_CLOCK, r]:
                if k < cells[ROW, r + 1]:
                    if now + noted_ahead(cells, TAIL, r, k, last_tail(cells, r)) > limit:
                        return -2
                    far = max(far, cells[POSITION, k])
                else:
                    if (cells[STATE, IS_SPAN] == 0 or r == cells[STATE, ROOT]) and now > limit:
                        return -2
                    cells[STATE, ROWS_DIFFER] = 1
    return far if left == 0 else -1


@jit
def _follow(cells: Vector, end: int, far: int) -> None:
    """Time what follows the window, as long as something differs: position ``far`` at least."""
    m = cells[STATE, MICROBATCHES]
    t = end
    while t < far:
        t += 1
        k = cells[ORDER, t]
        r = cells[RANK_AT, k]
        code = cells[LINE, k]
        group = cells[GROUP, code]
        now = cells[CLOCK, r]
        if group < 0:
            now += cells[LENGTH, code]
            was = cells[KEPT_CLOCK, r] + cells[LENGTH, code]
        else:
            i = cells[NUMBER, k]
            slot = group * m + i
            for e in range(cells[BEFORE_AT, group], cells[BEFORE_AT, group + 1]):
                now = max(now, cells[ENDS, cells[BEFORE, e] * m + i] + cells[BEFORE_LAG, e])
            now += cells[LENGTH, code]
            was = cells[KEPT_ENDS, slot]
            if now != was:
                cells[ENDS, slot] = now
                for e in range(cells[AFTER_AT, group], cells[AFTER_AT, group + 1]):
                    place = cells[PLACE_OF, cells[AFTER, e] * m + i]
                    far = max(far, cells[POSITION, place])
        cells[CLOCK, r] = now
        cells[KEPT_CLOCK, r] = was
        if now != was:
            if k + 1 < cells[ROW, r + 1]:
                far = max(far, cells[POSITION, k + 1])
            else:
                cells[STATE, ROWS_DIFFER] = 1
    cells[STATE, TIMED_TO] = t


@jit
def _row_end(cells: Vector, rank: int) -> int:
    """Return when a rank ends in the changed order."""
    end: int = cells[ROW, rank + 1]
    time: int = cells[CLOCK, rank]
    if end > cells[ROW, rank] and cells[POSITION, end - 1] > cells[STATE, TIMED_TO]:
        time = end_before(cells, rank, end)
    return time


@jit
def _look_back(cells: Vector, begin: int, end: int) -> None:
    """Find the latest starts, from the last that may differ as long as something differs."""
    m = cells[STATE, MICROBATCHES]
    rows_differ = cells[STATE, ROWS_DIFFER] == 1
    top = cells[STATE, PLACES] - 1 if rows_differ else end
    for r in range(cells[STATE, RANKS]):
        if rows_differ:
            cells[LATEST, r] = _row_end(cells, r)
        else:
            last = end_before(cells, r, cells[ROW, r + 1])
            cells[LATEST, r] = noted_ahead(cells, LATE, r, cells[STOP, r], last)
    near, t = cells[STATE, PLACES], top + 1
    while t > begin or near < t:
        t -= 1
        k = cells[CHANGED_ORDER, t - begin] if begin <= t <= end else cells[ORDER, t]
        r = cells[RANK_AT, k]
        code = cells[LINE, k]
        group = cells[GROUP, code]
        now = cells[LATEST, r]
        if group < 0:
            now -= cells[LENGTH, code]
            was = cells[KEPT_LATEST, r] - cells[LENGTH, code]
        else:
            i = cells[NUMBER, k]
            slot = group * m + i
            for e in range(cells[AFTER_AT, group], cells[AFTER_AT, group + 1]):
                now = min(now, cells[LATE, cells[AFTER, e] * m + i] - cells[AFTER_LAG, e])
            now -= cells[LENGTH, code]
            was = cells[KEPT_LATE, slot]
            if now != was:
                cells[LATE, slot] = now
                for e in range(cells[BEFORE_AT, group], cells[BEFORE_AT, group + 1]):
                    place = cells[PLACE_OF, cells[BEFORE, e] * m + i]
                    if cells[POSITION, place] < begin:
                        near = min(near, cells[POSITION, place])
        cells[LATEST, r] = now
        cells[KEPT_LATEST, r] = was
        if t < begin and now != was and k > cells[ROW, r]:
            near = min(near, cells[POSITION, k - 1])
        if t == begin:
            for r in range(cells[STATE, RANKS]):
                first = cells[FIRST, r]
                last = end_before(cells, r, cells[ROW, r + 1])
                cells[KEPT_LATEST, r] = noted_ahead(cells, KEPT_LATE, r, first, last)
                if cells[LATEST, r] != cells[KEPT_LATEST, r] and first > cells[ROW, r]:
                    near = min(near, cells[POSITION, first - 1])
    cells[STATE, LATE_FROM] = t
    cells[STATE, LATE_TO] = top


@jit
def _score(cells: Vector) -> int:
    """Return the score of the timed order, and note its objective."""
    m = cells[STATE, MICROBATCHES]
    worst, summed = 0, 0
    for r in range(cells[STATE, RANKS]):
        begin, end = cells[ROW, r], cells[ROW, r + 1]
        value = _row_end(cells, r)
        if cells[STATE, IS_SPAN] == 1 and begin < end:  # a legal row begins with an F
            value -= cells[LATE, cells[GROUP, cells[LINE, begin]] * m + cells[NUMBER, begin]]
        summed += value
        worst = max(worst, value)
    cells[STATE, WORST] = worst
    score: int = 100 * cells[STATE, RANKS] * worst + summed
    return score


@jit
def retime(cells: Vector, begin: int, end: int, most: int) -> int:
    """Return the score of the changed order, -1 if it deadlocks, -2 if its score is above ``most``.

    All changes lie within the positions ``begin`` to ``end`` of the order at hand.
    """
    cells[STATE, TIMED_TO] = end
    cells[STATE, LATE_FROM] = 0
    cells[STATE, LATE_TO] = -1
    cells[STATE, ROWS_DIFFER] = 0
    _open(cells, begin, end)
    far: int = _sweep(cells, end, (most - cells[STATE, OTHERS_WORK]) // (100 * cells[STATE, RANKS] + 1))
    if far < 0:
        return far
    _follow(cells, end, far)
    if cells[STATE, IS_SPAN] == 1:
        _look_back(cells, begin, end)
    score: int = _score(cells)
    return score


@jit
def restore(cells: Vector, begin: int) -> None:
    """Take back what `retime` noted of a changed order; the window began at position ``begin``."""
    copy_slots(cells, ENDS, KEPT_ENDS, begin, cells[STATE, TIMED_TO])
    copy_slots(cells, LATE, KEPT_LATE, cells[STATE, LATE_FROM], cells[STATE, LATE_TO])


@jit
def rebuild(cells: Vector) -> int:
    """Make the line the order at hand, from nothing; return its score, or -1 if it deadlocks."""
    m, size = cells[STATE, MICROBATCHES], cells[STATE, PLACES]
    for r in range(cells[STATE, RANKS]):
        for k in range(3 * cells[STATE, STAGES]):
            cells[SPARE, k] = 0
        cells[FIRST, r] = cells[ROW, r]
        cells[NEXT, r] = cells[ROW, r]
        cells[STOP, r] = cells[ROW, r + 1]
        cells[CLOCK, r] = 0
        cells[KEPT_CLOCK, r] = -1
        for k in range(cells[ROW, r], cells[ROW, r + 1]):
            code = cells[LINE, k]
            group = cells[GROUP, code]
            slot = code if group < 0 else group
            cells[NUMBER, k] = cells[SPARE, slot]
            cells[KEPT_LINE, k] = code
            cells[KEPT_NUMBER, k] = cells[SPARE, slot]
            if group >= 0:
                cells[ENDS, group * m + cells[SPARE, slot]] = -1
                cells[KEPT_LATE, group * m + cells[SPARE, slot]] = -1
                cells[PLACE_OF, group * m + cells[SPARE, slot]] = k
            cells[SPARE, slot] += 1
            cells[POSITION, k] = 0
    if _sweep(cells, size, _FAR) < 0:
        return -1
    cells[STATE, ROWS_DIFFER] = 1
    cells[STATE, TIMED_TO] = size - 1
    cells[STATE, LATE_FROM] = 0
    cells[STATE, LATE_TO] = -1
    if cells[STATE, IS_SPAN] == 1:
        _look_back(cells, 0, size - 1)
    score: int = _score(cells)
    keep(cells, 0, size - 1, score)
    return score
