"""Orders for one stage per rank that split some backwards and fuse the others.

`alternate` builds a rank's row from four numbers. Microbatch i of a stage is split if it is among the first
``head`` or the last ``tail``, and fused in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product

from zbcompile.planner.core.instance import BW, B, Codes, F, Instance, W
from zbcompile.planner.core.paths import Paths

__all__ = ["Pattern", "alternate", "neighbours", "pattern_codes", "patterns", "some_by_rule", "split_windows"]

Row = tuple[int, ...]
"""A number per rank."""

Pattern = tuple[Row, Row, Row, Row]
"""The numbers that `alternate` takes: warm, waiting, head and tail."""

_STEPS = ((3,), (2,), (1,), (0,), (1, 2))
"""Which rows a step to a neighbouring pattern changes, in the order in which they are tried."""

_RULE_ACTIONS = 40_000
"""Most actions in all orders that `some_by_rule` yields."""


def pattern_codes(instance: Instance, pattern: Pattern) -> Codes:
    """Return the order of a pattern."""
    m, codes, memory = instance.num_microbatches, [], instance.memory
    for (s, *_), headroom, numbers in zip(
        instance.stages_of, instance.headroom, zip(*pattern, strict=True), strict=True
    ):
        change, peak = ([row[s] for row in table] for table in (memory.change, memory.peak))
        codes.append(alternate(s, m, *numbers, change=change, peak=peak, headroom=headroom))
    return codes


def neighbours(pattern: Pattern, count: int) -> Iterator[Pattern]:
    """Yield patterns with one number more or less, ``count`` at most.

    On all ranks, by a slope that grows or falls along the ranks, or on one rank.
    """
    p = len(pattern[0])
    units = [tuple(int(r == d) for r in range(p)) for d in range(p)]
    shapes = [(1,) * p, tuple(range(p)), tuple(range(p, 0, -1)), *units]
    for rows, shape, sign in product(_STEPS, shapes, (1, -1)):
        changed = list(pattern)
        for k in rows:
            moved = (number + sign * step for number, step in zip(pattern[k], shape, strict=True))
            changed[k] = tuple(max(int(k == 0), min(count, number)) for number in moved)
        warm, waiting, head, tail = changed
        yield warm, waiting, head, tail


def alternate(
    s: int,
    m: int,
    warm: int,
    waiting: int = 0,
    head: int = 0,
    tail: int = 0,
    *,
    change: Sequence[int] = (0, 0, 0, 0),
    peak: Sequence[int] = (0, 0, 0, 0),
    headroom: int = 0,
) -> list[tuple[int, int]]:
    """Return a row of ``warm`` F's, then a backward and an F in turn.

    A W runs once more than ``waiting`` are pending, earlier where an F or B does not fit, and after every B
    once no F is left. A rank whose headroom takes no further F runs a backward first. The row fits wherever
    one microbatch fits.

    Parameters
    ----------
    s, m
        The stage, and the number of microbatches.
    warm
        F's before the first backward.
    waiting
        W's that may wait.
    head, tail
        How many microbatches are split at the start and at the end.
    change, peak, headroom
        Bytes by kind, as `Instance.memory` has them, and those of the rank. Left out, everything fits.
    """
    row: list[tuple[int, int]] = []
    held = forwards = backwards = pending = 0

    def weights(keep: int) -> None:
        nonlocal held, pending
        while pending > keep:
            row.append((W, s))
            held, pending = held + change[W], pending - 1

    while backwards < m:
        run_forward = forwards < m and forwards - backwards < max(1, warm)
        if run_forward:
            while pending and held + peak[F] > headroom:
                weights(pending - 1)
            run_forward = held + peak[F] <= headroom
        if run_forward:
            row.append((F, s))
            held, forwards = held + change[F], forwards + 1
            continue
        split = backwards < head or backwards >= m - tail
        while split and pending and held + peak[B] > headroom:
            weights(pending - 1)
        split = split and held + peak[B] <= headroom
        row.append((B if split else BW, s))
        held, pending = held + change[B if split else BW], pending + split
        backwards += 1
        if split or backwards > m - tail:
            weights(min(pending, waiting if forwards < m else max(0, pending - 1)))
    weights(0)
    return row


def split_windows(instance: Instance) -> list[tuple[Row, Row]]:
    """Return split windows to try, as heads and tails.

    The rule of thumb (rank r splits the first r and the last p - r, rank 0 none), never, all, all but rank 0,
    and wider or narrower rules.
    """
    p, m = instance.num_ranks, instance.num_microbatches
    ranks = range(p)
    made: list[tuple[list[int], list[int]]] = [
        (list(ranks), [p - d if d else 0 for d in ranks]),
        ([0] * p, [0] * p),
        ([m] * p, [m] * p),
        ([m if d else 0 for d in ranks], [m if d else 0 for d in ranks]),
        ([0] * p, [p - d if d else 0 for d in ranks]),
        (list(ranks), [int(d > 0) for d in ranks]),
        ([2 * d for d in ranks], [2 * (p - d) if d else 0 for d in ranks]),
        (list(ranks), [2 * (p - d) for d in ranks]),
        ([0] * p, [2 * (p - d) for d in ranks]),
    ]
    return [(tuple(min(m, h) for h in head), tuple(min(m, t) for t in tail)) for head, tail in made]


def patterns(instance: Instance, windows: Sequence[tuple[Row, Row]]) -> Iterator[Pattern]:
    """Yield whole patterns with each of the split windows, in a fixed order."""
    p, m = instance.num_ranks, instance.num_microbatches
    paths = Paths.of(instance)
    warms = [
        [p - d for d in range(p)],
        [p - d + (p - d) // 2 for d in range(p)],
        [2 * (p - d) - 1 for d in range(p)],
        [-(-paths.f_to_b(s, s) // max(1, instance.forward[s])) for s, *_ in instance.stages_of],
    ]
    waits = [tuple(range(p)), (0,) * p, tuple(range(0, 2 * p, 2)), (m,) * p]
    for (head, tail), warm, waiting in product(windows, warms, waits):
        yield tuple(max(1, min(m, w)) for w in warm), waiting, head, tail


def some_by_rule(instance: Instance) -> Iterator[Codes]:
    """Yield orders that split by the rule of thumb, as many as take a moment to time."""
    actions = 3 * instance.num_stages * instance.num_microbatches
    by_rule = patterns(instance, split_windows(instance)[:1])
    for pattern in islice(by_rule, max(1, _RULE_ACTIONS // actions)):
        yield pattern_codes(instance, pattern)
