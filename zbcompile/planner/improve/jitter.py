"""Breaking ties: which of two equally long orders suffers less when times vary.

Every action's time is stretched by a random amount of up to some per cent, the same for the same action in
every order that is compared, so that the comparison carries little noise. A fused BW is stretched as its B
and its W would be together.
"""

from __future__ import annotations

import random

from zbcompile.planner.core.instance import BW, B, Codes, F, W, numbered
from zbcompile.planner.core.times import Clock

__all__ = ["jittered_mean"]

_SAMPLES = 8


def jittered_mean(clock: Clock, codes: Codes, *, percent: int = 10, seed: int = 0) -> int:
    """Return the mean value in ns over a fixed set of samples.

    Deterministic: the same arguments give the same integer.

    Parameters
    ----------
    clock
        What times the orders.
    codes
        An order that does not deadlock.
    percent
        Each time is stretched by -percent to +percent.
    seed
        Decides the samples.
    """
    instance, total = clock.instance, 0
    ops = [
        (kind, s, i)
        for kind in (F, B, W)
        for s in range(instance.num_stages)
        for i in range(instance.num_microbatches)
    ]
    for sample in range(_SAMPLES):
        rng = random.Random(f"{seed}/{sample}")
        scale = {op: rng.randint(-1000, 1000) for op in ops}
        for _, s, i in ops[: instance.num_stages * instance.num_microbatches]:
            b, w = instance.backward[s], instance.weight[s]
            scale[BW, s, i] = (b * scale[B, s, i] + w * scale[W, s, i]) // max(1, b + w)
        times = [
            [time + time * scale[op] * percent // 100_000 for op, time in zip(row, nominal, strict=True)]
            for row, nominal in zip(numbered(codes), clock.nominal(codes), strict=True)
        ]
        value = clock.value(codes, times)
        if value is None:
            raise ArithmeticError("a deadlocked order has no time")
        total += value
    return total // _SAMPLES
