"""The rows that a try of the annealing has changed: judged, kept or taken back.

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.compiled`).
"""

from __future__ import annotations

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.core.kernel import stays_legal
from zbcompile.planner.core.tables import Tables
from zbcompile.planner.improve import cells as at
from zbcompile.planner.improve.moves import touch
from zbcompile.planner.improve.retime import FAR, end_before, latest_at, slot_at

__all__ = ["are_legal", "fits", "forget", "note_held", "note_rows", "undo"]


@jit
def fits(t: Tables, cells: Vector, rank: int, limit: int) -> bool:
    """Return whether a changed row is legal and fits, and may end in time; number its actions anew.

    Only the changed places are looked at: the same actions in another order. Messages are taken to arrive
    when they do in the order at hand. If that puts the end that counts behind ``limit``, the change is
    dropped. The whole clock would drop it too but for one in thousands, and it takes many times as long.
    Most deadlocks are found this way.
    """
    S, m = cells[at.STATE, at.STAGES], cells[at.STATE, at.MICROBATCHES]
    low, high = cells[at.LOW, rank], cells[at.HIGH, rank]
    for e in range(cells[at.OWN_AT, rank], cells[at.OWN_AT, rank + 1]):
        for kind in range(4):
            cells[at.SPARE, kind * S + cells[at.OWN, e]] = -1
    for k in range(low, high + 1):
        code = cells[at.KEPT_LINE, k]
        group, waits = cells[at.GROUP, code], 3 * S + cells[at.STAGE, code]
        if cells[at.SPARE, group] < 0:
            cells[at.SPARE, group] = cells[at.KEPT_NUMBER, k]
        if group >= S and cells[at.SPARE, waits] < 0:
            cells[at.SPARE, waits] = cells[at.KEPT_WAITING, k]
    held, now = cells[at.KEPT_HELD, low], end_before(cells, rank, low)
    for k in range(low, high + 1):
        code = cells[at.LINE, k]
        kind, s, group = cells[at.KIND, code], cells[at.STAGE, code], cells[at.GROUP, code]
        i, waiting = cells[at.SPARE, group], cells[at.SPARE, 3 * S + s]
        if held + t.peak[code] > t.headroom[rank] or (kind == 2 and waiting == 0):
            return False
        if kind % 2 == 1 and 0 <= cells[at.SPARE, s] <= i:
            return False
        cells[at.NUMBER, k], cells[at.HELD, k], cells[at.WAITING, k] = i, held, waiting
        cells[at.SPARE, group] = i + 1
        held += t.memory[code]
        if kind == 1:
            cells[at.SPARE, 3 * S + s] = waiting + 1
        elif kind == 2:
            cells[at.SPARE, 3 * S + s] = waiting - 1
        for e in range(cells[at.BEFORE_AT, group], cells[at.BEFORE_AT, group + 1]):
            now = max(now, cells[at.ENDS, cells[at.BEFORE, e] * m + i] + cells[at.BEFORE_LAG, e])
        now += cells[at.LENGTH, code]
        cells[at.ENDS, group * m + i] = now
        for e in range(cells[at.AFTER_AT, group], cells[at.AFTER_AT, group + 1]):
            if now + cells[at.AFTER_LAG, e] - cells[at.KEPT_TAIL, cells[at.AFTER, e] * m + i] > limit:
                return False
    return bool(now - latest_at(cells, at.TAIL, rank, high + 1) <= limit)


@jit
def _keep_block(cells: Vector, low: int, high: int, copies: int, rank: int) -> bool:
    """Make what changed in one copy of a frozen block change in all copies.

    The first of ``copies`` copies reaches from ``low`` to ``high``. Returns False if a block without a second
    copy changed, or if other actions are in a copy than before.
    """
    size, source = high - low, -1
    for first in range(low, low + copies * size, size):
        for k in range(first, first + size):
            cells[at.SPARE, cells[at.LINE, k]] = 0
            cells[at.SPARE, cells[at.KEPT_LINE, k]] = 0
        for k in range(first, first + size):
            cells[at.SPARE, cells[at.LINE, k]] += 1
            cells[at.SPARE, cells[at.KEPT_LINE, k]] -= 1
        for k in range(first, first + size):
            if cells[at.SPARE, cells[at.LINE, k]] != 0:
                return False
            if source < 0 and cells[at.LINE, k] != cells[at.KEPT_LINE, k]:
                source = first
    if source >= 0:
        touch(cells, rank, low, low + copies * size - 1)
        for k in range(low, low + copies * size):
            cells[at.LINE, k] = cells[at.LINE, source + (k - low) % size]
    return source < 0 or copies > 1


@jit
def are_legal(t: Tables, cells: Vector, offsets: Vector, frozen_blocks: Vector, limit: int) -> bool:
    """Return whether the changed rows are legal and fit, and frozen blocks are as they must be.

    The end that counts may not lie behind ``limit``, as far as each changed row says.
    """
    for c in range(cells[at.STATE, at.TOUCHED]):
        r = cells[at.STATE, at.TOUCHED + 1 + c]
        low, high, copies = frozen_blocks[3 * r], frozen_blocks[3 * r + 1], frozen_blocks[3 * r + 2]
        if copies > 0 and not _keep_block(cells, low, high, copies, r):
            return False
        if not fits(t, cells, r, limit):
            return False
        if cells[at.STATE, at.HAS_SETS] == 1 and not stays_legal(t, offsets, cells[at.LINE], r):
            return False
    return True


@jit
def note_held(cells: Vector) -> None:
    """Make what `fits` counted in the changed rows what is known of the order at hand."""
    for c in range(cells[at.STATE, at.TOUCHED]):
        r = cells[at.STATE, at.TOUCHED + 1 + c]
        for k in range(cells[at.LOW, r], cells[at.HIGH, r] + 1):
            cells[at.KEPT_HELD, k] = cells[at.HELD, k]
            cells[at.KEPT_WAITING, k] = cells[at.WAITING, k]


@jit
def undo(cells: Vector) -> None:
    """Take back the moves."""
    for c in range(cells[at.STATE, at.TOUCHED]):
        r = cells[at.STATE, at.TOUCHED + 1 + c]
        for k in range(cells[at.LOW, r], cells[at.HIGH, r] + 1):
            cells[at.LINE, k], cells[at.NUMBER, k] = cells[at.KEPT_LINE, k], cells[at.KEPT_NUMBER, k]
            slot = slot_at(cells, at.KEPT_LINE, k)
            cells[at.ENDS, slot] = cells[at.KEPT_ENDS, slot]


@jit
def forget(cells: Vector) -> None:
    """Note that nothing is changed."""
    for c in range(cells[at.STATE, at.TOUCHED]):
        cells[at.LOW, cells[at.STATE, at.TOUCHED + 1 + c]] = -1
    cells[at.STATE, at.TOUCHED] = 0


@jit
def note_rows(t: Tables, cells: Vector) -> None:
    """Count along every row of an order that `rebuild` has just made the one at hand."""
    forget(cells)
    for r in range(t.num_ranks):
        begin, end = cells[at.ROW, r], cells[at.ROW, r + 1]
        for k in range(begin, end):
            cells[at.KEPT_HELD, k] = 0
            cells[at.KEPT_WAITING, k] = 0
        if begin < end:
            touch(cells, r, begin, end - 1)
            fits(t, cells, r, FAR)
            note_held(cells)
            forget(cells)
