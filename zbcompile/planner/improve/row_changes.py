"""Changes to one rank's row that fuse, split or move actions, as tried by split or fuse."""

from __future__ import annotations

import random
from collections.abc import Callable

from zbcompile.planner.core.instance import BW, B, F, W

__all__ = [
    "Row",
    "RowChange",
    "advance",
    "fuse_next",
    "fuse_own",
    "fuse_range",
    "in_order",
    "small_move",
    "split_here",
    "split_later",
    "split_range",
]

Row = list[tuple[int, int]]
"""A rank's order as (kind, stage) pairs."""

RowChange = Callable[[Row, int, int, int], Row]
"""(row, stage, low, high) to the row with microbatches low..high-1 of the stage changed."""


def fuse_range(row: Row, stage: int, low: int, high: int, *, own: bool) -> Row:
    """Return the row with the backwards of microbatches low..high-1 of a stage fused.

    Memory never rises.

    Parameters
    ----------
    row
        A rank's row.
    stage
        The stage.
    low, high
        The microbatches.
    own
        Whether the W that belongs to each of them is removed, or else the first W behind it.
    """
    pending: list[bool] = []
    result: Row = []
    number = spare = 0
    for kind, s in row:
        if s != stage or kind == F:
            result.append((kind, s))
        elif kind == W:
            chosen = pending.pop(0)
            if chosen if own else spare:
                spare -= not own
            else:
                result.append((W, s))
        else:
            inside = low <= number < high
            number += 1
            if kind == B:
                pending.append(inside)
                spare += inside
            result.append((BW if inside else kind, s))
    return result


def split_range(row: Row, stage: int, low: int, high: int, later: int) -> Row:
    """Return the row with fused backwards low..high-1 of a stage split.

    Each W stands ``later`` actions behind its B.
    """
    result: Row = []
    due: list[int] = []
    number = 0
    for kind, s in row:
        while due and due[0] <= len(result):
            due.pop(0)
            result.append((W, stage))
        if s == stage and kind in (B, BW):
            if kind == BW and low <= number < high:
                kind = B
                due.append(len(result) + 1 + later)
            number += 1
        result.append((kind, s))
    return result + [(W, stage)] * len(due)


def small_move(row: Row, rng: random.Random) -> Row:
    """Return another row: one backward flipped, or one action moved by up to four places."""
    k = rng.randrange(len(row))
    kind, s = row[k]
    if kind in (B, BW) and rng.random() < 0.3:
        i = sum(other in (B, BW) and stage == s for other, stage in row[:k])
        change = rng.choice((fuse_own, fuse_next, split_here, split_later))
        return change(row, s, i, i + 1)
    rest = row[:k] + row[k + 1 :]
    place = max(0, min(len(rest), k + rng.choice((-4, -3, -2, -1, -1, 1, 1, 2, 3, 4))))
    return [*rest[:place], (kind, s), *rest[place:]]


def in_order(row: Row) -> bool:
    """Return whether no B stands before its F and no W before its B."""
    held: dict[int, list[int]] = {}
    for kind, s in row:
        pair = held.setdefault(s, [0, 0])
        if kind == F:
            pair[0] += 1
        elif kind == W:
            pair[1] -= 1
        else:
            pair[0] -= 1
            pair[1] += kind == B
        if min(pair) < 0:
            return False
    return True


def fuse_own(row: Row, stage: int, low: int, high: int) -> Row:
    """Return the row with backwards fused, each without the W that belongs to it."""
    return fuse_range(row, stage, low, high, own=True)


def fuse_next(row: Row, stage: int, low: int, high: int) -> Row:
    """Return the row with backwards fused, each without the first W behind it."""
    return fuse_range(row, stage, low, high, own=False)


def split_here(row: Row, stage: int, low: int, high: int) -> Row:
    """Return the row with fused backwards split, each W directly behind its B."""
    return split_range(row, stage, low, high, 0)


def split_later(row: Row, stage: int, low: int, high: int) -> Row:
    """Return the row with fused backwards split, each W two actions behind its B."""
    return split_range(row, stage, low, high, 2)


def advance(row: Row, stage: int, first: int, last: int) -> Row:
    """Return the row with each of the F's first..last-1 of a stage one place earlier among its F's."""
    places = [k for k, op in enumerate(row) if op == (F, stage)][first:last]
    if len(places) < 2:
        return row
    return [*row[: places[0]], (F, stage), *row[places[0] : places[-1]], *row[places[-1] + 1 :]]
