"""Changes to an order that the annealing tries: each returns the rank it changed, or -1.

Compiled by numba where it is installed, as `zbcompile.planner.core.kernel` is.
"""

from __future__ import annotations

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.core.tables import Tables

__all__ = ["move_cause", "move_into_gap", "move_many", "move_one", "random_bits"]

_ROUNDS = 64
"""Most messages that `move_cause` follows."""


@jit
def random_bits(state: Vector) -> int:
    """Return the next number of a 32-bit xorshift sequence; the state is the first element."""
    x: int = state[0]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    state[0] = x
    return x


@jit
def _shift(line: Vector, begin: int, a: int, b: int) -> bool:
    """Take the action at place a of a rank's row to place b. Return False if nothing changes."""
    code = line[begin + a]
    changed = False
    step = 1 if b > a else -1
    while a != b:
        if line[begin + a + step] != code:
            changed = True
        line[begin + a] = line[begin + a + step]
        a += step
    line[begin + b] = code
    return changed


@jit
def _gap(offsets: Vector, rank: int, state: Vector, gaps: Vector) -> int:
    """Return a random place of the rank's row that is waited at, or -1."""
    begin, size = offsets[rank], offsets[rank + 1] - offsets[rank]
    a: int = random_bits(state) % size
    for _ in range(size):
        if gaps[begin + a] > 0:
            return a
        a = a + 1 if a + 1 < size else 0
    return -1


@jit
def move_into_gap(t: Tables, offsets: Vector, line: Vector, rank: int, state: Vector, gaps: Vector) -> int:
    """Where the rank waits for a message, run the next action of some other kind or stage first."""
    S, begin, size = t.num_stages, offsets[rank], offsets[rank + 1] - offsets[rank]
    a = _gap(offsets, rank, state, gaps)
    own = t.own_at[rank + 1] - t.own_at[rank]
    pick = random_bits(state) % (3 * own)
    kind, s = pick % 3, t.own[t.own_at[rank] + pick // 3]
    if a < 0 or line[begin + a] == kind * S + s:
        return -1
    for b in range(a + 1, size):
        code = line[begin + b]
        if code == kind * S + s or (kind == 1 and code == 3 * S + s):
            return rank if _shift(line, begin, b, a) else -1
    return -1


@jit
def _sender(t: Tables, offsets: Vector, line: Vector, rank: int, a: int, state: Vector) -> int:
    """Return the place in the line of an action that the one at place a of the rank waits for, or -1."""
    S, begin = t.num_stages, offsets[rank]
    kind = line[begin + a] // S
    s = line[begin + a] - kind * S
    if kind == 2:
        return -1
    one, other = (s, s) if kind == 0 else (S + s, 3 * S + s)
    i = 0
    for k in range(begin, begin + a):
        if line[k] == one or line[k] == other:
            i += 1
    if kind == 0:
        first, count = t.forward_at[s], t.forward_at[s + 1] - t.forward_at[s]
    else:
        first, count = t.backward_at[s], t.backward_at[s + 1] - t.backward_at[s]
    if count == 0:
        return -1
    if kind == 0:
        source = t.forward_from[first + random_bits(state) % count]
        one, other = source, source
    else:
        source = t.backward_from[first + random_bits(state) % count]
        one, other = S + source, 3 * S + source
    for k in range(offsets[t.rank_of[source]], offsets[t.rank_of[source] + 1]):
        if line[k] == one or line[k] == other:
            if i == 0:
                return k
            i -= 1
    return -1


@jit
def move_cause(
    t: Tables, offsets: Vector, line: Vector, rank: int, state: Vector, jumps: Vector, gaps: Vector
) -> int:
    """Where the rank waits for a message, move up what held the message up.

    The messages are followed to an action that its own rank held up. This action is moved up within what runs
    without a pause before it, or one of those behind it.

    Notes
    -----
    The neighbourhood of critical blocks in job shops (Nowicki and Smutnicki, Management Science 42, 1996).
    """
    a = _gap(offsets, rank, state, gaps)
    if a < 0:
        return -1
    for _ in range(_ROUNDS):
        at = _sender(t, offsets, line, rank, a, state)
        if at < 0:
            return -1
        rank = t.rank_of[line[at] % t.num_stages]
        a = at - offsets[rank]
        if gaps[at] <= 0:
            break
    begin, block = offsets[rank], 0
    while a - block > 0 and gaps[begin + a - block] <= 0:
        block += 1
    if block == 0:
        return -1
    way = random_bits(state) % 3
    jump = jumps[random_bits(state) % 4096]
    if way == 1 or jump > block:
        jump = 1 + random_bits(state) % block
    if way == 2:
        return rank if _shift(line, begin, a - jump, a) else -1
    return rank if _shift(line, begin, a, a - jump) else -1


@jit
def move_one(offsets: Vector, line: Vector, rank: int, state: Vector, jumps: Vector) -> int:
    """Take one action of a rank some places forward or back."""
    begin, size = offsets[rank], offsets[rank + 1] - offsets[rank]
    a: int = random_bits(state) % size
    jump = jumps[random_bits(state) % 4096]
    b = a - jump if random_bits(state) & 64 else a + jump
    b = min(max(b, 0), size - 1)
    return rank if _shift(line, begin, a, b) else -1


@jit
def move_many(
    t: Tables, offsets: Vector, line: Vector, rank: int, state: Vector, spare: Vector, width: int
) -> int:
    """Take a range of microbatches of one (kind, stage) some places forward or back."""
    begin, size = offsets[rank], offsets[rank + 1] - offsets[rank]
    code = line[begin + random_bits(state) % size]
    m = t.num_microbatches
    low = random_bits(state) % m
    high = low + 1 + random_bits(state) % m
    shift = 1 + random_bits(state) % width
    if random_bits(state) & 64:
        shift = -shift
    kept, moved, seen = 0, 0, 0
    for k in range(size):
        here = line[begin + k]
        chosen = False
        if here == code:
            chosen = low <= seen < high
            seen += 1
        if chosen:
            spare[size + moved] = k
            moved += 1
        else:
            spare[kept] = k
            kept += 1
    if moved == 0 or kept == 0:
        return -1
    for k in range(size):
        spare[2 * size + k] = line[begin + k]
    x, y, changed = 0, 0, False
    for k in range(size):
        take = x == kept
        if not take and y < moved:
            goal = 2 * (spare[size + y] + shift) + (1 if shift > 0 else -1)
            take = goal < 2 * spare[x]
        if take:
            source = spare[size + y]
            y += 1
        else:
            source = spare[x]
            x += 1
        here = spare[2 * size + source]
        if here != line[begin + k]:
            changed = True
        line[begin + k] = here
    return rank if changed else -1
