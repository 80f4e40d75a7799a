"""Changes to an order that the annealing tries: each returns the rank it changed, or -1.

They change the line (`zbcompile.planner.improve.cells`) and note the range of places that they touch.
Compiled by numba where it is installed, as `zbcompile.planner.core.kernel` is.
"""

from __future__ import annotations

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.improve.cells import TOUCHED, Layout

__all__ = ["below", "move_cause", "move_into_gap", "move_many", "move_one", "random_bits", "touch"]

_ROUNDS = 64
"""Most messages that `move_cause` follows."""


@jit
def random_bits(cells: Vector, at: Layout) -> int:
    """Return the next number of a 32-bit xorshift sequence, which `Layout.state` begins with."""
    x: int = cells[at.state]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    cells[at.state] = x
    return x


@jit
def below(cells: Vector, at: Layout, count: int) -> int:
    """Return a random number from 0 to ``count`` - 1."""
    number: int = (random_bits(cells, at) * count) >> 32
    return number


@jit
def touch(cells: Vector, at: Layout, rank: int, low: int, high: int) -> None:
    """Note that places of a rank's row were changed; the first time, note the rank."""
    if cells[at.low + rank] < 0:
        cells[at.low + rank] = low
        cells[at.high + rank] = high
        cells[at.state + TOUCHED] += 1
        cells[at.state + TOUCHED + cells[at.state + TOUCHED]] = rank
    else:
        cells[at.low + rank] = min(low, cells[at.low + rank])
        cells[at.high + rank] = max(high, cells[at.high + rank])


@jit
def _shift(cells: Vector, at: Layout, a: int, b: int) -> bool:
    """Take the action at place a to place b of the same row. Return False if nothing changes."""
    code = cells[at.line + a]
    changed = False
    step = 1 if b > a else -1
    low, high = min(a, b), max(a, b)
    while a != b:
        if cells[at.line + a + step] != code:
            changed = True
        cells[at.line + a] = cells[at.line + a + step]
        a += step
    cells[at.line + b] = code
    if changed:
        touch(cells, at, cells[at.rank_at + b], low, high)
    return changed


@jit
def _slide(cells: Vector, at: Layout, a: int, by: int) -> int:
    """Take the action at place a up to ``by`` places on, not past its like nor its own F, B or W.

    Returns its new place.
    """
    rank = cells[at.rank_at + a]
    code, own = cells[at.line + a], cells[at.number + a]
    stage, kind = cells[at.stage + code], cells[at.kind + code]
    step = 1 if by > 0 else -1
    last = min(max(a + by, cells[at.row + rank]), cells[at.row + rank + 1] - 1)
    b = a
    while b != last:
        other = cells[at.line + b + step]
        if other == code:
            break
        if cells[at.stage + other] == stage and cells[at.number + b + step] == own:
            near = (cells[at.kind + other] - kind) * step
            if near == 1 or (kind == 3 and near != 0) or (near == 3 and kind == 0):
                break
        cells[at.line + b] = other
        cells[at.number + b] = cells[at.number + b + step]
        b += step
    cells[at.line + b] = code
    cells[at.number + b] = own
    if b != a:
        touch(cells, at, rank, min(a, b), max(a, b))
    return b


@jit
def _gap(cells: Vector, at: Layout, rank: int) -> int:
    """Return a random place of the rank's row that is waited at, or -1."""
    begin, end = cells[at.row + rank], cells[at.row + rank + 1]
    a: int = begin + below(cells, at, end - begin)
    for _ in range(end - begin):
        if cells[at.gaps + a] > 0:
            return a
        a = a + 1 if a + 1 < end else begin
    return -1


@jit
def move_into_gap(cells: Vector, at: Layout, rank: int) -> int:
    """Where the rank waits for a message, run the next action of some other kind or stage first."""
    S = at.num_stages
    a = _gap(cells, at, rank)
    if a < 0:
        return -1
    pick = below(cells, at, 3 * (cells[at.own_at + rank + 1] - cells[at.own_at + rank]))
    kind, s = pick % 3, cells[at.own + cells[at.own_at + rank] + pick // 3]
    wanted = kind * S + s
    if cells[at.line + a] == wanted:
        return -1
    for b in range(a + 1, cells[at.row + rank + 1]):
        code = cells[at.line + b]
        if code == wanted or (kind == 1 and code == 3 * S + s):
            return rank if _shift(cells, at, b, a) else -1
    return -1


@jit
def move_cause(cells: Vector, at: Layout, rank: int, jumps: Vector) -> int:
    """Where the rank waits for a message, move up what held the message up.

    The messages are followed to an action that its own rank held up. This action is moved up within what runs
    without a pause before it, or one of those behind it.

    Notes
    -----
    The neighbourhood of critical blocks in job shops (Nowicki and Smutnicki, Management Science 42, 1996).
    """
    m = at.num_microbatches
    a = _gap(cells, at, rank)
    if a < 0:
        return -1
    for _ in range(_ROUNDS):
        group = cells[at.group + cells[at.kept_line + a]]
        if group < 0:
            return -1
        first = cells[at.before_at + group]
        count = cells[at.before_at + group + 1] - first
        if count == 0:
            return -1
        source = cells[at.before + first + (below(cells, at, count) if count > 1 else 0)]
        a = cells[at.place_of + source * m + cells[at.kept_number + a]]
        if cells[at.gaps + a] <= 0:
            break
    rank = cells[at.rank_at + a]
    begin, block = cells[at.row + rank], 0
    while a - block > begin and cells[at.gaps + a - block] <= 0:
        block += 1
    if block == 0:
        return -1
    way = below(cells, at, 3)
    jump = jumps[random_bits(cells, at) & 4095]
    if way == 1 or jump > block:
        jump = 1 + below(cells, at, block)
    if way == 2:
        return rank if _shift(cells, at, a - jump, a) else -1
    return rank if _shift(cells, at, a, a - jump) else -1


@jit
def move_one(cells: Vector, at: Layout, rank: int, jumps: Vector) -> int:
    """Take one action of a rank some places forward or back."""
    begin, end = cells[at.row + rank], cells[at.row + rank + 1]
    a: int = begin + below(cells, at, end - begin)
    jump = jumps[random_bits(cells, at) & 4095]
    if random_bits(cells, at) & 64:
        jump = -jump
    return rank if _slide(cells, at, a, jump) != a else -1


@jit
def move_many(cells: Vector, at: Layout, rank: int, width: int) -> int:
    """Take a range of microbatches of one (kind, stage) some places forward or back."""
    begin, end = cells[at.row + rank], cells[at.row + rank + 1]
    code = cells[at.line + begin + below(cells, at, end - begin)]
    low = below(cells, at, at.num_microbatches)
    high = low + below(cells, at, at.num_microbatches)
    by = 1 + below(cells, at, width)
    changed = False
    if random_bits(cells, at) & 64:
        for a in range(begin, end):
            chosen = cells[at.line + a] == code and low <= cells[at.number + a] <= high
            if chosen and _slide(cells, at, a, -by) != a:
                changed = True
    else:
        for back in range(end - begin):
            a = end - 1 - back
            chosen = cells[at.line + a] == code and low <= cells[at.number + a] <= high
            if chosen and _slide(cells, at, a, by) != a:
                changed = True
    return rank if changed else -1
