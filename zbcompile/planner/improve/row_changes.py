"""Changes to one rank's row that fuse, split or move actions, as tried by split or fuse."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from zbcompile.planner.core.instance import BW, B, F, W

__all__ = [
    "Row",
    "RowChange",
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


def fuse_range(row: Row, stage: int, low: int, high: int) -> Row:
    """Return the row with backwards fused, their W's gone. Memory never rises."""
    pending: list[bool] = []
    result: Row = []
    number = 0
    for kind, s in row:
        inside = False
        if s == stage and kind in (B, BW):
            inside = low <= number < high
            number += 1
            if kind == B:
                pending.append(inside)
        if not (kind == W and s == stage and pending.pop(0)):
            result.append((BW if inside else kind, s))
    return result


def split_range(row: Row, stage: int, low: int, high: int, later: int) -> Row:
    """Return the row with fused backwards split, each W ``later`` actions behind its B."""
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


split_here, split_later = partial(split_range, later=0), partial(split_range, later=2)


def small_move(row: Row, rng: random.Random) -> Row:
    """Return another row: one backward flipped, or one action moved by up to four places."""
    k = rng.randrange(len(row))
    kind, s = row[k]
    if kind in (B, BW) and rng.random() < 0.3:
        i = sum(other in (B, BW) and stage == s for other, stage in row[:k])
        change = rng.choice((fuse_range, split_here, split_later))
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
