"""Inner loop of the annealing: change an order, keep or drop the change.

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.tables`).
"""

from __future__ import annotations

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.core.kernel import evaluate_line, stays_legal
from zbcompile.planner.core.tables import Tables
from zbcompile.planner.improve.moves import move_cause, move_into_gap, move_many, move_one, random_bits

__all__ = ["anneal", "keep_block"]


@jit
def keep_block(low: int, high: int, copies: int, current: Vector, trial: Vector) -> bool:
    """Make what changed in one copy of a frozen block change in all copies.

    The first of ``copies`` copies reaches from ``low`` to ``high``. Returns False if a block without a second
    copy changed.
    """
    size = high - low
    for copy in range(copies):
        for k in range(low + copy * size, high + copy * size):
            if trial[k] != current[k]:
                if copies == 1:
                    return False
                for other in range(copies):
                    if other != copy:
                        for i in range(size):
                            trial[low + other * size + i] = trial[low + copy * size + i]
                return True
    return True


@jit
def anneal(
    t: Tables,
    offsets: Vector,
    current: Vector,
    best: Vector,
    trial: Vector,
    scores: Vector,
    state: Vector,
    first: int,
    last: int,
    total: int,
    heat: float,
    goal: int,
    jumps: Vector,
    exponential: Vector,
    scratch: Vector,
    ends: Vector,
    limits: Vector,
    spare: Vector,
    counts: Vector,
    gaps: Vector,
    frozen_blocks: Vector,
) -> int:
    """Do the tries ``first`` to ``last`` of ``total``; return the next try.

    Four moves of five look at a rank that waits for a message: an action is moved into the gap, or what the
    message depends on is moved up. A try makes up to four moves, and only their sum has to be legal. After a
    sixth of all tries without gain the search returns to the best order. It stops when the objective falls to
    ``goal``.

    Parameters
    ----------
    t
        The problem.
    offsets
        Where each rank's row begins in a line, and the number of actions.
    current, best, trial
        Lines of codes: the order at hand, the best one, and the one being tried.
    scores
        Current score, best score, try of the last gain, best objective.
    state
        The random sequence, then space for the ranks changed in a try.
    first, last, total
        The range of tries, and the number of all.
    heat
        Temperature of the first try in units of the score; it falls as (1 - try / total) squared.
    goal
        Objective in ns at which to stop.
    jumps, exponential
        Tables of random lengths of moves, and of exponentially distributed numbers.
    scratch, ends, limits
        Buffers of `evaluate_line`.
    spare, counts
        Buffers of `move_many` and `stays_legal`.
    gaps
        Waits of the current order.
    frozen_blocks
        Per rank low, high and copies of a block (`keep_block`); no copies for none.
    """
    p, S, size = t.num_ranks, t.num_stages, offsets[t.num_ranks]
    waits = 4 * p + 2 * t.num_stages + size
    for n in range(first, last):
        if scores[3] <= goal:
            return n
        for k in range(size):
            trial[k] = current[k]
        changed, rank = 0, -1
        for _ in range(1 + random_bits(state) % 4):
            dice = random_bits(state) % 64
            if rank < 0 or dice & 1:
                rank = random_bits(state) % p
            dice >>= 1
            if dice < 7:
                rank = move_into_gap(t, offsets, trial, rank, state, gaps)
            elif dice < 26:
                rank = move_cause(t, offsets, trial, rank, state, jumps, gaps)
            elif dice < 28:
                rank = move_many(t, offsets, trial, rank, state, spare, 7)
            else:
                rank = move_one(offsets, trial, rank, state, jumps)
            if rank >= 0:
                changed += 1
                state[changed] = rank
        legal = changed > 0
        for k in range(changed):
            r = state[k + 1]
            if legal and frozen_blocks[3 * r + 2] > 0:
                legal = keep_block(
                    frozen_blocks[3 * r], frozen_blocks[3 * r + 1], frozen_blocks[3 * r + 2], current, trial
                )
            if legal and not stays_legal(t, offsets, trial, r, counts):
                legal = False
            if legal and frozen_blocks[3 * r + 2] > 1:
                for e in range(t.own_at[r], t.own_at[r + 1]):
                    s = t.own[e]
                    if counts[s] != t.num_microbatches or counts[2 * S + s] != counts[S + s]:
                        legal = False
                    if counts[S + s] + counts[3 * S + s] != t.num_microbatches:
                        legal = False
        if not legal:
            continue
        score = evaluate_line(t, offsets, trial, scratch, ends, limits)
        if score < 0:
            continue
        left = 1.0 - n / total
        if score - scores[0] <= heat * left * left * exponential[random_bits(state) % 4096]:
            scores[0] = score
            for k in range(size):
                current[k] = trial[k]
                gaps[k] = scratch[waits + k]
            if scratch[3 * p] < scores[3] or (scratch[3 * p] == scores[3] and score < scores[1]):
                scores[1] = score
                scores[3] = scratch[3 * p]
                scores[2] = n
                for k in range(size):
                    best[k] = trial[k]
        if n - scores[2] > total // 6:
            scores[2] = n
            scores[0] = scores[1]
            for k in range(size):
                current[k] = best[k]
            evaluate_line(t, offsets, current, scratch, ends, limits)
            for k in range(size):
                gaps[k] = scratch[waits + k]
    return last
