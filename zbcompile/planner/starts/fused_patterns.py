"""Orders for one stage per rank that split some backwards and fuse the others.

`alternate` builds a rank's row from four numbers. Microbatch i of a stage is split if it is among the first
``head`` or the last ``tail``, and fused in between. The list scheduler
(`zbcompile.planner.core.dispatch`) takes the same windows and decides all else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

from zbcompile.planner.core.dispatch import Windows
from zbcompile.planner.core.instance import BW, B, Codes, F, Instance, W
from zbcompile.planner.core.paths import Paths

__all__ = [
    "FusedPattern",
    "alternate",
    "fused_patterns",
    "rule_of_thumb",
    "some_by_rule",
    "window_choices",
]

_RULE_ACTIONS = 40_000
"""Most actions in all orders that `some_by_rule` yields."""

_Field = Literal["tail", "head", "waiting", "warm", "head and waiting"]
_FIELDS: tuple[_Field, ...] = get_args(_Field)
"""What one step to a neighbouring pattern changes, in the order in which it is tried."""


@dataclass(frozen=True, slots=True)
class FusedPattern:
    """An order in a few numbers per rank.

    Attributes
    ----------
    warm
        F's before the first backward.
    waiting
        W's that may wait.
    windows
        Split windows: how many microbatches are split at the start and at the end.
    """

    warm: tuple[int, ...]
    waiting: tuple[int, ...]
    windows: Windows

    def codes(self, instance: Instance) -> Codes:
        """Return the order."""
        return [
            alternate(instance, rank, self.warm[rank], self.waiting[rank], self.windows[rank])
            for rank in range(instance.num_ranks)
        ]

    def neighbours(self, count: int) -> Iterator[FusedPattern]:
        """Yield patterns with one number more or less.

        On one rank, on all, or by a slope that grows or falls along the ranks.
        """
        for field in _FIELDS:
            for shape in self._shapes():
                for sign in (1, -1):
                    yield self._shifted(field, tuple(sign * v for v in shape), count)

    def _shapes(self) -> Iterator[tuple[int, ...]]:
        """Yield what one step adds on every rank."""
        p = len(self.warm)
        yield (1,) * p
        yield tuple(range(p))
        yield tuple(p - d for d in range(p))
        for d in range(p):
            yield tuple(int(r == d) for r in range(p))

    def _shifted(self, field: _Field, steps: tuple[int, ...], count: int) -> FusedPattern:
        """Return the pattern with the numbers of a field changed by ``steps``, rank by rank."""

        def shift(row: tuple[int, ...], least: int) -> tuple[int, ...]:
            return tuple(max(least, min(count, v + step)) for v, step in zip(row, steps, strict=True))

        heads, tails = tuple(h for h, _ in self.windows), tuple(t for _, t in self.windows)
        warm, waiting = self.warm, self.waiting
        if field == "warm":
            warm = shift(warm, 1)
        if field in ("waiting", "head and waiting"):
            waiting = shift(waiting, 0)
        if field in ("head", "head and waiting"):
            heads = shift(heads, 0)
        if field == "tail":
            tails = shift(tails, 0)
        return FusedPattern(warm, waiting, tuple(zip(heads, tails, strict=True)))


def alternate(
    instance: Instance, rank: int, warm: int, waiting: int, window: tuple[int, int]
) -> list[tuple[int, int]]:
    """Return a row of ``warm`` F's, then a backward and an F in turn.

    A W runs once more than ``waiting`` are pending, earlier where an F or B does not fit, and after every B
    once no F is left. A rank whose headroom takes no further F runs a backward first. The row fits wherever
    one microbatch fits.

    Parameters
    ----------
    instance
        The problem.
    rank
        The rank, with one stage.
    warm
        F's before the first backward.
    waiting
        W's that may wait.
    window
        (head, tail): how many microbatches are split at the start and at the end.
    """
    s, m, headroom = instance.stages_of[rank][0], instance.num_microbatches, instance.headroom[rank]
    change, peak = ([row[s] for row in table] for table in (instance.memory.change, instance.memory.peak))
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
        if backwards < window[0] or backwards >= m - window[1]:
            while pending and held + peak[B] > headroom:
                weights(pending - 1)
        split = (backwards < window[0] or backwards >= m - window[1]) and held + peak[B] <= headroom
        row.append((B if split else BW, s))
        held, pending = held + change[B if split else BW], pending + split
        backwards += 1
        if split or backwards > m - window[1]:
            weights(min(pending, waiting if forwards < m else max(0, pending - 1)))
    weights(0)
    return row


def window_choices(instance: Instance) -> list[Windows]:
    """Return split windows to try.

    The rule of thumb, never, all, all but rank 0, and wider or narrower rules.
    """
    p, m = instance.num_ranks, instance.num_microbatches
    made: list[list[tuple[int, int]]] = [
        [(d, p - d) if d else (0, 0) for d in range(p)],
        [(0, 0)] * p,
        [(m, m)] * p,
        [(m, m) if d else (0, 0) for d in range(p)],
        [(0, p - d) if d else (0, 0) for d in range(p)],
        [(d, 1) if d else (0, 0) for d in range(p)],
        [(2 * d, 2 * (p - d)) if d else (0, 0) for d in range(p)],
        [(d, 2 * (p - d)) for d in range(p)],
        [(0, 2 * (p - d)) for d in range(p)],
    ]
    return [tuple((min(m, h), min(m, t)) for h, t in row) for row in made]


def fused_patterns(instance: Instance) -> Iterator[FusedPattern]:
    """Yield whole patterns, in a fixed order."""
    p, m = instance.num_ranks, instance.num_microbatches
    paths = Paths.of(instance)
    trips = [paths.f_to_b(stages[0], stages[0]) for stages in instance.stages_of]
    need = [
        -(-trip // max(1, instance.forward[s[0]])) for trip, s in zip(trips, instance.stages_of, strict=True)
    ]
    warms = [
        [p - d for d in range(p)],
        [p - d + (p - d) // 2 for d in range(p)],
        [2 * (p - d) - 1 for d in range(p)],
        need,
    ]
    waits = [list(range(p)), [0] * p, [2 * d for d in range(p)], [m] * p]
    for windows in window_choices(instance):
        for warm in warms:
            for waiting in waits:
                yield FusedPattern(tuple(max(1, min(m, w)) for w in warm), tuple(waiting), windows)


def some_by_rule(instance: Instance) -> Iterator[Codes]:
    """Yield the first orders of `rule_of_thumb`, so many that timing them takes a moment."""
    actions = 3 * instance.num_stages * instance.num_microbatches
    return islice(rule_of_thumb(instance), max(1, _RULE_ACTIONS // actions))


def rule_of_thumb(instance: Instance) -> Iterator[Codes]:
    """Yield orders that split by the rule of thumb: rank r the first r and the last p - r, rank 0 none."""
    rule = window_choices(instance)[0]
    for pattern in fused_patterns(instance):
        if pattern.windows == rule:
            yield pattern.codes(instance)
