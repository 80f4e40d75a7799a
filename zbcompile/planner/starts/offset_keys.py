"""Offset keys: a periodic order for several stages per rank, in a few numbers.

Every action of microbatch i has the key offset + i * T, with T = 3 v slots for v stages on a rank. The offset
of F(s) grows along the stages by one step per stage, the step depending on the wave (a wave is one run over
the ranks), plus a gap before each further wave. The offsets of B go on from there, back along the stages.
Steps are in slots, as in the building blocks of arXiv 2405.15362.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import count

from zbcompile.planner.core.dispatch import Recipe
from zbcompile.planner.core.instance import B, Codes, F, Instance, W

__all__ = ["OffsetKeys", "block_order", "standard_offset_keys", "waves_of"]


@dataclass(frozen=True, slots=True)
class OffsetKeys:
    """Steps and gaps in slots, and limits.

    Attributes
    ----------
    forward, backward
        Step of each wave, in the order in which the waves run.
    gaps
        Gap before the second wave of F's, ..., before the first B, before the second wave of B's, ...
    weight
        How much later than its B a W is due.
    share
        Hundredths of a W that a gap must last for a W to fill it.
    period
        Slots from one microbatch to the next, 0 for 3 v.
    in_flight
        Most microbatches between F and B per stage. Empty: any number.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    gaps: tuple[int, ...]
    weight: int = 1
    share: int = 100
    period: int = 0
    in_flight: tuple[int, ...] = ()

    def offsets(self, instance: Instance) -> tuple[dict[int, int], dict[int, int]]:
        """Return the offsets of F and of B per stage, in slots."""
        waves, at = waves_of(instance), 0
        runs = [*waves, *(wave[::-1] for wave in waves[::-1])]
        found: list[tuple[int, int]] = []
        for run, step, gap in zip(runs, (*self.forward, *self.backward), (0, *self.gaps), strict=True):
            found += [(s, at + gap + k * step) for k, s in enumerate(run)]
            at = found[-1][1]
        return dict(found[: instance.num_stages]), dict(found[instance.num_stages :])

    def slots(self, instance: Instance) -> int:
        """Return the slots from one microbatch to the next."""
        return self.period or 3 * -(-instance.num_stages // instance.num_ranks)

    def keys(self, instance: Instance) -> list[int]:
        """Return the key of every action, as `zbcompile.planner.core.dispatch.Dispatcher.run` takes it."""
        forward, backward = self.offsets(instance)
        step, m = 100 * self.slots(instance), instance.num_microbatches
        keys: list[int] = []
        for side, late in ((forward, 0), (backward, 0), (backward, self.weight)):
            for s in range(instance.num_stages):
                first = 100 * (side[s] + late) + (1 if late else 0)
                keys.extend(range(first, first + step * m, step))
        return keys

    def recipe(self) -> Recipe:
        """Return the limits, as `zbcompile.planner.core.dispatch.Dispatcher.run` takes them."""
        return Recipe(share=self.share, in_flight=self.in_flight or None)

    def limited(self, instance: Instance, more: int) -> OffsetKeys:
        """Return the keys with so many more microbatches in flight than they imply."""
        forward, backward = self.offsets(instance)
        implied = ((backward[s] - forward[s]) // self.slots(instance) for s in range(instance.num_stages))
        return replace(self, in_flight=tuple(max(1, number + 1) + more for number in implied))

    def changed(self, rng: random.Random) -> OffsetKeys:
        """Return the keys with one to three numbers changed by one or two, or as many limits by one."""
        forward, backward, gaps = list(self.forward), list(self.backward), list(self.gaps)
        weight, share, in_flight = self.weight, self.share, list(self.in_flight)
        limits = rng.random() < 0.5 and bool(in_flight)
        for _ in range(rng.randint(1, 3)):
            what = 5 if limits else rng.randrange(5)
            if what < 3:
                row = (forward, backward, gaps)[what]
                k = rng.randrange(len(row))
                row[k] = max(0, row[k] + rng.choice((-1, 1, 2)))
            elif what == 3:
                weight = max(0, weight + rng.choice((-6, -2, -1, 1, 2, 6)))
            elif what == 4:
                share = rng.choice((0, 25, 50, 75, 100, 125, 150))
            else:
                k = rng.randrange(len(in_flight))
                in_flight[k] = max(1, in_flight[k] + rng.choice((-1, 1)))
        steps = (tuple(forward), tuple(backward), tuple(gaps))
        return OffsetKeys(*steps, weight, share, self.period, tuple(in_flight))


def waves_of(instance: Instance) -> list[list[int]]:
    """Return the stages in runs that visit no rank twice."""
    waves: list[list[int]] = []
    seen: set[int] = set()
    for s, rank in enumerate(instance.rank_of):
        if not waves or rank in seen:
            waves.append([])
            seen = set()
        waves[-1].append(s)
        seen.add(rank)
    return waves


def block_order(instance: Instance, offset_keys: OffsetKeys) -> Codes:
    """Return the order that repeats one block, on every rank. The caller checks memory.

    After arXiv 2405.15362, section 3: the actions of one microbatch are placed by their offsets and repeated
    every T = 3 v slots (v stages on a rank); each W takes the first slot that is free after its B. Times are
    forgotten: what counts is the order.
    """
    sides, m, rows = [*zip((F, B), offset_keys.offsets(instance), strict=True)], instance.num_microbatches, []
    for stages in instance.stages_of:
        timed = [
            (side[s] + 3 * len(stages) * i, kind, s) for s in stages for kind, side in sides for i in range(m)
        ]
        taken, at = {slot for slot, _, _ in timed}, 0
        for begin, _, s in sorted(action for action in timed if action[1] == B):
            at = next(slot for slot in count(max(at, begin + offset_keys.weight)) if slot not in taken)
            taken.add(at)
            timed.append((at, W, s))
        rows.append([(kind, s) for _, kind, s in sorted(timed)])
    return rows


def standard_offset_keys(num_waves: int, num_ranks: int) -> list[OffsetKeys]:
    """Return good first keys: full memory (ZB-V), half of it (V-Half), a third (V-Min).

    Notes
    -----
    Source: arXiv 2405.15362, table 1.
    """
    n = num_waves
    starts = []
    for gap in (2, 3, 4):
        starts.append(OffsetKeys((3,) * n, (3,) * n, (1,) * (n - 1) + (gap,) + (1,) * (n - 1)))
    for ends in ((1, 4, 2), (1, 1, 2), (1, 2, 1)):
        middle = (ends[0],) * (n - 1) + (ends[1],) + (ends[2],) * (n - 1)
        mixed = tuple(2 if w % 2 == 0 else 1 for w in range(n))
        starts.append(OffsetKeys(mixed, mixed, middle))
        starts.append(OffsetKeys(mixed[::-1], mixed, middle))
    for third in (3 if num_ranks % 3 == 0 else 1, 3, 1):
        starts.append(OffsetKeys((1,) * n, (1,) * n, (1,) * (n - 1) + (third,) + (1,) * (n - 1)))
    starts.append(OffsetKeys((2,) * n, (2,) * n, (1,) * (2 * n - 1)))
    return starts
