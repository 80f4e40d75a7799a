"""What an order takes after a small change: only what the change can reach is timed again.

The order at hand is kept with a topological order of its actions. A change concerns a window of it. Before
the window nothing changes. The window is timed anew. What follows it is known as the longest way from each of
its actions to the end that counts: so the window alone bounds the new objective from below, by which most
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
    GAPS,
    GROUP,
    IS_SPAN,
    KEPT_ENDS,
    KEPT_LATE,
    KEPT_LINE,
    KEPT_NUMBER,
    KEPT_SCORE,
    KEPT_TAIL,
    KEPT_WORST,
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

__all__ = ["FAR", "kept_slot", "latest_at", "keep", "rebuild", "restore", "retime"]

FAR = 1 << 60
"""Behind every end."""


@jit
def _slot(cells: Vector, place: int) -> int:
    """Return the slot of the action at a place of the changed order."""
    slot: int = cells[GROUP, cells[LINE, place]] * cells[STATE, MICROBATCHES] + cells[NUMBER, place]
    return slot


@jit
def kept_slot(cells: Vector, place: int) -> int:
    """Return the slot of the action at a place of the order at hand."""
    slot: int = cells[GROUP, cells[KEPT_LINE, place]] * cells[STATE, MICROBATCHES] + cells[KEPT_NUMBER, place]
    return slot


@jit
def _place_from(cells: Vector, rank: int, position: int) -> int:
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
def _row_end(cells: Vector, values: int, rank: int) -> int:
    """Return by when a rank's row has to end.

    `LATE`: when it does. `TAIL`: 0 where its end counts, else far later.
    """
    end: int = 0
    if values == LATE and cells[ROW, rank] < cells[ROW, rank + 1]:
        end = cells[ENDS, _slot(cells, cells[ROW, rank + 1] - 1)]
    elif values == TAIL and cells[STATE, IS_SPAN] == 1 and rank != cells[STATE, ROOT]:
        end = FAR
    return end


@jit
def latest_at(cells: Vector, values: int, rank: int, place: int) -> int:
    """Return by when the rank has to be free for a place, by `LATE` or `TAIL` of the order at hand."""
    latest: int = _row_end(cells, values, rank)
    if place < cells[ROW, rank + 1]:
        latest = cells[values + 1, kept_slot(cells, place)]
    return latest


@jit
def _open(cells: Vector, begin: int, end: int) -> None:
    """Make the positions ``begin`` to ``end`` of the topological order the window."""
    for r in range(cells[STATE, RANKS]):
        first = _place_from(cells, r, begin)
        cells[FIRST, r] = first
        cells[NEXT, r] = first
        cells[STOP, r] = _place_from(cells, r, end + 1)
        cells[CLOCK, r] = cells[KEPT_ENDS, kept_slot(cells, first - 1)] if first > cells[ROW, r] else 0
        for k in range(first, cells[STOP, r]):
            cells[ENDS, _slot(cells, k)] = -1


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
                group, i = cells[GROUP, code], cells[NUMBER, k]
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
                        if now + cells[AFTER_LAG, e] - cells[KEPT_TAIL, other] > limit:
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
            if k == stop and now != cells[KEPT_ENDS, kept_slot(cells, k - 1)]:
                if now - latest_at(cells, TAIL, r, k) > limit:
                    return -2
                if k < cells[ROW, r + 1]:
                    far = max(far, cells[POSITION, k])
                else:
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
        group, i = cells[GROUP, cells[LINE, k]], cells[NUMBER, k]
        now = cells[CLOCK, r]
        for e in range(cells[BEFORE_AT, group], cells[BEFORE_AT, group + 1]):
            now = max(now, cells[ENDS, cells[BEFORE, e] * m + i] + cells[BEFORE_LAG, e])
        now += cells[LENGTH, cells[LINE, k]]
        cells[CLOCK, r] = now
        slot = group * m + i
        cells[ENDS, slot] = now
        if now == cells[KEPT_ENDS, slot]:
            continue
        for e in range(cells[AFTER_AT, group], cells[AFTER_AT, group + 1]):
            far = max(far, cells[POSITION, cells[PLACE_OF, cells[AFTER, e] * m + i]])
        if k + 1 < cells[ROW, r + 1]:
            far = max(far, cells[POSITION, k + 1])
        else:
            cells[STATE, ROWS_DIFFER] = 1
    cells[STATE, TIMED_TO] = t


@jit
def _look_back(cells: Vector, values: int, begin: int, end: int, top: int) -> int:
    """Find latest starts, `LATE` or `TAIL`, from position ``top`` back, as long as something differs.

    The window reaches from position ``begin`` to ``end``. Returns the first position whose start was found.
    """
    m, kept = cells[STATE, MICROBATCHES], values + 1
    size = cells[STATE, PLACES]
    for r in range(cells[STATE, RANKS]):
        place = cells[STOP, r] if top < size - 1 else cells[ROW, r + 1]
        cells[LATEST, r] = latest_at(cells, values, r, place)
    near, t = size, top + 1
    while t > begin or near < t:
        t -= 1
        k = cells[CHANGED_ORDER, t - begin] if begin <= t <= end else cells[ORDER, t]
        r = cells[RANK_AT, k]
        group, i = cells[GROUP, cells[LINE, k]], cells[NUMBER, k]
        now = cells[LATEST, r]
        for e in range(cells[AFTER_AT, group], cells[AFTER_AT, group + 1]):
            now = min(now, cells[values, cells[AFTER, e] * m + i] - cells[AFTER_LAG, e])
        now -= cells[LENGTH, cells[LINE, k]]
        cells[LATEST, r] = now
        slot = group * m + i
        cells[values, slot] = now
        if now != cells[kept, slot]:
            for e in range(cells[BEFORE_AT, group], cells[BEFORE_AT, group + 1]):
                position = cells[POSITION, cells[PLACE_OF, cells[BEFORE, e] * m + i]]
                if position < begin:
                    near = min(near, position)
        if cells[ROW, r] < k <= cells[FIRST, r] and now != cells[kept, kept_slot(cells, k)]:
            near = min(near, cells[POSITION, k - 1])
    return t


@jit
def _score(cells: Vector) -> int:
    """Return the score of the timed order, and note its objective."""
    worst, summed = 0, 0
    for r in range(cells[STATE, RANKS]):
        value = _row_end(cells, LATE, r)
        if cells[STATE, IS_SPAN] == 1 and cells[ROW, r] < cells[ROW, r + 1]:
            value -= cells[LATE, _slot(cells, cells[ROW, r])]
        summed += value
        worst = max(worst, value)
    cells[STATE, WORST] = worst
    score: int = 100 * cells[STATE, RANKS] * worst + summed
    return score


@jit
def retime(cells: Vector, begin: int, end: int, limit: int) -> int:
    """Return the score of the changed order, -1 if it deadlocks, or -2.

    -2 is returned only if the objective is above ``limit``, but not always then. All changes lie within the
    positions ``begin`` to ``end`` of the order at hand.
    """
    cells[STATE, TIMED_TO] = end
    cells[STATE, LATE_FROM] = 0
    cells[STATE, LATE_TO] = -1
    cells[STATE, ROWS_DIFFER] = 0
    _open(cells, begin, end)
    far: int = _sweep(cells, end, limit)
    if far < 0:
        return far
    _follow(cells, end, far)
    if cells[STATE, IS_SPAN] == 1:
        cells[STATE, LATE_TO] = cells[STATE, PLACES] - 1 if cells[STATE, ROWS_DIFFER] == 1 else end
        cells[STATE, LATE_FROM] = _look_back(cells, LATE, begin, end, cells[STATE, LATE_TO])
    score: int = _score(cells)
    return score


@jit
def _copy(cells: Vector, target: int, source: int, begin: int, end: int) -> None:
    """Copy what is noted per slot for the positions ``begin`` to ``end`` of the order at hand."""
    for t in range(begin, end + 1):
        slot = kept_slot(cells, cells[ORDER, t])
        cells[target, slot] = cells[source, slot]


@jit
def restore(cells: Vector, begin: int) -> None:
    """Take back what `retime` noted of a changed order; the window began at position ``begin``."""
    _copy(cells, ENDS, KEPT_ENDS, begin, cells[STATE, TIMED_TO])
    _copy(cells, LATE, KEPT_LATE, cells[STATE, LATE_FROM], cells[STATE, LATE_TO])


@jit
def keep(cells: Vector, begin: int, end: int, score: int) -> None:
    """Make the changed order, as `retime` timed it, the one at hand."""
    tails_from = _look_back(cells, TAIL, begin, end, end)
    for t in range(begin, end + 1):
        k = cells[CHANGED_ORDER, t - begin]
        cells[ORDER, t] = k
        cells[POSITION, k] = t
        cells[KEPT_LINE, k] = cells[LINE, k]
        cells[KEPT_NUMBER, k] = cells[NUMBER, k]
        cells[PLACE_OF, _slot(cells, k)] = k
    _copy(cells, KEPT_ENDS, ENDS, begin, cells[STATE, TIMED_TO])
    _copy(cells, KEPT_LATE, LATE, cells[STATE, LATE_FROM], cells[STATE, LATE_TO])
    _copy(cells, KEPT_TAIL, TAIL, tails_from, end)
    cells[STATE, KEPT_SCORE] = score
    cells[STATE, KEPT_WORST] = cells[STATE, WORST]
    for t in range(begin, cells[STATE, TIMED_TO] + 1):
        k = cells[ORDER, t]
        free = cells[ENDS, _slot(cells, k - 1)] if k > cells[ROW, cells[RANK_AT, k]] else 0
        cells[GAPS, k] = cells[ENDS, _slot(cells, k)] - cells[LENGTH, cells[LINE, k]] - free


@jit
def rebuild(cells: Vector) -> int:
    """Make the line the order at hand, from nothing; return its score, or -1 if it deadlocks."""
    size = cells[STATE, PLACES]
    for r in range(cells[STATE, RANKS]):
        for group in range(3 * cells[STATE, STAGES]):
            cells[SPARE, group] = 0
        cells[FIRST, r] = cells[ROW, r]
        cells[NEXT, r] = cells[ROW, r]
        cells[STOP, r] = cells[ROW, r + 1]
        cells[CLOCK, r] = 0
        for k in range(cells[ROW, r], cells[ROW, r + 1]):
            group = cells[GROUP, cells[LINE, k]]
            cells[NUMBER, k] = cells[SPARE, group]
            cells[KEPT_LINE, k] = cells[LINE, k]
            cells[KEPT_NUMBER, k] = cells[SPARE, group]
            cells[SPARE, group] += 1
            cells[ENDS, _slot(cells, k)] = -1
            cells[PLACE_OF, _slot(cells, k)] = k
            cells[POSITION, k] = 0
    if _sweep(cells, size, FAR) < 0:
        return -1
    cells[STATE, TIMED_TO] = size - 1
    cells[STATE, LATE_FROM] = 0
    cells[STATE, LATE_TO] = -1
    if cells[STATE, IS_SPAN] == 1:
        cells[STATE, LATE_TO] = size - 1
        _look_back(cells, LATE, 0, size - 1, size - 1)
    score: int = _score(cells)
    keep(cells, 0, size - 1, score)
    return score
