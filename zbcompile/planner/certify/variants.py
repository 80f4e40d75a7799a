"""The second derivation of a bound over all variants of stages (`zbcompile.planner.variants`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from zbcompile.planner.certify.facts import OUTERMOST, Derivation, Facts, Inner, Witness, rank_of, refuse
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.problem import Problem

__all__ = ["derive_variants"]


def derive_variants(
    problem: Problem, offered: Profile, witness: Witness, out: Derivation, inner: Inner
) -> int:
    """Derive a bound over variants: on one rank each of its levels, elsewhere the least of each cost.

    Parameters
    ----------
    offered
        The profile with all variants.
    inner
        Derives a bound of a problem without variants.
    """
    ways = [_ways(stage) for stage in offered.stages]
    facts_rank = rank_of(Facts(problem.one(0)), witness)
    stages = problem.placement.stages_of(facts_rank)
    low = [_least(row) for row in ways]
    levels = witness.get("levels")
    if not isinstance(levels, (list, tuple)):
        raise refuse("the witness's levels are no list")
    seen, totals, rows = set(), [], []
    for level in levels:
        if not isinstance(level, Mapping):
            raise refuse("a level of the witness is no record", given=level)
        costs = list(low)
        choice = level.get("choice")
        if choice is not None:
            costs = _chosen(costs, ways, stages, choice)
            seen.add(tuple(cast("list[int]", choice)))
        method, inside = level.get("method"), level.get("witness")
        if not isinstance(method, str) or not isinstance(inside, Mapping) or method in OUTERMOST:
            raise refuse("a level of the witness has no method", given=method)
        out.note(f"rank {facts_rank} at {'any level' if choice is None else f'level {choice}'}, by {method}:")
        hybrid = problem.with_(profile=replace(problem.profile, stages=tuple(costs)))
        totals.append(inner(hybrid, method, inside))
        out.note(f"{'=':>8} {totals[-1]:,} ns")
        level_numbers = Derivation(
            numbers={"choice": choice, "method": method, "bound_ns": totals[-1], "witness": inside}
        )
        level_numbers.compare(level)
        rows.append(level)
    wanted = 1
    for s in stages:
        wanted *= len(ways[s])
    if not totals or (len(seen) < wanted and not any(level.get("choice") is None for level in levels)):
        raise refuse("the witness leaves out a level of its rank", wanted, len(seen))
    costs_listed = [[_numbers(way) for way in row] for row in ways]
    Derivation(numbers={"rank": facts_rank, "levels": rows, "costs": costs_listed}).compare(witness)
    out.note("the least of these holds for every assignment:")
    return min(totals)


def _ways(stage: StageCost) -> list[StageCost]:
    """Return a stage's ways to run, as it is first, without names."""
    ways = (stage, *stage.variants)
    shared = {"static_bytes": stage.static_bytes, "gradient_bytes": stage.gradient_bytes}
    shared |= {name: getattr(stage, name) for name in ("unshard_ns", "reduce_ns", "update_ns")}
    return [replace(way, name="", variants=(), **shared) for way in ways]


def _numbers(way: StageCost) -> list[int]:
    """Return the costs of a way to run as a witness lists them."""
    times = [way.forward_ns, way.backward_input_ns, way.backward_weight_ns, way.full_backward_ns]
    return [*times, way.saved_bytes, way.saved_for_weight_bytes]


def _least(ways: list[StageCost]) -> StageCost:
    """Return the least of every cost.

    Notes
    -----
    `zbcompile.planner.joint_bound.cheapest` does nearly the same, on a stage and its variants. The two stay
    apart on purpose: what checks a bound shares no code with what found it.
    """
    return StageCost(
        min(w.forward_ns for w in ways),
        min(w.backward_input_ns for w in ways),
        min(w.backward_weight_ns for w in ways),
        min(w.full_backward_ns for w in ways),
        min(w.saved_bytes for w in ways),
        min(w.saved_for_weight_bytes for w in ways),
        ways[0].static_bytes,
        gradient_bytes=ways[0].gradient_bytes,
        unshard_ns=ways[0].unshard_ns,
        reduce_ns=ways[0].reduce_ns,
        update_ns=ways[0].update_ns,
    )


def _chosen(
    costs: list[StageCost], ways: list[list[StageCost]], stages: tuple[int, ...], choice: object
) -> list[StageCost]:
    """Return the costs with the stages of one rank at the levels of ``choice``."""
    if not isinstance(choice, (list, tuple)) or len(choice) != len(stages):
        raise refuse("a level does not name a way per stage of the rank", len(stages), choice)
    for s, k in zip(stages, choice, strict=True):
        if type(k) is not int or not 0 <= k < len(ways[s]):
            raise refuse(f"stage {s} has no such way", f"0 to {len(ways[s]) - 1}", k)
        costs[s] = ways[s][k]
    return costs
