"""The stairs: idle time before the first B's that no choice of warm-up avoids.

One stage per rank in a chain. Before B(1) a rank runs F's alone, n of them, and idles the rest:
from the start of F(1) to the start of B(1) it takes s_d = n_d * TF_d + idle_d. Microbatch 1 goes
down to the next rank and comes back, so s_d >= s_{d+1} + TF_d + lag + TB_{d+1} + lag. Memory allows
n_d <= room // M_B. With a value Z, rank d may idle at most e_d = Z - work_d (for the makespan less
its head), so s_d lies in one of the steps [n TF_d, n TF_d + e_d]. Going up from the last rank, the
least s_d on a step is best for every rank above it; when no step within memory reaches high
enough, no order is as short as Z. The least Z that passes is the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.paths import Paths

__all__ = ["Warmup", "climb", "warmup_bound", "walk"]


@dataclass(frozen=True, slots=True)
class Warmup:
    """No order is shorter than ``value_ns``: with one ns less, ``steps`` cannot be climbed.

    steps : from the last rank up, [rank, least s, F's before B(1), idle, idle allowed], for
        ``value_ns`` - 1. The last entry is the rank that fails: there the idle time exceeds the allowed.
    """

    value_ns: int
    steps: tuple[tuple[int, int, int, int, int], ...]


def walk(
    instance: Instance, heads: list[int], value: int
) -> tuple[bool, list[tuple[int, int, int, int, int]]]:
    """Climb the stairs with a value: (whether the first rank is reached, the steps)."""
    steps: list[tuple[int, int, int, int, int]] = []
    last = instance.num_stages - 1
    at = 0
    for d in range(last, -1, -1):
        forward, saved = instance.forward[d], instance.saved[d]
        allowed = value - heads[d] - instance.work(d)
        if d == last:
            at = forward
        else:
            at += (
                forward
                + instance.forward_from[d + 1][0][1]
                + instance.backward[d + 1]
                + instance.backward_from[d][0][1]
            )
        most = min(
            instance.num_microbatches, instance.headroom[d] // saved if saved else instance.num_microbatches
        )
        count = min(most, at // forward) if forward else most
        idle = at - count * forward if forward else 0
        if idle > allowed and count < most and allowed >= 0:
            count, idle = count + 1, 0
            at = count * forward
        steps.append((d, at, count, idle, allowed))
        if idle > allowed:
            return False, steps
    return True, steps


def climb(instance: Instance, paths: Paths, value: int) -> tuple[int, ...] | None:
    """F's before the first B per rank for an order of that value, or ``None`` if none can be so short."""
    heads = [paths.head[d] if instance.objective == "makespan" else 0 for d in range(instance.num_ranks)]
    passes, steps = walk(instance, heads, value)
    return tuple(step[2] for step in reversed(steps)) if passes else None


def warmup_bound(instance: Instance, paths: Paths) -> Warmup | None:
    """The least value that passes, by bisection; ``None`` where it is no more than the work alone."""
    ranks = range(instance.num_ranks)
    heads = [paths.head[d] if instance.objective == "makespan" else 0 for d in ranks]
    low = max(heads[d] + instance.work(d) for d in ranks)
    if walk(instance, heads, low)[0]:
        return None
    high = low + max(paths.f_to_b(d, d) for d in ranks) + sum(instance.forward)
    while not walk(instance, heads, high)[0]:
        high += high - low
    while high - low > 1:
        middle = (low + high) // 2
        if walk(instance, heads, middle)[0]:
            high = middle
        else:
            low = middle
    return Warmup(high, tuple(walk(instance, heads, high - 1)[1]))
