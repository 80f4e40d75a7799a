"""What an order takes after a small change: only what the change can reach is timed again.

The order at hand is kept with a topological order of its actions. A change concerns a window of it. Before
the window nothing changes. The window is timed anew, and what follows it as long as something differs; so are
latest starts, back from the window. The scores are those of `zbcompile.planner.core.kernel.evaluate_line`.

Of every action the longest way to the end that counts is known too, by which most changes are dropped before
anything is timed (`zbcompile.planner.improve.changed_rows`).

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.compiled`).
"""

from __future__ import annotations

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.improve import cells as at

__all__ = ["FAR", "end_before", "keep", "latest_at", "rebuild", "restore", "retime", "slot_at"]

FAR = 1 << 60
"""Behind every end."""


@jit
def slot_at(cells: Vector, line: int, place: int) -> int:
    """Return the slot of the action at a place: `LINE` as changed, `KEPT_LINE` in the order at hand."""
    group, number = cells[at.GROUP, cells[line, place]], cells[line + 1, place]
    slot: int = group * cells[at.STATE, at.MICROBATCHES] + number
    return slot


@jit
def end_before(cells: Vector, rank: int, place: int) -> int:
    """Return when the rank gets to a place in the order at hand."""
    end: int = 0
    if place > cells[at.ROW, rank]:
        end = cells[at.KEPT_ENDS, slot_at(cells, at.KEPT_LINE, place - 1)]
    return end


@jit
def _place_from(cells: Vector, rank: int, position: int) -> int:
    """Return the first place of a rank's row whose position is ``position`` or later."""
    low: int = cells[at.ROW, rank]
    high: int = cells[at.ROW, rank + 1]
    while low < high:
        middle = (low + high) >> 1
        if cells[at.POSITION, middle] < position:
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
    if values == at.LATE and cells[at.ROW, rank] < cells[at.ROW, rank + 1]:
        end = cells[at.ENDS, slot_at(cells, at.LINE, cells[at.ROW, rank + 1] - 1)]
    elif values == at.TAIL and cells[at.STATE, at.IS_SPAN] == 1 and rank != cells[at.STATE, at.ROOT]:
        end = FAR
    return end


@jit
def latest_at(cells: Vector, values: int, rank: int, place: int) -> int:
    """Return by when the rank has to be free for a place, by `LATE` or `TAIL` of the order at hand."""
    latest: int = _row_end(cells, values, rank)
    if place < cells[at.ROW, rank + 1]:
        latest = cells[values + 1, slot_at(cells, at.KEPT_LINE, place)]
    return latest


@jit
def _open(cells: Vector) -> None:
    """Make the positions from the first to the last changed place the window."""
    begin, end = cells[at.STATE, at.PLACES], -1
    for c in range(cells[at.STATE, at.TOUCHED]):
        r = cells[at.STATE, at.TOUCHED + 1 + c]
        begin = min(begin, cells[at.POSITION, cells[at.LOW, r]])
        end = max(end, cells[at.POSITION, cells[at.HIGH, r]])
    cells[at.STATE, at.BEGIN], cells[at.STATE, at.END] = begin, end
    for r in range(cells[at.STATE, at.RANKS]):
        first = _place_from(cells, r, begin)
        cells[at.FIRST, r] = first
        cells[at.NEXT, r] = first
        cells[at.STOP, r] = _place_from(cells, r, end + 1)
        cells[at.CLOCK, r] = end_before(cells, r, first)
        for k in range(first, cells[at.STOP, r]):
            cells[at.ENDS, slot_at(cells, at.LINE, k)] = -1


@jit
def _sweep(cells: Vector) -> int:
    """Time the window: all ranks in turn, as far as their messages are there.

    Returns
    -------
    int
        -1 on deadlock, else a position up to which some action finds its rank or a message at another time
        than in the order at hand.
    """
    m, p = cells[at.STATE, at.MICROBATCHES], cells[at.STATE, at.RANKS]
    done, left, far = 0, 0, 0
    for r in range(p):
        left += cells[at.STOP, r] - cells[at.FIRST, r]
    moved, upward = True, False
    while moved and left > 0:
        moved = False
        upward = not upward
        for q in range(p):
            r = p - 1 - q if upward else q
            k, stop, now = cells[at.NEXT, r], cells[at.STOP, r], cells[at.CLOCK, r]
            begin = k
            while k < stop:
                code = cells[at.LINE, k]
                group, i = cells[at.GROUP, code], cells[at.NUMBER, k]
                start = now
                blocked = False
                for e in range(cells[at.BEFORE_AT, group], cells[at.BEFORE_AT, group + 1]):
                    sent = cells[at.ENDS, cells[at.BEFORE, e] * m + i]
                    if sent < 0:
                        blocked = True
                        break
                    start = max(start, sent + cells[at.BEFORE_LAG, e])
                if blocked:
                    break
                now = start + cells[at.LENGTH, code]
                slot = group * m + i
                cells[at.ENDS, slot] = now
                if now != cells[at.KEPT_ENDS, slot]:
                    for e in range(cells[at.AFTER_AT, group], cells[at.AFTER_AT, group + 1]):
                        far = max(far, cells[at.POSITION, cells[at.PLACE_OF, cells[at.AFTER, e] * m + i]])
                cells[at.CHANGED_ORDER, done] = k
                done += 1
                k += 1
            if k == begin:
                continue
            moved = True
            left -= k - begin
            cells[at.NEXT, r] = k
            cells[at.CLOCK, r] = now
            if k == stop and now != cells[at.KEPT_ENDS, slot_at(cells, at.KEPT_LINE, k - 1)]:
                if k < cells[at.ROW, r + 1]:
                    far = max(far, cells[at.POSITION, k])
                else:
                    cells[at.STATE, at.ROWS_DIFFER] = 1
    return far if left == 0 else -1


@jit
def _follow(cells: Vector, far: int) -> None:
    """Time what follows the window, as long as something differs: position ``far`` at least."""
    m = cells[at.STATE, at.MICROBATCHES]
    t = cells[at.STATE, at.END]
    while t < far:
        t += 1
        k = cells[at.ORDER, t]
        r = cells[at.RANK_AT, k]
        group, i = cells[at.GROUP, cells[at.LINE, k]], cells[at.NUMBER, k]
        now = cells[at.CLOCK, r]
        for e in range(cells[at.BEFORE_AT, group], cells[at.BEFORE_AT, group + 1]):
            now = max(now, cells[at.ENDS, cells[at.BEFORE, e] * m + i] + cells[at.BEFORE_LAG, e])
        now += cells[at.LENGTH, cells[at.LINE, k]]
        cells[at.CLOCK, r] = now
        slot = group * m + i
        cells[at.ENDS, slot] = now
        if now == cells[at.KEPT_ENDS, slot]:
            continue
        for e in range(cells[at.AFTER_AT, group], cells[at.AFTER_AT, group + 1]):
            far = max(far, cells[at.POSITION, cells[at.PLACE_OF, cells[at.AFTER, e] * m + i]])
        if k + 1 < cells[at.ROW, r + 1]:
            far = max(far, cells[at.POSITION, k + 1])
        else:
            cells[at.STATE, at.ROWS_DIFFER] = 1
    cells[at.STATE, at.TIMED_TO] = t


@jit
def _look_back(cells: Vector, values: int, top: int) -> int:
    """Find latest starts, `LATE` or `TAIL`, from position ``top`` back, as long as something differs.

    Returns the first position whose start was found.
    """
    m, size, kept = cells[at.STATE, at.MICROBATCHES], cells[at.STATE, at.PLACES], values + 1
    begin, end = cells[at.STATE, at.BEGIN], cells[at.STATE, at.END]
    for r in range(cells[at.STATE, at.RANKS]):
        place = cells[at.STOP, r] if top < size - 1 else cells[at.ROW, r + 1]
        cells[at.LATEST, r] = latest_at(cells, values, r, place)
    near, t = size, top + 1
    while t > begin or near < t:
        t -= 1
        k = cells[at.CHANGED_ORDER, t - begin] if begin <= t <= end else cells[at.ORDER, t]
        r = cells[at.RANK_AT, k]
        group, i = cells[at.GROUP, cells[at.LINE, k]], cells[at.NUMBER, k]
        now = cells[at.LATEST, r]
        for e in range(cells[at.AFTER_AT, group], cells[at.AFTER_AT, group + 1]):
            now = min(now, cells[values, cells[at.AFTER, e] * m + i] - cells[at.AFTER_LAG, e])
        now -= cells[at.LENGTH, cells[at.LINE, k]]
        cells[at.LATEST, r] = now
        slot = group * m + i
        cells[values, slot] = now
        if now != cells[kept, slot]:
            for e in range(cells[at.BEFORE_AT, group], cells[at.BEFORE_AT, group + 1]):
                position = cells[at.POSITION, cells[at.PLACE_OF, cells[at.BEFORE, e] * m + i]]
                if position < begin:
                    near = min(near, position)
        if cells[at.ROW, r] < k <= cells[at.FIRST, r] and now != cells[kept, slot_at(cells, at.KEPT_LINE, k)]:
            near = min(near, cells[at.POSITION, k - 1])
    return t


@jit
def _score(cells: Vector) -> int:
    """Return the score of the timed order, and note its objective."""
    worst, summed = 0, 0
    for r in range(cells[at.STATE, at.RANKS]):
        value = _row_end(cells, at.LATE, r)
        if cells[at.STATE, at.IS_SPAN] == 1 and cells[at.ROW, r] < cells[at.ROW, r + 1]:
            value -= cells[at.LATE, slot_at(cells, at.LINE, cells[at.ROW, r])]
        summed += value
        worst = max(worst, value)
    cells[at.STATE, at.WORST] = worst
    score: int = 100 * cells[at.STATE, at.RANKS] * worst + summed
    return score


@jit
def _time(cells: Vector) -> int:
    """Time the order that the window changes; return its score, or -1 if it deadlocks."""
    end = cells[at.STATE, at.END]
    cells[at.STATE, at.TIMED_TO] = end
    cells[at.STATE, at.LATE_FROM], cells[at.STATE, at.LATE_TO] = 0, -1
    cells[at.STATE, at.ROWS_DIFFER] = 0
    far: int = _sweep(cells)
    if far < 0:
        return far
    _follow(cells, far)
    if cells[at.STATE, at.IS_SPAN] == 1:
        top = cells[at.STATE, at.PLACES] - 1 if cells[at.STATE, at.ROWS_DIFFER] == 1 else end
        cells[at.STATE, at.LATE_TO] = top
        cells[at.STATE, at.LATE_FROM] = _look_back(cells, at.LATE, top)
    score: int = _score(cells)
    return score


@jit
def retime(cells: Vector) -> int:
    """Return the score of the changed order, or -1 if it deadlocks."""
    _open(cells)
    score: int = _time(cells)
    return score


@jit
def _copy(cells: Vector, target: int, source: int, begin: int, end: int) -> None:
    """Copy what is noted per slot for the positions ``begin`` to ``end`` of the order at hand."""
    for t in range(begin, end + 1):
        slot = slot_at(cells, at.KEPT_LINE, cells[at.ORDER, t])
        cells[target, slot] = cells[source, slot]


@jit
def restore(cells: Vector) -> None:
    """Take back what `retime` noted of a changed order."""
    _copy(cells, at.ENDS, at.KEPT_ENDS, cells[at.STATE, at.BEGIN], cells[at.STATE, at.TIMED_TO])
    _copy(cells, at.LATE, at.KEPT_LATE, cells[at.STATE, at.LATE_FROM], cells[at.STATE, at.LATE_TO])


@jit
def keep(cells: Vector, score: int) -> None:
    """Make the changed order, as `retime` timed it, the one at hand."""
    begin, end = cells[at.STATE, at.BEGIN], cells[at.STATE, at.END]
    tails_from = _look_back(cells, at.TAIL, end)
    for t in range(begin, end + 1):
        k = cells[at.CHANGED_ORDER, t - begin]
        cells[at.ORDER, t] = k
        cells[at.POSITION, k] = t
        cells[at.KEPT_LINE, k] = cells[at.LINE, k]
        cells[at.KEPT_NUMBER, k] = cells[at.NUMBER, k]
        cells[at.PLACE_OF, slot_at(cells, at.LINE, k)] = k
    _copy(cells, at.KEPT_ENDS, at.ENDS, begin, cells[at.STATE, at.TIMED_TO])
    _copy(cells, at.KEPT_LATE, at.LATE, cells[at.STATE, at.LATE_FROM], cells[at.STATE, at.LATE_TO])
    _copy(cells, at.KEPT_TAIL, at.TAIL, tails_from, end)
    cells[at.STATE, at.KEPT_SCORE] = score
    cells[at.STATE, at.KEPT_WORST] = cells[at.STATE, at.WORST]
    for t in range(begin, cells[at.STATE, at.TIMED_TO] + 1):
        k = cells[at.ORDER, t]
        free = (
            cells[at.ENDS, slot_at(cells, at.LINE, k - 1)] if k > cells[at.ROW, cells[at.RANK_AT, k]] else 0
        )
        cells[at.GAPS, k] = (
            cells[at.ENDS, slot_at(cells, at.LINE, k)] - cells[at.LENGTH, cells[at.LINE, k]] - free
        )


@jit
def rebuild(cells: Vector) -> int:
    """Make the line the order at hand, from nothing; return its score, or -1 if it deadlocks."""
    for r in range(cells[at.STATE, at.RANKS]):
        for group in range(3 * cells[at.STATE, at.STAGES]):
            cells[at.SPARE, group] = 0
        cells[at.FIRST, r] = cells[at.ROW, r]
        cells[at.NEXT, r] = cells[at.ROW, r]
        cells[at.STOP, r] = cells[at.ROW, r + 1]
        cells[at.CLOCK, r] = 0
        for k in range(cells[at.ROW, r], cells[at.ROW, r + 1]):
            group = cells[at.GROUP, cells[at.LINE, k]]
            cells[at.NUMBER, k] = cells[at.SPARE, group]
            cells[at.KEPT_LINE, k] = cells[at.LINE, k]
            cells[at.KEPT_NUMBER, k] = cells[at.SPARE, group]
            cells[at.SPARE, group] += 1
            cells[at.ENDS, slot_at(cells, at.LINE, k)] = -1
    cells[at.STATE, at.BEGIN], cells[at.STATE, at.END] = 0, cells[at.STATE, at.PLACES] - 1
    score: int = _time(cells)
    if score >= 0:
        keep(cells, score)
    return score
