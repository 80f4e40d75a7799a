"""Changes to an order that the annealing tries: each returns the rank it changed, or -1.

They change the line (`zbcompile.planner.improve.cells`) and note the range of places that they touch.
Compiled by numba where it is installed, as `zbcompile.planner.core.kernel` is.
"""

from __future__ import annotations

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.improve import cells as at

__all__ = ["below", "move_cause", "move_into_gap", "move_many", "move_one", "random_bits", "touch"]

_ROUNDS = 64
"""Most messages that `move_cause` follows."""


@jit
def random_bits(cells: Vector, row: int) -> int:
    """Return the next number of a 32-bit xorshift sequence, whose state is the element `RANDOM` of a row."""
    x: int = cells[row, at.RANDOM]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    cells[row, at.RANDOM] = x
    return x


@jit
def below(cells: Vector, count: int) -> int:
    """Return a random number from 0 to ``count`` - 1."""
    number: int = (random_bits(cells, at.STATE) * count) >> 32
    return number


@jit
def touch(cells: Vector, rank: int, low: int, high: int) -> None:
    """Note that places of a rank's row were changed; the first time, note the rank."""
    if cells[at.LOW, rank] < 0:
        cells[at.LOW, rank] = low
        cells[at.HIGH, rank] = high
        cells[at.STATE, at.TOUCHED] += 1
        cells[at.STATE, at.TOUCHED + cells[at.STATE, at.TOUCHED]] = rank
    else:
        cells[at.LOW, rank] = min(low, cells[at.LOW, rank])
        cells[at.HIGH, rank] = max(high, cells[at.HIGH, rank])


@jit
def _shift(cells: Vector, a: int, b: int) -> bool:
    """Take the action at place a to place b of the same row. Return False if nothing changes."""
    code = cells[at.LINE, a]
    changed = False
    step = 1 if b > a else -1
    low, high = min(a, b), max(a, b)
    while a != b:
        if cells[at.LINE, a + step] != code:
            changed = True
        cells[at.LINE, a] = cells[at.LINE, a + step]
        a += step
    cells[at.LINE, b] = code
    if changed:
        touch(cells, cells[at.RANK_AT, b], low, high)
    return changed


@jit
def _slide(cells: Vector, a: int, by: int) -> int:
    """Take the action at place a up to ``by`` places on, not past its like nor its own F, B or W.

    Returns its new place.
    """
    rank = cells[at.RANK_AT, a]
    code, own = cells[at.LINE, a], cells[at.NUMBER, a]
    stage, kind = cells[at.STAGE, code], cells[at.KIND, code]
    step = 1 if by > 0 else -1
    last = min(max(a + by, cells[at.ROW, rank]), cells[at.ROW, rank + 1] - 1)
    b = a
    while b != last:
        other = cells[at.LINE, b + step]
        if other == code:
            break
        if cells[at.STAGE, other] == stage and cells[at.NUMBER, b + step] == own:
            near = (cells[at.KIND, other] - kind) * step
            if near == 1 or (kind == 3 and near != 0) or (near == 3 and kind == 0):
                break
        cells[at.LINE, b] = other
        cells[at.NUMBER, b] = cells[at.NUMBER, b + step]
        b += step
    cells[at.LINE, b] = code
    cells[at.NUMBER, b] = own
    if b != a:
        touch(cells, rank, min(a, b), max(a, b))
    return b


@jit
def _gap(cells: Vector, rank: int) -> int:
    """Return a random place of the rank's row that is waited at, or -1."""
    begin, end = cells[at.ROW, rank], cells[at.ROW, rank + 1]
    a: int = begin + below(cells, end - begin)
    for _ in range(end - begin):
        if cells[at.GAPS, a] > 0:
            return a
        a = a + 1 if a + 1 < end else begin
    return -1


@jit
def move_into_gap(cells: Vector, rank: int) -> int:
    """Where the rank waits for a message, run the next action of some other kind or stage first."""
    S = cells[at.STATE, at.STAGES]
    a = _gap(cells, rank)
    if a < 0:
        return -1
    pick = below(cells, 3 * (cells[at.OWN_AT, rank + 1] - cells[at.OWN_AT, rank]))
    kind, s = pick % 3, cells[at.OWN, cells[at.OWN_AT, rank] + pick // 3]
    wanted = kind * S + s
    if cells[at.LINE, a] == wanted:
        return -1
    for b in range(a + 1, cells[at.ROW, rank + 1]):
        code = cells[at.LINE, b]
        if code == wanted or (kind == 1 and code == 3 * S + s):
            return rank if _shift(cells, b, a) else -1
    return -1


@jit
def move_cause(cells: Vector, rank: int, jumps: Vector) -> int:
    """Where the rank waits for a message, move up what held the message up.

    The messages are followed to an action that its own rank held up. This action is moved up within what runs
    without a pause before it, or one of those behind it.

    Notes
    -----
    The neighbourhood of critical blocks in job shops (Nowicki and Smutnicki, Management Science 42, 1996).
    """
    m = cells[at.STATE, at.MICROBATCHES]
    a = _gap(cells, rank)
    if a < 0:
        return -1
    for _ in range(_ROUNDS):
        group = cells[at.GROUP, cells[at.KEPT_LINE, a]]
        first = cells[at.BEFORE_AT, group]
        count = cells[at.BEFORE_AT, group + 1] - first  # not 0: there is a message to wait for
        source = cells[at.BEFORE, first + (below(cells, count) if count > 1 else 0)]
        a = cells[at.PLACE_OF, source * m + cells[at.KEPT_NUMBER, a]]
        if cells[at.GAPS, a] <= 0:
            break
    rank = cells[at.RANK_AT, a]
    begin, block = cells[at.ROW, rank], 0
    while a - block > begin and cells[at.GAPS, a - block] <= 0:
        block += 1
    if block == 0:
        return -1
    way = below(cells, 3)
    jump = jumps[random_bits(cells, at.STATE) & 4095]
    if way == 1 or jump > block:
        jump = 1 + below(cells, block)
    if way == 2:
        return rank if _shift(cells, a - jump, a) else -1
    return rank if _shift(cells, a, a - jump) else -1


@jit
def move_one(cells: Vector, rank: int, jumps: Vector) -> int:
    """Take one action of a rank some places forward or back."""
    begin, end = cells[at.ROW, rank], cells[at.ROW, rank + 1]
    a: int = begin + below(cells, end - begin)
    jump = jumps[random_bits(cells, at.STATE) & 4095]
    if random_bits(cells, at.STATE) & 64:
        jump = -jump
    return rank if _slide(cells, a, jump) != a else -1


@jit
def move_many(cells: Vector, rank: int, width: int) -> int:
    """Take a range of microbatches of one (kind, stage) some places forward or back."""
    begin, end = cells[at.ROW, rank], cells[at.ROW, rank + 1]
    code = cells[at.LINE, begin + below(cells, end - begin)]
    low = below(cells, cells[at.STATE, at.MICROBATCHES])
    high = low + below(cells, cells[at.STATE, at.MICROBATCHES])
    by = 1 + below(cells, width)
    forward, changed = random_bits(cells, at.STATE) & 64 == 0, False
    for n in range(end - begin):
        a = end - 1 - n if forward else begin + n
        chosen = cells[at.LINE, a] == code and low <= cells[at.NUMBER, a] <= high
        if chosen and _slide(cells, a, by if forward else -by) != a:
            changed = True
    return rank if changed else -1
