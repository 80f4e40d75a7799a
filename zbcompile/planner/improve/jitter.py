"""Breaking ties: which of two equally long orders suffers less when times vary.

Every action's time is stretched by a random amount of up to some per cent, the same for the same
action in every order that is compared, so that the comparison carries little noise. A fused BW is
stretched as its B and its W would be together.
"""

from __future__ import annotations

import random

from zbcompile.planner.core.instance import BW, B, Codes, F, W
from zbcompile.planner.core.times import Clock

__all__ = ["jittered_mean"]


def jittered_mean(clock: Clock, codes: Codes, *, percent: int = 10, samples: int = 8, seed: int = 0) -> int:
    """Mean value in ns over a fixed set of samples, each time stretched by -percent to +percent.

    The order must not deadlock. Deterministic: the same arguments give the same integer.
    """
    instance, total = clock.instance, 0
    for sample in range(samples):
        rng = random.Random(f"{seed}/{sample}")
        scale = [
            [
                [rng.randint(-1000, 1000) for _ in range(instance.num_microbatches)]
                for _ in range(instance.num_stages)
            ]
            for _ in (F, B, W)
        ]
        value = clock.value(codes, _stretched(clock, codes, scale, percent))
        if value is None:
            raise ArithmeticError("a deadlocked order has no time")
        total += value
    return total // samples


def _stretched(clock: Clock, codes: Codes, scale: list[list[list[int]]], percent: int) -> list[list[int]]:
    instance, rows = clock.instance, []
    for row, nominal in zip(codes, clock.nominal(codes), strict=True):
        count: dict[tuple[int, int], int] = {}
        waiting: dict[int, list[int]] = {}
        times = []
        for (kind, s), time in zip(row, nominal, strict=True):
            if kind == W:
                i = waiting[s].pop(0)
                by = scale[W][s][i]
            else:
                side = F if kind == F else B
                i = count.get((side, s), 0)
                count[side, s] = i + 1
                by = scale[side][s][i]
                if kind == B:
                    waiting.setdefault(s, []).append(i)
            if kind == BW:
                b, w = instance.backward[s], instance.weight[s]
                by = (b * by + w * scale[W][s][i]) // max(1, b + w)
            times.append(time + time * by * percent // 100_000)
        rows.append(times)
    return rows
