"""Inner loop of the annealing: change an order, keep or drop the change.

Plain loops over flat arrays that numba compiles where it is installed (`zbcompile.planner.core.compiled`).
"""

from __future__ import annotations

from zbcompile.planner.core.compiled import Vector, jit
from zbcompile.planner.core.kernel import evaluate_line
from zbcompile.planner.core.tables import Tables
from zbcompile.planner.improve import cells as at
from zbcompile.planner.improve.changed_rows import are_legal, forget, note_held, note_rows, undo
from zbcompile.planner.improve.moves import (
    below,
    move_cause,
    move_into_gap,
    move_many,
    move_one,
    random_bits,
)
from zbcompile.planner.improve.retime import FAR, keep, rebuild, restore, retime

__all__ = ["anneal"]

_KEPT = 256
"""Changes kept before the topological order is made anew: it then follows the time again."""

_WIDTH = 7
"""Most places by which the actions of a range of microbatches are moved."""


@jit
def _change(cells: Vector, jumps: Vector) -> None:
    """Make up to four moves: one in three tries of four, further ones mostly on the same rank.

    Of 64 moves, 3 move an action into a gap and 10 move up what held up a message; 13 move a range of
    microbatches of one (kind, stage), and 38 a single action.
    """
    rank, moves = -1, 1
    dice = random_bits(cells, at.STATE) & 63
    if dice >= 48:
        moves = 2 if dice < 60 else 3
    for _ in range(moves):
        dice = random_bits(cells, at.STATE) & 127
        if rank < 0 or dice & 1:
            rank = below(cells, cells[at.STATE, at.RANKS])
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
def _settle(t: Tables, cells: Vector, offsets: Vector) -> None:
    """Make the line the order at hand, from nothing.

    Where stages cost something once a step, which `rebuild` and `retime` do not know, its score is that of
    the whole clock.
    """
    rebuild(cells)
    note_rows(t, cells)
    if t.has_steps:
        cells[at.STATE, at.KEPT_SCORE] = evaluate_line(t, offsets, cells[at.LINE])
        cells[at.STATE, at.KEPT_WORST] = t.scratch[3 * t.num_ranks]


@jit
def _try(t: Tables, cells: Vector, offsets: Vector, jumps: Vector, frozen_blocks: Vector, most: int) -> bool:
    """Change the order at hand; keep the change if its score is at most ``most``. Return whether it is."""
    _change(cells, jumps)
    kept = False
    rise = (most - cells[at.STATE, at.KEPT_SCORE]) // (100 * cells[at.STATE, at.RANKS])
    limit = FAR if t.has_steps else cells[at.STATE, at.KEPT_WORST] + rise
    legal = cells[at.STATE, at.TOUCHED] > 0 and are_legal(t, cells, offsets, frozen_blocks, limit)
    if legal and t.has_steps:
        score = evaluate_line(t, offsets, cells[at.LINE])
        kept = 0 <= score <= most
        if kept:
            _settle(t, cells, offsets)
    elif legal:
        score = retime(cells)
        kept = 0 <= score <= most
        if kept:
            keep(cells, score)
            note_held(cells)
        else:
            restore(cells)
    if not kept:
        undo(cells)
    forget(cells)
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
    frozen_blocks: Vector,
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
    frozen_blocks
        Per rank low, high and copies of a block (`_keep_block`); no copies for none.
    """
    if first == 0:
        _settle(t, cells, offsets)
        scores[4] = scores[0] = cells[at.STATE, at.KEPT_SCORE]
        scores[1] = cells[at.STATE, at.KEPT_WORST]
    for n in range(first, last):
        if scores[1] <= goal:
            return n
        left = 1.0 - n / total
        most = cells[at.STATE, at.KEPT_SCORE] + int(
            heat * scores[4] * left * left * exponential[random_bits(cells, at.STATE) & 4095]
        )
        if _try(t, cells, offsets, jumps, frozen_blocks, most):
            scores[3] += 1
            score, worst = cells[at.STATE, at.KEPT_SCORE], cells[at.STATE, at.KEPT_WORST]
            if worst < scores[1] or (worst == scores[1] and score < scores[0]):
                scores[0] = score
                scores[1] = worst
                scores[2] = n
                for k in range(cells[at.STATE, at.PLACES]):
                    best[k] = cells[at.LINE, k]
        if n - scores[2] > total // 6:
            scores[2] = n
            for k in range(cells[at.STATE, at.PLACES]):
                cells[at.LINE, k] = best[k]
            _settle(t, cells, offsets)
        elif scores[3] >= _KEPT:
            scores[3] = 0
            _settle(t, cells, offsets)
    return last
