"""Inner loop of the annealing: change an order, keep or drop the change.

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.compiled`).
"""

from __future__ import annotations

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.core.kernel import evaluate_line, stays_legal
from zbcompile.planner.core.tables import Tables
from zbcompile.planner.improve.cells import (
    HIGH,
    KEPT_LINE,
    KEPT_NUMBER,
    KEPT_SCORE,
    KEPT_WORST,
    LINE,
    LOW,
    MICROBATCHES,
    NUMBER,
    OWN,
    OWN_AT,
    PLACES,
    POSITION,
    RANKS,
    STAGES,
    STATE,
    TOUCHED,
)
from zbcompile.planner.improve.moves import (
    below,
    move_cause,
    move_into_gap,
    move_many,
    move_one,
    random_bits,
    touch,
)
from zbcompile.planner.improve.retime import keep, rebuild, renumber, restore, retime

__all__ = ["anneal"]

_KEPT = 256
"""Changes kept before the topological order is made anew: it then follows the time again."""

_WIDTH = 7
"""Most places by which the actions of a range of microbatches are moved."""


@jit
def _keep_block(cells: Vector, low: int, high: int, copies: int, rank: int) -> bool:
    """Make what changed in one copy of a frozen block change in all copies.

    The first of ``copies`` copies reaches from ``low`` to ``high``. Returns False if a block without a second
    copy changed.
    """
    size = high - low
    for copy in range(copies):
        for k in range(low + copy * size, high + copy * size):
            if cells[LINE, k] != cells[KEPT_LINE, k]:
                if copies == 1:
                    return False
                touch(cells, rank, low, low + copies * size - 1)
                for other in range(copies):
                    if other != copy:
                        for i in range(size):
                            code = cells[LINE, low + copy * size + i]
                            cells[LINE, low + other * size + i] = code
                return True
    return True


@jit
def _change(cells: Vector, jumps: Vector) -> None:
    """Make up to four moves: one in three tries of four, further ones mostly on the same rank.

    Of 64 moves, 3 move an action into a gap and 10 move up what held up a message; 13 move a range of
    microbatches of one (kind, stage), and 38 a single action.
    """
    rank, moves = -1, 1
    dice = random_bits(cells) & 63
    if dice >= 48:
        moves = 2 if dice < 60 else 3
    for _ in range(moves):
        dice = random_bits(cells) & 127
        if rank < 0 or dice & 1:
            rank = below(cells, cells[STATE, RANKS])
        dice >>= 1
        if dice < 3:
            rank = move_into_gap(cells, rank)
        elif dice < 13:
            rank = move_cause(cells, rank, jumps)
        elif dice < 26:
            rank = move_many(cells, rank, _WIDTH)
        else:
            rank = move_one(cells, rank, jumps)


@jit
def _is_legal(t: Tables, cells: Vector, offsets: Vector, counts: Vector, frozen_blocks: Vector) -> bool:
    """Return whether the changed rows are legal and fit, and frozen blocks are as they must be."""
    S = cells[STATE, STAGES]
    for c in range(cells[STATE, TOUCHED]):
        r = cells[STATE, TOUCHED + 1 + c]
        low, high, copies = frozen_blocks[3 * r], frozen_blocks[3 * r + 1], frozen_blocks[3 * r + 2]
        if copies > 0 and not _keep_block(cells, low, high, copies, r):
            return False
        if not stays_legal(t, offsets, cells[LINE], r, counts):
            return False
        if copies > 1:
            for e in range(cells[OWN_AT, r], cells[OWN_AT, r + 1]):
                s = cells[OWN, e]
                if counts[s] != cells[STATE, MICROBATCHES] or counts[2 * S + s] != counts[S + s]:
                    return False
                if counts[S + s] + counts[3 * S + s] != cells[STATE, MICROBATCHES]:
                    return False
    return True


@jit
def _undo(cells: Vector) -> None:
    """Take back the moves."""
    for c in range(cells[STATE, TOUCHED]):
        r = cells[STATE, TOUCHED + 1 + c]
        for k in range(cells[LOW, r], cells[HIGH, r] + 1):
            cells[LINE, k] = cells[KEPT_LINE, k]
            cells[NUMBER, k] = cells[KEPT_NUMBER, k]


@jit
def _forget(cells: Vector) -> None:
    """Note that nothing is changed."""
    for c in range(cells[STATE, TOUCHED]):
        cells[LOW, cells[STATE, TOUCHED + 1 + c]] = -1
    cells[STATE, TOUCHED] = 0


@jit
def _settle(t: Tables, cells: Vector, offsets: Vector, scratch: Vector, ends: Vector, limits: Vector) -> None:
    """Make the line the order at hand, from nothing.

    Where stages cost something once a step, which `rebuild` and `retime` do not know, its score is that of
    the whole clock.
    """
    rebuild(cells)
    if t.has_steps:
        cells[STATE, KEPT_SCORE] = evaluate_line(t, offsets, cells[LINE], scratch, ends, limits)
        cells[STATE, KEPT_WORST] = scratch[3 * t.num_ranks]


@jit
def _try(
    t: Tables,
    cells: Vector,
    offsets: Vector,
    jumps: Vector,
    counts: Vector,
    frozen_blocks: Vector,
    most: int,
    scratch: Vector,
    ends: Vector,
    limits: Vector,
) -> bool:
    """Change the order at hand; keep the change if its score is at most ``most``. Return whether it is."""
    _change(cells, jumps)
    kept = False
    legal = cells[STATE, TOUCHED] > 0 and _is_legal(t, cells, offsets, counts, frozen_blocks)
    if legal and t.has_steps:
        score = evaluate_line(t, offsets, cells[LINE], scratch, ends, limits)
        kept = 0 <= score <= most
        if kept:
            _settle(t, cells, offsets, scratch, ends, limits)
    elif legal:
        begin, end = cells[STATE, PLACES], -1
        for c in range(cells[STATE, TOUCHED]):
            r = cells[STATE, TOUCHED + 1 + c]
            renumber(cells, cells[LOW, r], cells[HIGH, r])
            begin = min(begin, cells[POSITION, cells[LOW, r]])
            end = max(end, cells[POSITION, cells[HIGH, r]])
        score = retime(cells, begin, end, most)
        kept = 0 <= score <= most
        if kept:
            keep(cells, begin, end, score)
        else:
            restore(cells, begin)
    if not kept:
        _undo(cells)
    _forget(cells)
    return kept


@jit
def anneal(
    t: Tables,
    cells: Vector,
    offsets: Vector,
    best: Vector,
    scores: Vector,
    first: int,
    last: int,
    total: int,
    heat: float,
    goal: int,
    jumps: Vector,
    exponential: Vector,
    counts: Vector,
    frozen_blocks: Vector,
    scratch: Vector,
    ends: Vector,
    limits: Vector,
) -> int:
    """Do the tries ``first`` to ``last`` of ``total``; return the next try.

    A try makes up to three moves, and only their sum has to be legal. After a sixth of all tries without gain
    the search returns to the best order. It stops when the objective falls to ``goal``.

    Parameters
    ----------
    t
        The problem.
    cells
        The order at hand and what is known of it (`zbcompile.planner.improve.cells`): the first
        try fills it.
    offsets
        Where each rank's row begins in the line, and the number of actions.
    best
        The best order's line.
    scores
        Five elements: its score and objective, try of the last gain, changes kept since the topological order
        was made, and the score at first.
    first, last, total
        The range of tries, and the number of all.
    heat
        Temperature of the first try as a share of the score at first; it falls as (1 - try / total) squared.
    goal
        Objective in ns at which to stop.
    jumps, exponential
        Tables of random lengths of moves, and of exponentially distributed numbers.
    counts
        Buffer of `stays_legal`.
    frozen_blocks
        Per rank low, high and copies of a block (`_keep_block`); no copies for none.
    scratch, ends, limits
        Buffers of `evaluate_line`, which is asked where stages cost something once a step.
    """
    if first == 0:
        _settle(t, cells, offsets, scratch, ends, limits)
        scores[4] = scores[0] = cells[STATE, KEPT_SCORE]
        scores[1] = cells[STATE, KEPT_WORST]
    for n in range(first, last):
        if scores[1] <= goal:
            return n
        left = 1.0 - n / total
        most = cells[STATE, KEPT_SCORE] + int(
            heat * scores[4] * left * left * exponential[random_bits(cells) & 4095]
        )
        if _try(t, cells, offsets, jumps, counts, frozen_blocks, most, scratch, ends, limits):
            scores[3] += 1
            score, worst = cells[STATE, KEPT_SCORE], cells[STATE, KEPT_WORST]
            if worst < scores[1] or (worst == scores[1] and score < scores[0]):
                scores[0] = score
                scores[1] = worst
                scores[2] = n
                for k in range(cells[STATE, PLACES]):
                    best[k] = cells[LINE, k]
        if n - scores[2] > total // 6:
            scores[2] = n
            for k in range(cells[STATE, PLACES]):
                cells[LINE, k] = best[k]
            _settle(t, cells, offsets, scratch, ends, limits)
        elif scores[3] >= _KEPT:
            scores[3] = 0
            _settle(t, cells, offsets, scratch, ends, limits)
    return last
