"""Offset keys: a periodic order for several stages per rank, in a few numbers.

Every action of microbatch i has the key offset + i * T, with T = 3 v slots for v stages on a rank. The offset
of F(s) grows along the stages by one step per stage, the step depending on the wave (a wave is one run over
the ranks), plus a gap before each further wave. The offsets of B go on from there, back along the stages.
Steps are in slots, as in the building blocks of arXiv 2405.15362.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from zbcompile.planner.core.instance import B, Codes, F, Instance, W

__all__ = ["OffsetKeys", "block_order", "mutate", "standard_offset_keys", "waves_of"]


@dataclass(frozen=True, slots=True)
class OffsetKeys:
    """Steps and gaps in slots.

    Attributes
    ----------
    forward, backward
        Step of each wave, in the order in which the waves run.
    gaps
        Gap before the second wave of F's, ..., before the first B, before the second wave of B's, ...
    weight
        How much later than its B a W is due.
    extra
        Microbatches in flight beyond those that the offsets imply.
    share
        Hundredths of a W that a gap must last for a W to fill it.
    period
        Slots from one microbatch to the next, 0 for 3 v.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    gaps: tuple[int, ...]
    weight: int = 1
    extra: int = 0
    share: int = 100
    period: int = 0

    def offsets(self, waves: list[list[int]]) -> tuple[dict[int, int], dict[int, int]]:
        """Return the offsets of F and of B per stage, in slots."""
        forward: dict[int, int] = {}
        backward: dict[int, int] = {}
        at, gaps = 0, list(self.gaps)
        for w, wave in enumerate(waves):
            at += gaps[w - 1] if w else 0
            for k, s in enumerate(wave):
                at += self.forward[w] if k else 0
                forward[s] = at
        for w, wave in enumerate(reversed(waves)):
            at += gaps[len(waves) - 1 + w]
            for k, s in enumerate(reversed(wave)):
                at += self.backward[w] if k else 0
                backward[s] = at
        return forward, backward

    def keys(self, instance: Instance) -> tuple[list[int], list[int]]:
        """Return (key per action, in-flight limit per stage) for `Dispatcher.run`."""
        forward, backward = self.offsets(waves_of(instance))
        S, m = instance.num_stages, instance.num_microbatches
        period = self.period or 3 * -(-S // instance.num_ranks)
        keys: list[int] = []
        for side, late in ((forward, 0), (backward, 0), (backward, self.weight)):
            for s in range(S):
                first = 100 * (side[s] + late) + (1 if late else 0)
                keys.extend(range(first, first + 100 * period * m, 100 * period))
        in_flight = [max(1, (backward[s] - forward[s]) // period + 1 + self.extra) for s in range(S)]
        return keys, in_flight


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
    forward, backward = offset_keys.offsets(waves_of(instance))
    rows = []
    for stages in instance.stages_of:
        period = 3 * len(stages)
        slots: dict[int, list[tuple[int, int, int]]] = {}
        for s in stages:
            for i in range(instance.num_microbatches):
                slots.setdefault(forward[s] + period * i, []).append((F, s, i))
                slots.setdefault(backward[s] + period * i, []).append((B, s, i))
        timed = [(at, n, kind, s) for at, ops in slots.items() for n, (kind, s, _) in enumerate(ops)]
        timed.extend(_weights(slots, offset_keys.weight))
        timed.sort()
        rows.append([(kind, s) for _, _, kind, s in timed])
    return rows


def _weights(slots: dict[int, list[tuple[int, int, int]]], delay: int) -> list[tuple[int, int, int, int]]:
    """Return W's in the first free slots, ``delay`` or more after their B's, in the order of the B's."""
    taken, result, at = set(slots), [], -1
    backwards = sorted((t, n, op[1]) for t, ops in slots.items() for n, op in enumerate(ops) if op[0] == B)
    for begin, n, s in backwards:
        at = max(at, begin + delay)
        while at in taken:
            at += 1
        taken.add(at)
        result.append((at, n, W, s))
    return result


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


def mutate(offset_keys: OffsetKeys, rng: random.Random) -> OffsetKeys:
    """Return the keys with one to three numbers changed by one or two."""
    forward, backward, gaps = list(offset_keys.forward), list(offset_keys.backward), list(offset_keys.gaps)
    weight, extra, share = offset_keys.weight, offset_keys.extra, offset_keys.share
    for _ in range(rng.randint(1, 3)):
        what = rng.randrange(6)
        if what < 3:
            row = (forward, backward, gaps)[what]
            k = rng.randrange(len(row))
            row[k] = max(0, row[k] + rng.choice((-1, 1, 2)))
        elif what == 3:
            weight = max(0, weight + rng.choice((-6, -2, -1, 1, 2, 6)))
        elif what == 4:
            extra = max(0, extra + rng.choice((-1, 1, 1, 2)))
        else:
            share = rng.choice((0, 25, 50, 75, 100, 125, 150))
    return OffsetKeys(tuple(forward), tuple(backward), tuple(gaps), weight, extra, share, offset_keys.period)
