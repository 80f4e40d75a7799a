"""Inner loop of the annealing: change an order, keep or drop the change.

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.compiled`).
"""

from __future__ import annotations

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.core.kernel import evaluate_line, stays_legal
from zbcompile.planner.core.tables import Tables
from zbcompile.planner.improve.cells import KEPT_SCORE, KEPT_WORST, TOUCHED, Layout
from zbcompile.planner.improve.kept_order import keep, renumber, score_of, worst_of
from zbcompile.planner.improve.moves import (
    below,
    move_cause,
    move_into_gap,
    move_many,
    move_one,
    random_bits,
    touch,
)
from zbcompile.planner.improve.retime import rebuild, restore, retime

__all__ = ["anneal", "note_score"]

_KEPT = 256
"""Changes kept before the topological order is made anew: it then follows the time again."""

_WIDTH = 7
"""Most places by which the actions of a range of microbatches are moved."""


@jit
def _keep_block(cells: Vector, at: Layout, low: int, high: int, copies: int, rank: int) -> bool:
    """Make what changed in one copy of a frozen block change in all copies.

    The first of ``copies`` copies reaches from ``low`` to ``high``. Returns False if a block without a second
    copy changed.
    """
    size = high - low
    for copy in range(copies):
        for k in range(low + copy * size, high + copy * size):
            if cells[at.line + k] != cells[at.kept_line + k]:
                if copies == 1:
                    return False
                touch(cells, at, rank, low, low + copies * size - 1)
                for other in range(copies):
                    if other != copy:
                        for i in range(size):
                            code = cells[at.line + low + copy * size + i]
                            cells[at.line + low + other * size + i] = code
                return True
    return True


@jit
def _change(cells: Vector, at: Layout, jumps: Vector) -> None:
    """Make up to four moves: one in three tries of four, further ones mostly on the same rank.

    Of 64 moves, 3 move an action into a gap and 10 move up what held up a message; 13 move a range of
    microbatches of one (kind, stage), and 38 a single action.
    """
    rank, moves = -1, 1
    dice = random_bits(cells, at) & 63
    if dice >= 48:
        moves = 2 if dice < 60 else 3
    for _ in range(moves):
        dice = random_bits(cells, at) & 127
        if rank < 0 or dice & 1:
            rank = below(cells, at, at.num_ranks)
        dice >>= 1
        if dice < 3:
            rank = move_into_gap(cells, at, rank)
        elif dice < 13:
            rank = move_cause(cells, at, rank, jumps)
        elif dice < 26:
            rank = move_many(cells, at, rank, _WIDTH)
        else:
            rank = move_one(cells, at, rank, jumps)


@jit
def _is_legal(
    t: Tables, cells: Vector, at: Layout, offsets: Vector, counts: Vector, frozen_blocks: Vector
) -> bool:
    """Return whether the changed rows are legal and fit, and frozen blocks are as they must be."""
    S = at.num_stages
    for c in range(cells[at.state + TOUCHED]):
        r = cells[at.state + TOUCHED + 1 + c]
        low, high, copies = frozen_blocks[3 * r], frozen_blocks[3 * r + 1], frozen_blocks[3 * r + 2]
        if copies > 0 and not _keep_block(cells, at, low, high, copies, r):
            return False
        if not stays_legal(t, offsets, cells, r, counts):  # the line begins the array
            return False
        if copies > 1:
            for e in range(cells[at.own_at + r], cells[at.own_at + r + 1]):
                s = cells[at.own + e]
                if counts[s] != at.num_microbatches or counts[2 * S + s] != counts[S + s]:
                    return False
                if counts[S + s] + counts[3 * S + s] != at.num_microbatches:
                    return False
    return True


@jit
def _undo(cells: Vector, at: Layout) -> None:
    """Take back the moves."""
    for c in range(cells[at.state + TOUCHED]):
        r = cells[at.state + TOUCHED + 1 + c]
        for k in range(cells[at.low + r], cells[at.high + r] + 1):
            cells[at.line + k] = cells[at.kept_line + k]
            cells[at.number + k] = cells[at.kept_number + k]


@jit
def _forget(cells: Vector, at: Layout) -> None:
    """Note that nothing is changed."""
    for c in range(cells[at.state + TOUCHED]):
        cells[at.low + cells[at.state + TOUCHED + 1 + c]] = -1
    cells[at.state + TOUCHED] = 0


@jit
def _try(
    t: Tables,
    cells: Vector,
    at: Layout,
    offsets: Vector,
    jumps: Vector,
    counts: Vector,
    frozen_blocks: Vector,
    most: int,
) -> bool:
    """Change the order at hand; keep the change if its score is at most ``most``. Return whether it is."""
    _change(cells, at, jumps)
    kept = False
    if cells[at.state + TOUCHED] > 0 and _is_legal(t, cells, at, offsets, counts, frozen_blocks):
        begin, end = at.num_places, -1
        for c in range(cells[at.state + TOUCHED]):
            r = cells[at.state + TOUCHED + 1 + c]
            renumber(cells, at, cells[at.low + r], cells[at.high + r])
            begin = min(begin, cells[at.position + cells[at.low + r]])
            end = max(end, cells[at.position + cells[at.high + r]])
        score = retime(cells, at, begin, end, most)
        kept = 0 <= score <= most
        if kept:
            keep(cells, at, begin, end, score)
        else:
            restore(cells, at, begin)
    if not kept:
        _undo(cells, at)
    _forget(cells, at)
    return kept


@jit
def note_score(cells: Vector, at: Layout, score: int, worst: int) -> None:
    """Note the score and the objective of the order at hand."""
    cells[at.state + KEPT_SCORE] = score
    cells[at.state + KEPT_WORST] = worst


@jit
def _try_whole(
    t: Tables,
    cells: Vector,
    at: Layout,
    offsets: Vector,
    jumps: Vector,
    counts: Vector,
    frozen_blocks: Vector,
    most: int,
    scratch: Vector,
    ends: Vector,
    limits: Vector,
) -> bool:
    """Do what `_try` does, with the whole order timed anew.

    So it is where stages cost something once a step, which `retime` does not know.
    """
    _change(cells, at, jumps)
    kept = False
    if cells[at.state + TOUCHED] > 0 and _is_legal(t, cells, at, offsets, counts, frozen_blocks):
        score = evaluate_line(t, offsets, cells, scratch, ends, limits)  # the line begins the array
        kept = 0 <= score <= most
        if kept:
            rebuild(cells, at)
            note_score(cells, at, score, scratch[3 * t.num_ranks])
    if not kept:
        _undo(cells, at)
    _forget(cells, at)
    return kept


@jit
def anneal(
    t: Tables,
    cells: Vector,
    at: Layout,
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
    cells, at
        The order at hand and what is known of it (`zbcompile.planner.improve.cells`).
    offsets
        Where each rank's row begins in the line, and the number of actions.
    best
        The best order's line.
    scores
        Its score and objective, try of the last gain, and changes kept since the topological order was made.
    first, last, total
        The range of tries, and the number of all.
    heat
        Temperature of the first try in units of the score; it falls as (1 - try / total) squared.
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
    for n in range(first, last):
        if scores[1] <= goal:
            return n
        left = 1.0 - n / total
        most = score_of(cells, at) + int(heat * left * left * exponential[random_bits(cells, at) & 4095])
        if t.has_steps:
            kept = _try_whole(
                t, cells, at, offsets, jumps, counts, frozen_blocks, most, scratch, ends, limits
            )
        else:
            kept = _try(t, cells, at, offsets, jumps, counts, frozen_blocks, most)
            scores[3] += kept
        if kept:
            score, worst = score_of(cells, at), worst_of(cells, at)
            if worst < scores[1] or (worst == scores[1] and score < scores[0]):
                scores[0] = score
                scores[1] = worst
                scores[2] = n
                for k in range(at.num_places):
                    best[k] = cells[at.line + k]
        if n - scores[2] > total // 6:
            scores[2] = n
            for k in range(at.num_places):
                cells[at.line + k] = best[k]
            rebuild(cells, at)
            if t.has_steps:
                note_score(cells, at, scores[0], scores[1])
        elif scores[3] >= _KEPT:
            scores[3] = 0
            rebuild(cells, at)
    return last
