"""The list of the lower bounds that a reader can check by hand.

Every bound is for orders without fused backwards under the costs of `Instance.relaxed`, which no order of
the problem undercuts: so it holds for split and fused orders alike. Each has a file of its own with its
proof. They count F's, B's and W's; `zbcompile.planner.bounds.once_a_step` adds what a step costs beside them.

All proofs use two facts. Microbatches are alike, so the k-th executed F, B or W of a stage may be called
microbatch k. On a rank F(i) holds M_B until B(i) ends, and B(i) holds M_W until W(i) ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from zbcompile.planner.bounds.area import area_bounds
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.bounds.enclosing_pair import best_enclosing_pair, enclosing_pair_bounds
from zbcompile.planner.bounds.head_and_tail import makespan_bounds
from zbcompile.planner.bounds.last_round_trip import last_round_trip_bounds
from zbcompile.planner.bounds.once_a_step import with_once_a_step
from zbcompile.planner.bounds.rank_idle import RankIdle, rank_idle
from zbcompile.planner.bounds.unequal import unequal_bound
from zbcompile.planner.bounds.warmup import warmup_bounds
from zbcompile.planner.bounds.work import work_bounds
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.paths import Paths
from zbcompile.schedule.problem import Problem

__all__ = ["analytic_bounds", "best_bound"]


def analytic_bounds(problem: Problem) -> list[Bound]:
    """Return every bound for the problem's objective, strongest first.

    Where microbatches differ in cost, the best of `zbcompile.planner.bounds.unequal` alone.
    """
    if problem.microbatch_costs:
        return [unequal_bound(problem, best_bound)]
    instance = Instance.of(problem).relaxed()
    paths = Paths.of(instance)
    idles = [rank_idle(instance, paths, rank) for rank in range(instance.num_ranks)]
    pairs = enclosing_pair_bounds(instance, paths, idles)
    found = with_once_a_step(instance, _collected(instance, paths, idles, pairs))
    return sorted(found, key=lambda bound: -bound.value_ns)


def best_bound(problem: Problem) -> Bound:
    """Return the strongest of `analytic_bounds`, without looking at every pair of ranks.

    Where microbatches differ in cost, the bound of `zbcompile.planner.bounds.unequal`.
    """
    if problem.microbatch_costs:
        return unequal_bound(problem, best_bound)
    instance = Instance.of(problem).relaxed()
    paths = Paths.of(instance)
    idles = [rank_idle(instance, paths, rank) for rank in range(instance.num_ranks)]
    pair = best_enclosing_pair(instance, paths, idles)
    pairs = () if pair is None else (pair,)
    found = with_once_a_step(instance, _collected(instance, paths, idles, pairs))
    return max(found, key=lambda bound: bound.value_ns)


def _collected(
    instance: Instance, paths: Paths, idles: Sequence[RankIdle], pairs: Iterable[Bound]
) -> Iterator[Bound]:
    """Yield the bounds for the instance's objective, those of the enclosing pairs as given."""
    yield from work_bounds(instance, idles)
    yield from area_bounds(instance, paths)
    yield from pairs
    yield from last_round_trip_bounds(instance, paths, idles)
    yield from warmup_bounds(instance, paths)
    if instance.objective == "makespan":
        yield from makespan_bounds(instance, paths, idles)
