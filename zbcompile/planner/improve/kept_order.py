"""What is known of the order at hand of the annealing: numbers, times, waits, longest ways to the end.

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.compiled`).
"""

from __future__ import annotations

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.improve.cells import (
    KEPT_SCORE,
    KEPT_WORST,
    LATE_FROM,
    LATE_TO,
    TIMED_TO,
    WORST,
    Layout,
)

__all__ = [
    "copy_slots",
    "end_before",
    "keep",
    "last_tail",
    "noted_ahead",
    "place_from",
    "renumber",
    "score_of",
    "worst_of",
]

_FAR = 1 << 60


@jit
def renumber(cells: Vector, at: Layout, low: int, high: int) -> None:
    """Number the actions at the places ``low`` to ``high`` of one row by their order.

    They are those of the order at hand, in another order.
    """
    for k in range(low, high + 1):
        code = cells[at.kept_line + k]
        group = cells[at.group + code]
        cells[at.spare + (code if group < 0 else group)] = -1
    for k in range(low, high + 1):
        code = cells[at.kept_line + k]
        group = cells[at.group + code]
        slot = at.spare + (code if group < 0 else group)
        if cells[slot] < 0:
            cells[slot] = cells[at.kept_number + k]
    for k in range(low, high + 1):
        code = cells[at.line + k]
        group = cells[at.group + code]
        slot = at.spare + (code if group < 0 else group)
        cells[at.number + k] = cells[slot]
        cells[slot] += 1


@jit
def place_from(cells: Vector, at: Layout, rank: int, position: int) -> int:
    """Return the first place of a rank's row whose position is ``position`` or later."""
    low: int = cells[at.row + rank]
    high: int = cells[at.row + rank + 1]
    while low < high:
        middle = (low + high) >> 1
        if cells[at.position + middle] < position:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def end_before(cells: Vector, at: Layout, rank: int, place: int) -> int:
    """Return when the rank is free for the action at a place, in the order at hand."""
    time, k = 0, place - 1
    while k >= cells[at.row + rank]:
        code = cells[at.kept_line + k]
        group = cells[at.group + code]
        if group >= 0:
            end: int = cells[at.kept_ends + group * at.num_microbatches + cells[at.kept_number + k]]
            return time + end
        time += cells[at.length + code]
        k -= 1
    return time


@jit
def noted_ahead(cells: Vector, at: Layout, values: int, rank: int, place: int, last: int) -> int:
    """Return what holds at a place for the rank: its latest start, or the longest way to the end that counts.

    ``values`` is where that is noted per slot: `Layout.late`, `kept_late` or `tail`. W's have no slot: from
    the next F or B, or from ``last`` if there is none, their lengths are counted back.
    """
    k, end = place, cells[at.row + rank + 1]
    time = 0
    while k < end:
        code = cells[at.kept_line + k]
        group = cells[at.group + code]
        if group >= 0:
            noted: int = cells[values + group * at.num_microbatches + cells[at.kept_number + k]]
            return noted + time if values == at.tail else noted - time
        time += cells[at.length + code]
        k += 1
    return last + time if values == at.tail else last - time


@jit
def last_tail(cells: Vector, at: Layout, rank: int) -> int:
    """Return the longest way from the end of a rank's row to the end that counts: none, or far below zero."""
    return 0 if at.is_span == 0 or rank == at.root else -_FAR


@jit
def score_of(cells: Vector, at: Layout) -> int:
    """Return the score of the order at hand."""
    score: int = cells[at.state + KEPT_SCORE]
    return score


@jit
def worst_of(cells: Vector, at: Layout) -> int:
    """Return the objective of the order at hand."""
    worst: int = cells[at.state + KEPT_WORST]
    return worst


@jit
def copy_slots(cells: Vector, at: Layout, target: int, source: int, begin: int, end: int) -> None:
    """Copy what is noted per slot for the positions ``begin`` to ``end`` of the order at hand."""
    for t in range(begin, end + 1):
        k = cells[at.order + t]
        group = cells[at.group + cells[at.kept_line + k]]
        if group >= 0:
            slot = group * at.num_microbatches + cells[at.kept_number + k]
            cells[target + slot] = cells[source + slot]


@jit
def keep(cells: Vector, at: Layout, begin: int, end: int, score: int) -> None:
    """Make the changed order, as `retime` timed it, the one at hand."""
    m = at.num_microbatches
    for r in range(at.num_ranks):
        last = last_tail(cells, at, r)
        cells[at.latest + r] = noted_ahead(cells, at, at.tail, r, cells[at.stop + r], last)
        cells[at.kept_latest + r] = noted_ahead(cells, at, at.tail, r, cells[at.first + r], last)
    for t in range(begin, end + 1):
        k = cells[at.changed_order + t - begin]
        cells[at.order + t] = k
        cells[at.position + k] = t
        cells[at.kept_line + k] = cells[at.line + k]
        cells[at.kept_number + k] = cells[at.number + k]
        group = cells[at.group + cells[at.line + k]]
        if group >= 0:
            cells[at.place_of + group * m + cells[at.number + k]] = k
    copy_slots(cells, at, at.kept_ends, at.ends, begin, cells[at.state + TIMED_TO])
    copy_slots(cells, at, at.kept_late, at.late, cells[at.state + LATE_FROM], cells[at.state + LATE_TO])
    cells[at.state + KEPT_SCORE] = score
    cells[at.state + KEPT_WORST] = cells[at.state + WORST]
    _note_gaps(cells, at)
    _note_tails(cells, at, begin, end)


@jit
def _note_gaps(cells: Vector, at: Layout) -> None:
    """Note the waits of the order at hand, from the window on as far as it was timed."""
    m = at.num_microbatches
    for r in range(at.num_ranks):
        first, stop = cells[at.first + r], cells[at.row + r + 1]
        now = end_before(cells, at, r, first)
        for k in range(first, stop):
            if cells[at.position + k] > cells[at.state + TIMED_TO]:
                break
            code = cells[at.line + k]
            group = cells[at.group + code]
            cells[at.gaps + k] = 0
            if group >= 0:
                done = cells[at.kept_ends + group * m + cells[at.number + k]]
                cells[at.gaps + k] = done - cells[at.length + code] - now
                now = done
            else:
                now += cells[at.length + code]


@jit
def _note_tails(cells: Vector, at: Layout, begin: int, end: int) -> None:
    """Note the longest ways to the end that counts, from the window back as long as something differs."""
    m = at.num_microbatches
    near, t = at.num_places, end + 1
    while t > begin or near < t:
        t -= 1
        k = cells[at.order + t]
        r = cells[at.rank_at + k]
        code = cells[at.line + k]
        group = cells[at.group + code]
        now = cells[at.latest + r] + cells[at.length + code]
        was = cells[at.kept_latest + r] + cells[at.length + code]
        if group >= 0:
            i = cells[at.number + k]
            slot = group * m + i
            for e in range(cells[at.after_at + group], cells[at.after_at + group + 1]):
                way = cells[at.after_lag + e] + cells[at.tail + cells[at.after + e] * m + i]
                now = max(now, way + cells[at.length + code])
            was = cells[at.tail + slot]
            if now != was:
                cells[at.tail + slot] = now
                for e in range(cells[at.before_at + group], cells[at.before_at + group + 1]):
                    place = cells[at.place_of + cells[at.before + e] * m + i]
                    near = min(near, cells[at.position + place])
        cells[at.latest + r] = now
        if t < begin:
            cells[at.kept_latest + r] = was
            if now != was and k > cells[at.row + r]:
                near = min(near, cells[at.position + k - 1])
        if t == begin:
            for r in range(at.num_ranks):
                first = cells[at.first + r]
                if cells[at.latest + r] != cells[at.kept_latest + r] and first > cells[at.row + r]:
                    near = min(near, cells[at.position + first - 1])
