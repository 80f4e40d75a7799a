"""A parametric list scheduler for one stage per rank.

Time runs forward over all ranks; a free rank decides with what is known at that moment:

1. F and B both ready: after the first B they alternate; before it, B runs first.
2. One ready: it runs. An F needs memory and fewer than ``limit`` microbatches in flight.
3. Memory alone holds up a ready F: a pending W runs.
4. Nothing ready: a W runs if the gap lasts at least ``theta`` W's, or if the rank has no idle time left to
   give (``budget``); else the rank waits.

Backwards outside a rank's split windows run fused.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zbcompile.planner.core.instance import BW, B, Codes, F, Instance, W
from zbcompile.schedule.memory import in_a_row

__all__ = ["Recipe", "Windows", "list_schedule", "mixed_limits", "standard_limits"]

_NEVER = 1 << 62

Windows = tuple[tuple[int, int], ...]
"""Per rank (head, tail): how many microbatches are split at the start and at the end."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Parameters of one run.

    Attributes
    ----------
    limits
        Most microbatches in flight, per rank.
    theta
        Hundredths of a W that a gap must last before a W fills it.
    budget
        Idle time in ns per rank, between its first and last action, before W's fill every gap.
    windows
        Split windows; None where all is split.
    """

    limits: tuple[int, ...]
    theta: int
    budget: tuple[int, ...]
    windows: Windows | None = None


class _ListRun:
    """The state of one run: clocks, counters and what has become ready. A BW counts as B and as W done."""

    def __init__(self, instance: Instance, recipe: Recipe) -> None:
        p, m = instance.num_ranks, instance.num_microbatches
        self.instance, self.recipe, self.count = instance, recipe, m
        self.stage = [stages[0] for stages in instance.stages_of]
        self.times = (instance.forward, instance.backward, instance.weight, instance.fused)
        self.free, self.idle = [0] * p, [0] * p
        self.done = [[0, 0, 0] for _ in range(p)]
        self.held = [0] * p
        self.last = [F] * p
        self.ready = [[[0] * m, [0] * m] for _ in range(p)]
        waits = instance.rules.waits
        self.missing = [[[len(waits[kind][s])] * m for kind in (F, B)] for s in self.stage]
        self.after: list[list[list[tuple[int, int, int]]]] = [[[], []] for _ in range(p)]
        for rank, s in enumerate(self.stage):
            for kind in (F, B):
                for before, other, lag in waits[kind][s]:
                    self.after[instance.rank_of[other]][before].append((rank, kind, lag))
        self.codes: Codes = [[] for _ in range(p)]
        self.events = [(0, rank) for rank in range(p)]

    def when(self, rank: int, kind: int) -> int:
        """Return when the next F or B of a rank becomes ready, as far as known."""
        k = self.done[rank][kind]
        if k == self.count or self.missing[rank][kind][k]:
            return _NEVER
        return self.ready[rank][kind][k]

    def fuses(self, rank: int) -> bool:
        """Return whether the next backward of a rank runs fused."""
        if self.recipe.windows is None:
            return False
        head, tail = self.recipe.windows[rank]
        return head <= self.done[rank][B] < self.count - tail

    def fits(self, rank: int, kind: int) -> bool:
        """Return whether the headroom takes one more B, or one more F and its B. A BW always fits."""
        if kind == B and self.fuses(rank):
            return True
        uses = self.instance.memory.uses[self.stage[rank]]
        peak = uses.backward_input.peak if kind == B else in_a_row(uses.forward, uses.backward_input)[1]
        return self.held[rank] + peak <= self.instance.headroom[rank]

    def choose(self, rank: int, now: int) -> int | None:
        """Return the kind to run at ``now``, or ``None`` to wait."""
        done = self.done[rank]
        has_w = done[B] > done[W]
        open_f = done[F] - done[B] < self.recipe.limits[rank] and done[F] < self.count
        f_at, b_at = self.when(rank, F), self.when(rank, B)
        f_fits, b_fits = self.fits(rank, F), self.fits(rank, B)
        f_now, b_now = open_f and f_fits and f_at <= now, b_fits and b_at <= now
        if f_now and b_now:
            return F if done[B] and self.last[rank] == B else B
        if f_now or b_now:
            return F if f_now else B
        if not has_w:
            return None
        blocked = open_f and not f_fits and f_at <= now
        if blocked or (not b_fits and b_at <= now) or done[B] == self.count:
            return W
        gap = min(f_at if open_f and f_fits else _NEVER, b_at) - now
        if gap == _NEVER - now:
            gap = self.instance.forward[self.stage[rank]]
        spent = self.idle[rank] + now - self.free[rank] + gap
        weight = self.instance.weight[self.stage[rank]]
        if 100 * gap >= self.recipe.theta * weight or spent > self.recipe.budget[rank]:
            return W
        return None

    def commit(self, rank: int, kind: int, now: int) -> None:
        """Run one action and tell the ranks that wait for it."""
        s, code = self.stage[rank], BW if kind == B and self.fuses(rank) else kind
        if self.codes[rank]:
            self.idle[rank] += now - self.free[rank]
        end = now + self.times[code][s]
        k = self.done[rank][kind]
        self.held[rank] += self.instance.memory.change[code][s]
        self.done[rank][kind] += 1
        self.done[rank][W] += code == BW
        self.free[rank] = end
        self.codes[rank].append((code, s))
        heapq.heappush(self.events, (end, rank))
        if kind == W:
            return
        self.last[rank] = kind
        for other, waiting, lag in self.after[rank][kind]:
            self._arrive(other, waiting, k, end + lag, now)

    def _arrive(self, rank: int, kind: int, k: int, at: int, now: int) -> None:
        self.missing[rank][kind][k] -= 1
        self.ready[rank][kind][k] = max(self.ready[rank][kind][k], at)
        heapq.heappush(self.events, (max(now, self.free[rank]), rank))
        if at > now:
            heapq.heappush(self.events, (max(at, self.free[rank]), rank))

    def run(self) -> Codes | None:
        """Run all ranks to the end. ``None`` if the recipe leaves them stuck."""
        windows = self.recipe.windows or ()
        fused = sum(max(0, self.count - head - tail) for head, tail in windows)
        left = 3 * self.count * self.instance.num_ranks - fused
        while self.events and left:
            now, rank = heapq.heappop(self.events)
            while self.events and self.events[0] == (now, rank):
                heapq.heappop(self.events)
            if now < self.free[rank]:
                continue
            kind = self.choose(rank, now)
            if kind is not None:
                self.commit(rank, kind, now)
                left -= 1
        return None if left else self.codes


def list_schedule(instance: Instance, recipe: Recipe) -> Codes | None:
    """Run the list scheduler once. ``None`` if the recipe cannot finish within the headroom."""
    return _ListRun(instance, recipe).run()


def standard_limits(instance: Instance, round_trips: Sequence[int]) -> list[tuple[int, ...]]:
    """Return limits of microbatches in flight to try, best first: just enough F's to fill the round trip."""
    base = [
        -(-trip // max(1, instance.forward[stages[0]]))
        for trip, stages in zip(round_trips, instance.stages_of, strict=True)
    ]
    p = instance.num_ranks
    return [
        tuple(max(1, b - 1) for b in base),
        tuple(max(1, b) for b in base),
        tuple(b + 1 for b in base),
        (instance.num_microbatches,) * p,
        tuple(2 * (p - d) - 1 for d in range(p)),
    ]


def mixed_limits(few: tuple[int, ...], more: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield limits with one microbatch more in flight on the first ranks than on the rest.

    The middle cut comes first. The idle time before the first B grows towards rank 0 by what a round trip
    exceeds whole F's; one more F on the ranks up to a cut starts it anew from there.
    """
    p = len(few)
    for cut in sorted(range(p - 1), key=lambda cut: (abs(2 * cut + 2 - p), cut)):
        yield (*more[: cut + 1], *few[cut + 1 :])
