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
from zbcompile.planner.improve.cells import LATE_FROM, LATE_TO, ROWS_DIFFER, TIMED_TO, WORST, Layout
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
def _open(cells: Vector, at: Layout, begin: int, end: int) -> None:
    """Make the positions ``begin`` to ``end`` of the topological order the window."""
    for r in range(at.num_ranks):
        first = place_from(cells, at, r, begin)
        stop = place_from(cells, at, r, end + 1)
        cells[at.first + r] = first
        cells[at.next + r] = first
        cells[at.stop + r] = stop
        cells[at.clock + r] = end_before(cells, at, r, first)
        cells[at.kept_clock + r] = end_before(cells, at, r, stop)
        for k in range(first, stop):
            group = cells[at.group + cells[at.line + k]]
            if group >= 0:
                cells[at.ends + group * at.num_microbatches + cells[at.number + k]] = -1


@jit
def _sweep(cells: Vector, at: Layout, end: int, limit: int) -> int:
    """Time the window: all ranks in turn, as far as their messages are there.

    Returns
    -------
    int
        -2 as soon as the end that counts must lie behind ``limit``, -1 on deadlock, else the last position
        behind the window that finds its rank or a message at another time than in the order at hand, 0 if
        none does.
    """
    m, p = at.num_microbatches, at.num_ranks
    done, left, far = 0, 0, 0
    for r in range(p):
        left += cells[at.stop + r] - cells[at.first + r]
    moved, upward = True, False
    while moved and left > 0:
        moved = False
        upward = not upward
        for q in range(p):
            r = p - 1 - q if upward else q
            k, stop, now = cells[at.next + r], cells[at.stop + r], cells[at.clock + r]
            begin = k
            while k < stop:
                code = cells[at.line + k]
                group = cells[at.group + code]
                if group < 0:
                    now += cells[at.length + code]
                else:
                    i = cells[at.number + k]
                    start = now
                    blocked = False
                    for e in range(cells[at.before_at + group], cells[at.before_at + group + 1]):
                        sent = cells[at.ends + cells[at.before + e] * m + i]
                        if sent < 0:
                            blocked = True
                            break
                        start = max(start, sent + cells[at.before_lag + e])
                    if blocked:
                        break
                    now = start + cells[at.length + code]
                    slot = group * m + i
                    cells[at.ends + slot] = now
                    for e in range(cells[at.after_at + group], cells[at.after_at + group + 1]):
                        other = cells[at.after + e] * m + i
                        position = cells[at.position + cells[at.place_of + other]]
                        if position > end:
                            if now + cells[at.after_lag + e] + cells[at.tail + other] > limit:
                                return -2
                            if now != cells[at.kept_ends + slot]:
                                far = max(far, position)
                cells[at.changed_order + done] = k
                done += 1
                k += 1
            if k == begin:
                continue
            moved = True
            left -= k - begin
            cells[at.next + r] = k
            cells[at.clock + r] = now
            if k == stop and now != cells[at.kept_clock + r]:
                if k < cells[at.row + r + 1]:
                    if now + noted_ahead(cells, at, at.tail, r, k, last_tail(cells, at, r)) > limit:
                        return -2
                    far = max(far, cells[at.position + k])
                else:
                    if (at.is_span == 0 or r == at.root) and now > limit:
                        return -2
                    cells[at.state + ROWS_DIFFER] = 1
    return far if left == 0 else -1


@jit
def _follow(cells: Vector, at: Layout, end: int, far: int) -> None:
    """Time what follows the window, as long as something differs: position ``far`` at least."""
    m = at.num_microbatches
    t = end
    while t < far:
        t += 1
        k = cells[at.order + t]
        r = cells[at.rank_at + k]
        code = cells[at.line + k]
        group = cells[at.group + code]
        now = cells[at.clock + r]
        if group < 0:
            now += cells[at.length + code]
            was = cells[at.kept_clock + r] + cells[at.length + code]
        else:
            i = cells[at.number + k]
            slot = group * m + i
            for e in range(cells[at.before_at + group], cells[at.before_at + group + 1]):
                now = max(now, cells[at.ends + cells[at.before + e] * m + i] + cells[at.before_lag + e])
            now += cells[at.length + code]
            was = cells[at.kept_ends + slot]
            if now != was:
                cells[at.ends + slot] = now
                for e in range(cells[at.after_at + group], cells[at.after_at + group + 1]):
                    place = cells[at.place_of + cells[at.after + e] * m + i]
                    far = max(far, cells[at.position + place])
        cells[at.clock + r] = now
        cells[at.kept_clock + r] = was
        if now != was:
            if k + 1 < cells[at.row + r + 1]:
                far = max(far, cells[at.position + k + 1])
            else:
                cells[at.state + ROWS_DIFFER] = 1
    cells[at.state + TIMED_TO] = t


@jit
def _row_end(cells: Vector, at: Layout, rank: int) -> int:
    """Return when a rank ends in the changed order."""
    end: int = cells[at.row + rank + 1]
    time: int = cells[at.clock + rank]
    if end > cells[at.row + rank] and cells[at.position + end - 1] > cells[at.state + TIMED_TO]:
        time = end_before(cells, at, rank, end)
    return time


@jit
def _look_back(cells: Vector, at: Layout, begin: int, end: int) -> None:
    """Find the latest starts, from the last that may differ as long as something differs."""
    m = at.num_microbatches
    rows_differ = cells[at.state + ROWS_DIFFER] == 1
    top = at.num_places - 1 if rows_differ else end
    for r in range(at.num_ranks):
        if rows_differ:
            cells[at.latest + r] = _row_end(cells, at, r)
        else:
            last = end_before(cells, at, r, cells[at.row + r + 1])
            cells[at.latest + r] = noted_ahead(cells, at, at.late, r, cells[at.stop + r], last)
    near, t = at.num_places, top + 1
    while t > begin or near < t:
        t -= 1
        k = cells[at.changed_order + t - begin] if begin <= t <= end else cells[at.order + t]
        r = cells[at.rank_at + k]
        code = cells[at.line + k]
        group = cells[at.group + code]
        now = cells[at.latest + r]
        if group < 0:
            now -= cells[at.length + code]
            was = cells[at.kept_latest + r] - cells[at.length + code]
        else:
            i = cells[at.number + k]
            slot = group * m + i
            for e in range(cells[at.after_at + group], cells[at.after_at + group + 1]):
                now = min(now, cells[at.late + cells[at.after + e] * m + i] - cells[at.after_lag + e])
            now -= cells[at.length + code]
            was = cells[at.kept_late + slot]
            if now != was:
                cells[at.late + slot] = now
                for e in range(cells[at.before_at + group], cells[at.before_at + group + 1]):
                    place = cells[at.place_of + cells[at.before + e] * m + i]
                    if cells[at.position + place] < begin:
                        near = min(near, cells[at.position + place])
        cells[at.latest + r] = now
        cells[at.kept_latest + r] = was
        if t < begin and now != was and k > cells[at.row + r]:
            near = min(near, cells[at.position + k - 1])
        if t == begin:
            for r in range(at.num_ranks):
                first = cells[at.first + r]
                last = end_before(cells, at, r, cells[at.row + r + 1])
                cells[at.kept_latest + r] = noted_ahead(cells, at, at.kept_late, r, first, last)
                if cells[at.latest + r] != cells[at.kept_latest + r] and first > cells[at.row + r]:
                    near = min(near, cells[at.position + first - 1])
    cells[at.state + LATE_FROM] = t
    cells[at.state + LATE_TO] = top


@jit
def _score(cells: Vector, at: Layout) -> int:
    """Return the score of the timed order, and note its objective."""
    m = at.num_microbatches
    worst, summed = 0, 0
    for r in range(at.num_ranks):
        begin, end = cells[at.row + r], cells[at.row + r + 1]
        value = _row_end(cells, at, r)
        if at.is_span == 1 and begin < end:  # a legal row begins with an F
            value -= cells[at.late + cells[at.group + cells[at.line + begin]] * m + cells[at.number + begin]]
        summed += value
        worst = max(worst, value)
    cells[at.state + WORST] = worst
    return 100 * at.num_ranks * worst + summed


@jit
def retime(cells: Vector, at: Layout, begin: int, end: int, most: int) -> int:
    """Return the score of the changed order, -1 if it deadlocks, -2 if its score is above ``most``.

    All changes lie within the positions ``begin`` to ``end`` of the order at hand.
    """
    cells[at.state + TIMED_TO] = end
    cells[at.state + LATE_FROM] = 0
    cells[at.state + LATE_TO] = -1
    cells[at.state + ROWS_DIFFER] = 0
    _open(cells, at, begin, end)
    far: int = _sweep(cells, at, end, (most - at.others_work) // (100 * at.num_ranks + 1))
    if far < 0:
        return far
    _follow(cells, at, end, far)
    if at.is_span == 1:
        _look_back(cells, at, begin, end)
    score: int = _score(cells, at)
    return score


@jit
def restore(cells: Vector, at: Layout, begin: int) -> None:
    """Take back what `retime` noted of a changed order; the window began at position ``begin``."""
    copy_slots(cells, at, at.ends, at.kept_ends, begin, cells[at.state + TIMED_TO])
    copy_slots(cells, at, at.late, at.kept_late, cells[at.state + LATE_FROM], cells[at.state + LATE_TO])


@jit
def rebuild(cells: Vector, at: Layout) -> int:
    """Make the line the order at hand, from nothing; return its score, or -1 if it deadlocks."""
    m, size = at.num_microbatches, at.num_places
    for r in range(at.num_ranks):
        for k in range(3 * at.num_stages):
            cells[at.spare + k] = 0
        cells[at.first + r] = cells[at.row + r]
        cells[at.next + r] = cells[at.row + r]
        cells[at.stop + r] = cells[at.row + r + 1]
        cells[at.clock + r] = 0
        cells[at.kept_clock + r] = -1
        for k in range(cells[at.row + r], cells[at.row + r + 1]):
            code = cells[at.line + k]
            group = cells[at.group + code]
            slot = at.spare + (code if group < 0 else group)
            cells[at.number + k] = cells[slot]
            cells[at.kept_line + k] = code
            cells[at.kept_number + k] = cells[slot]
            if group >= 0:
                cells[at.ends + group * m + cells[slot]] = -1
                cells[at.kept_late + group * m + cells[slot]] = -1
                cells[at.place_of + group * m + cells[slot]] = k
            cells[slot] += 1
            cells[at.position + k] = 0
    if _sweep(cells, at, size, _FAR) < 0:
        return -1
    cells[at.state + ROWS_DIFFER] = 1
    cells[at.state + TIMED_TO] = size - 1
    cells[at.state + LATE_FROM] = 0
    cells[at.state + LATE_TO] = -1
    if at.is_span == 1:
        _look_back(cells, at, 0, size - 1)
    score: int = _score(cells, at)
    keep(cells, at, 0, size - 1, score)
    return score
