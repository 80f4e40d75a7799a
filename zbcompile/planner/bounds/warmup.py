"""The warm-up bound: idle time before the first B's that no number of warm-up F's avoids.

For a chain with one stage per rank. Before B(1) rank d runs F's alone, n_d of them, and is idle for the rest:
from the start of F(1) to the start of B(1) it takes s_d = n_d * TF_d + idle_d. Microbatch 1 goes down to the
next rank and comes back, so s_d >= s_{d+1} + TF_d + lag + TB_{d+1} + lag. Memory allows
n_d <= headroom // M_B. With a value Z, rank d may be idle for at most e_d = Z - work_d (for the makespan less
its head), so s_d lies in one of the intervals [n TF_d, n TF_d + e_d]. From the last rank up, the least s_d in
an interval is best for every rank above it; if no interval within memory reaches high enough, no order is as
short as Z. The least Z for which every rank finds an interval is the bound.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.instance import Instance, is_chain
from zbcompile.planner.core.paths import Paths

__all__ = ["warmup_bounds", "warmup_forwards"]

Step = tuple[int, int, int, int, int]
"""(rank, least s, F's before B(1), idle ns, idle ns allowed)."""


def warmup_bounds(instance: Instance, paths: Paths) -> Iterator[Bound]:
    """Yield the bound for a chain, unless it is no more than the work alone.

    The value is found by bisection. The witness lists, for one ns less, a `Step` per rank from the last one
    up; it ends with the rank that fails, whose idle time exceeds what is allowed.
    """
    if not is_chain(instance):
        return
    needed = _needed(instance, paths)
    low = max(needed)
    if _reached(instance, needed, low)[0]:
        return
    high = low + max(paths.f_to_b(d, d) for d in range(instance.num_ranks)) + sum(instance.forward)
    while not _reached(instance, needed, high)[0]:
        high += high - low
    while high - low > 1:
        middle = (low + high) // 2
        if _reached(instance, needed, middle)[0]:
            high = middle
        else:
            low = middle
    steps = [list(step) for step in _reached(instance, needed, high - 1)[1]]
    yield Bound(high, "warmup", instance.objective, {"steps_one_ns_below": steps})


def warmup_forwards(instance: Instance, paths: Paths, value: int) -> tuple[int, ...] | None:
    """Return the F's before B(1) on every rank of a chain that the bound counts for an order of some value.

    Parameters
    ----------
    instance
        What is planned.
    paths
        Its longest paths.
    value
        The value in ns that the order shall have.

    Returns
    -------
    tuple of int, or None
        ``None`` where ranks have several stages, and if no order is so short.
    """
    if not is_chain(instance):
        return None
    reached, steps = _reached(instance, _needed(instance, paths), value)
    return tuple(step[2] for step in reversed(steps)) if reached else None


def _needed(instance: Instance, paths: Paths) -> list[int]:
    """Return per rank its work, and for the makespan the least time before its first F."""
    makespan = instance.objective == "makespan"
    return [instance.work(d) + (paths.head[d] if makespan else 0) for d in range(instance.num_ranks)]


def _reached(instance: Instance, needed: list[int], value: int) -> tuple[bool, list[Step]]:
    """Return whether every rank finds an interval for ``value``, and the steps from the last rank up."""
    steps: list[Step] = []
    last = instance.num_stages - 1
    at = 0
    for d in range(last, -1, -1):
        forward, saved = instance.forward[d], instance.saved[d]
        allowed = value - needed[d]
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
        idle = at - count * forward
        if idle > allowed and count < most and allowed >= 0:
            count, idle = count + 1, 0
            at = count * forward
        steps.append((d, at, count, idle, allowed))
        if idle > allowed:
            return False, steps
    return True, steps
