"""Orders for one stage per rank that split some backwards and fuse the others.

Two makers: `alternate` builds a rank's row from four numbers; `fused_list_schedule` lets the list
scheduler of `zbcompile.planner.starts.list_schedule` decide everything but the split. In both, microbatch i of a
stage is split if it is among the first ``head`` or the last ``tail``, and fused in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zbcompile.planner.core.instance import BW, B, Codes, F, Instance, W
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.starts.list_schedule import ListRun, Recipe

__all__ = ["FusedPattern", "alternate", "fused_list_schedule", "patterns", "window_choices"]

Windows = tuple[tuple[int, int], ...]
"""Per rank (head, tail): how many microbatches are split at the start and at the end."""


@dataclass(frozen=True, slots=True)
class FusedPattern:
    """Per rank: F's before the first backward, W's that may wait, and the split windows."""

    warm: tuple[int, ...]
    waiting: tuple[int, ...]
    windows: Windows

    def codes(self, instance: Instance) -> Codes:
        """The order."""
        return [
            alternate(instance, rank, self.warm[rank], self.waiting[rank], self.windows[rank])
            for rank in range(instance.num_ranks)
        ]

    def neighbours(self, count: int) -> Iterator[FusedPattern]:
        """One number more or less: on one rank, on all, or by a slope that grows or falls along the ranks."""
        p = len(self.warm)
        shapes = [
            tuple(1 for _ in range(p)),
            tuple(range(p)),
            tuple(p - d for d in range(p)),
            *(tuple(int(r == d) for r in range(p)) for d in range(p)),
        ]
        for field in ("tail", "head", "waiting", "warm", "head and waiting"):
            for shape in shapes:
                for sign in (1, -1):
                    yield self._shifted(field, tuple(sign * v for v in shape), count)

    def _shifted(self, field: str, steps: tuple[int, ...], count: int) -> FusedPattern:
        def shift(row: tuple[int, ...], least: int) -> tuple[int, ...]:
            return tuple(max(least, min(count, v + step)) for v, step in zip(row, steps, strict=True))

        heads, tails = tuple(h for h, _ in self.windows), tuple(t for _, t in self.windows)
        warm, waiting = self.warm, self.waiting
        if field == "warm":
            warm = shift(warm, 1)
        if field.endswith("waiting"):
            waiting = shift(waiting, 0)
        if field.startswith("head"):
            heads = shift(heads, 0)
        if field == "tail":
            tails = shift(tails, 0)
        return FusedPattern(warm, waiting, tuple(zip(heads, tails, strict=True)))


def alternate(
    instance: Instance, rank: int, warm: int, waiting: int, window: tuple[int, int]
) -> list[tuple[int, int]]:
    """``warm`` F's, then a backward and an F in turn; a W once more than ``waiting`` are pending.

    W's run earlier where an F or B finds no room, and one behind every B once no F is left. A rank
    whose room takes no further F runs a backward first. Fits wherever one microbatch fits.
    """
    s, m, headroom = instance.stages_of[rank][0], instance.num_microbatches, instance.headroom[rank]
    saved, grow = instance.saved[s], instance.pending[s] - instance.saved[s]
    row: list[tuple[int, int]] = []
    held = forwards = backwards = pending = 0

    def weights(keep: int) -> None:
        nonlocal held, pending
        while pending > keep:
            row.append((W, s))
            held, pending = held - instance.pending[s], pending - 1

    while backwards < m:
        turn = forwards < m and forwards - backwards < max(1, warm)
        if turn:
            while pending and held + saved > headroom:
                weights(pending - 1)
            turn = held + saved <= headroom
        if turn:
            row.append((F, s))
            held, forwards = held + saved, forwards + 1
            continue
        if backwards < window[0] or backwards >= m - window[1]:
            while pending and held + grow > headroom:
                weights(pending - 1)
        split = (backwards < window[0] or backwards >= m - window[1]) and held + grow <= headroom
        row.append((B if split else BW, s))
        held, pending = held + (grow if split else -saved), pending + split
        backwards += 1
        if split or backwards > m - window[1]:
            weights(min(pending, waiting if forwards < m else max(0, pending - 1)))
    weights(0)
    return row


class _FusedRun(ListRun):
    """The list scheduler with given backwards fused. ``done[W]`` counts fused ones as well."""

    def __init__(self, instance: Instance, recipe: Recipe, windows: Windows) -> None:
        super().__init__(instance, recipe)
        self.windows = windows
        self.split, self.whole = instance, replace(instance, backward=instance.fused)

    def _fused(self, rank: int) -> bool:
        head, tail = self.windows[rank]
        return head <= self.done[rank][B] < self.count - tail

    def fits(self, rank: int, kind: int) -> bool:
        """As in the list scheduler; a fused backward always fits."""
        return (kind == B and self._fused(rank)) or super().fits(rank, kind)

    def commit(self, rank: int, kind: int, now: int) -> None:
        """As in the list scheduler; a fused B is a BW and leaves no W."""
        if kind != B or not self._fused(rank):
            super().commit(rank, kind, now)
            return
        s = self.stage[rank]
        self.instance = self.whole
        super().commit(rank, B, now)
        self.instance = self.split
        self.codes[rank][-1] = (BW, s)
        self.held[rank] -= self.split.pending[s]
        self.done[rank][W] += 1


def fused_list_schedule(instance: Instance, recipe: Recipe, windows: Windows) -> Codes | None:
    """Run the list scheduler with the backwards outside the windows fused; ``None`` when it gets stuck."""
    run = _FusedRun(instance, recipe, windows)
    fused = sum(max(0, instance.num_microbatches - head - tail) for head, tail in windows)
    return run.run(fused)


def window_choices(instance: Instance) -> list[Windows]:
    """Split windows to try: the rule of thumb, never, all, all but rank 0, and wider or narrower rules."""
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


def patterns(instance: Instance) -> Iterator[FusedPattern]:
    """Whole patterns, in a fixed order."""
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
