"""Checking a certificate without trusting who wrote it.

The order is judged by `zbcompile.schedule.check` and its value by `simulate`. The bound is derived again from
the problem's own numbers: sums of paths, windows and work by `zbcompile.planner.certify.derive`, bounds that
a solver proved by asking it for an order shorter than the bound. Every number of the witness must be the one
that is derived here, so that whoever adds them up by hand comes to the same sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

from zbcompile.errors import CheckError, UsageError
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.bounds.blocking_send import instant_links
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.certify.cuts import check_cuts, cuts_bound
from zbcompile.planner.certify.derive import derivations
from zbcompile.planner.certify.facts import Derivation, Facts, Witness, alike, rank_of, refuse
from zbcompile.planner.certify.once_a_step import add_once_a_step
from zbcompile.planner.certify.unequal import derive_unequal
from zbcompile.planner.core.instance import Instance, is_chain
from zbcompile.planner.core.times import Clock
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import StageCost
from zbcompile.schedule.held_gradients import gradients_words
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.renumber import Numbering
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Solution

__all__ = ["Verified", "explain", "rederived", "verify", "verify_certificate"]

_MOST_ACTIONS = 7000
"""Largest step for which the exact model is built again."""

_OUTERMOST = ("variants", "cuts", "cp_sat", "crossing")
"""Methods that prove no part of another bound."""

_MOST_UNITS = 2**53
"""Most units of a grid in a bound: whole numbers that the solver can add up."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What was proved anew.

    Attributes
    ----------
    value_ns
        Value of the order.
    bound_ns
        The certificate's bound.
    derived_ns
        The bound as derived here, at least the certificate's.
    method
        The certificate's method.
    proved
        False only where a solver's bound could not be proved again in the time given; ``derived_ns`` is then
        what was proved without it.
    lines
        The derivation, a term a line.
    """

    value_ns: int
    bound_ns: int
    derived_ns: int
    method: str
    proved: bool
    lines: tuple[str, ...]


def verify_certificate(solution: Solution, *, time_limit_s: float = 30.0) -> Verified:
    """Check order, value and bound of a solution.

    Parameters
    ----------
    solution
        The solution.
    time_limit_s
        Seconds for a bound that a solver proved.

    Raises
    ------
    CheckError
        Says what does not hold.
    """
    problem, certificate = solution.problem, solution.certificate
    check(solution.schedule, problem)
    if certificate.objective != problem.objective:
        raise refuse("the certificate is for another objective", problem.objective, certificate.objective)
    value = simulate(solution.schedule, problem).value_ns
    if value != certificate.value_ns:
        raise refuse("the order has another value than certified", f"{value} ns", certificate.value_ns)
    _check_choice(solution)
    out, solver, total = _derive_numbered(solution, time_limit_s)
    if total > value:
        raise refuse(f"the {certificate.method} bound lies above this order", f"at most {value} ns", total)
    if total < certificate.bound_ns and not solver.out_of_time:
        raise refuse(
            f"the {certificate.method} bound does not follow from its witness",
            f"at least {certificate.bound_ns} ns",
            f"{total} ns",
        )
    return Verified(
        value, certificate.bound_ns, total, certificate.method, not solver.out_of_time, tuple(out.lines)
    )


def _derive_numbered(solution: Solution, time_limit_s: float) -> tuple[Derivation, _Solver, int]:
    """Derive a solution's bound with its ranks numbered by their first stages, as planning numbers them.

    A witness that needs them as they are holds as well.
    """
    numbering = Numbering.by_first_stage(solution.problem.placement)
    given = [numbering.of_solution(solution), *(() if numbering.is_same else (solution,))]
    faults: list[CheckError] = []
    for here in given:
        out, solver = Derivation(), _Solver(here.certificate.bound_ns, time_limit_s)
        if here is not solution and not numbering.is_same:
            out.note(numbering.words)
        try:
            total = _derive(
                here.problem, here.certificate.method, here.certificate.witness, out, solver, here
            )
        except CheckError as error:
            faults.append(error)
            continue
        if total >= here.certificate.bound_ns or solver.out_of_time or here is given[-1]:
            return out, solver, total
    raise faults[0]


def verify(solution: Solution) -> list[CheckError]:
    """Return the faults of a certificate; empty if all of it is proved anew."""
    try:
        found = verify_certificate(solution)
    except CheckError as error:
        return [error]
    if found.proved:
        return []
    return [
        refuse(
            f"the {found.method} bound was not proved again in time",
            f"{found.bound_ns} ns",
            f"{found.derived_ns} ns without the solver",
        )
    ]


def explain(solution: Solution) -> str:
    """Return the certificate in words and sums, to be followed by hand.

    Raises
    ------
    CheckError
        The certificate does not hold.
    """
    found = verify_certificate(solution)
    objective = solution.certificate.objective
    status = solution.certificate.status
    head = [
        f"{objective} of this order: {found.value_ns:,} ns, as simulated",
        f"no order has a {objective} below {found.bound_ns:,} ns ({found.method}): {status}",
    ]
    if gradients := gradients_words(solution.schedule, solution.problem):
        head.append(gradients)
    tail = [f"{'=':>8} {found.derived_ns:,} ns"]
    if not found.proved:
        tail.append("not proved again in the time given; the sum above is what holds without the solver")
    return "\n".join([*head, "", *found.lines, *tail]) + "\n"


def _check_choice(solution: Solution) -> None:
    """Test that the stages run as variants that were offered, and that the bound is for all that were."""
    offered, method, cuts = solution.offered, solution.certificate.method, solution.cuts
    if cuts is not None:
        check_cuts(solution.problem, cuts)
        if method != "cuts" and any(size > 1 for size in cuts.sizes):
            raise refuse("the bound is for the cuts chosen, not for all of them", "cuts", method)
    if offered is None:
        if method == "variants":
            raise refuse("the solution does not say which variants its stages offered", "the offered profile")
        return
    try:
        chosen = offered.choose(solution.variants)
    except UsageError as error:
        raise refuse(f"the choice of variants is none of those offered: {error.what}") from None
    for s, (stage, given) in enumerate(zip(chosen.stages, solution.problem.profile.stages, strict=True)):
        if stage != given:
            raise refuse(f"stage {s} does not run as the variant chosen", given=solution.variants[s])
    if chosen != solution.problem.profile:
        raise refuse("the problem's profile is not the one offered")
    if method != "variants" and any(stage.variants for stage in offered.stages):
        raise refuse(
            "the bound is for the variants chosen, not for all that were offered", "variants", method
        )


class _Solver:
    """Time for bounds that a solver proved, and whether it was enough."""

    def __init__(self, target_ns: int, time_limit_s: float) -> None:
        self.target, self.limit = target_ns, time_limit_s
        self.out_of_time = False


def rederived(problem: Problem, bound: Bound) -> int:
    """Return the value of a bound that needs no solver, variants or cuts, as derived here.

    Raises
    ------
    CheckError
        It does not follow from its witness.
    """
    return _derive(problem, bound.method, bound.witness, Derivation(), _Solver(bound.value_ns, 0.0), None)


def _derive(
    problem: Problem,
    method: str,
    witness: Witness,
    out: Derivation,
    solver: _Solver,
    solution: Solution | None,
) -> int:
    """Derive a bound by its method and return its value.

    ``solution`` is given at the outermost level only.
    """
    if problem.microbatch_costs and method != "variants":

        def inner(other: Problem, name: str, inside: Witness) -> int:
            if name in _OUTERMOST:
                raise refuse("a bound of the least microbatch has no usable method", given=name)
            return _derive(other, name, inside, out, solver, None)

        return derive_unequal(problem, method, witness, out, inner)
    simple = derivations(problem.objective).get(method)
    if simple is not None:
        part = Derivation(out.lines)
        simple(Facts(problem), witness, part)
        add_once_a_step(problem, method, part)
        part.compare(witness)
        return part.total
    if method == "blocking_send":
        return _blocking_send(problem, witness, out, solver)
    if method == "variants":
        return _variants(problem, witness, out, solver, solution)
    if method == "cuts":
        if solution is None or solution.cuts is None:
            raise refuse("the solution does not say how its stages were cut", "its pieces and cuts")
        return cuts_bound(problem, solution.cuts, witness, solver.target, out)
    if method == "cp_sat":
        return _cp_sat(problem, witness, out, solver)
    if method == "crossing":
        return _crossing(problem, witness, out, solver)
    raise refuse(f"unknown method {method[:40]!r} for the {problem.objective}")


def _blocking_send(problem: Problem, witness: Witness, out: Derivation, solver: _Solver) -> int:
    """Derive a blocking-send bound: travel times belong to F and B, less one last message."""
    pair = instant_links(problem)
    method = witness.get("of")
    if pair is None or not isinstance(method, str) or method in ("blocking_send", *_OUTERMOST):
        raise refuse("sends hold up nobody here", given=method)
    out.note(
        f"{problem.transport}: every F and B counts with the shortest travel time of what it sends, its links"
        " without it"
    )
    inner = {name: value for name, value in witness.items() if name not in ("of", "last_message_ns")}
    if not alike(witness.get("last_message_ns", pair[1]), pair[1]):
        given = witness["last_message_ns"]
        raise refuse("last_message_ns of the witness is not what follows", pair[1], given)
    total = _derive(pair[0], method, inner, out, solver, None)
    out.add("a last message that nobody waits for", -pair[1])
    return max(0, total - pair[1])


def _variants(
    problem: Problem, witness: Witness, out: Derivation, solver: _Solver, solution: Solution | None
) -> int:
    """Derive a bound over variants: on one rank each of its levels, elsewhere the least of each cost."""
    if solution is None or solution.offered is None:
        raise refuse("variants inside another bound")
    ways = [_ways(stage) for stage in solution.offered.stages]
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
        method, inner = level.get("method"), level.get("witness")
        if not isinstance(method, str) or not isinstance(inner, Mapping) or method in _OUTERMOST:
            raise refuse("a level of the witness has no method", given=method)
        out.note(f"rank {facts_rank} at {'any level' if choice is None else f'level {choice}'}, by {method}:")
        hybrid = problem.with_(profile=replace(problem.profile, stages=tuple(costs)))
        totals.append(_derive(hybrid, method, inner, out, solver, None))
        out.note(f"{'=':>8} {totals[-1]:,} ns")
        level_numbers = Derivation(
            numbers={"choice": choice, "method": method, "bound_ns": totals[-1], "witness": inner}
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


def _cp_sat(problem: Problem, witness: Witness, out: Derivation, solver: _Solver) -> int:
    """Prove a bound of the exact model: ask for anything shorter, and fail."""
    from zbcompile.planner.exact.message_model import can_model
    from zbcompile.planner.exact.model import MODELS, refute, split_is_exact

    instance, shorter, clock = Instance.of(problem), None, None
    plain = not problem.sends.holds_rank and split_is_exact(instance)
    whole = plain or (can_model(problem.sends) and witness.get("model") != MODELS[1])
    known: dict[str, object] = {
        "solver": "CP-SAT",
        "model": MODELS[0 if whole else 1],
        "actions": 3 * instance.num_stages * instance.num_microbatches,
    }
    Derivation(numbers=known).compare(witness)
    if whole and problem.sends.holds_rank:
        clock = Clock.of(problem)
    if not whole:
        instance = instance.relaxed()
    if solver.limit > 0 and 3 * instance.num_stages * instance.num_microbatches <= _MOST_ACTIONS:
        shorter = refute(instance, solver.target, time_limit_s=solver.limit, clock=clock)
    if shorter is False:
        raise refuse("the solver finds an order below the bound", f"none below {solver.target} ns")
    if shorter:
        out.add(f"CP-SAT: the exact model has no order below {solver.target:,} ns", solver.target)
        return solver.target
    return _without_solver(problem, out, solver)


def _crossing(problem: Problem, witness: Witness, out: Derivation, solver: _Solver) -> int:
    """Prove a crossing bound of one rank or of the chain: ask its model, on its grid, for less."""
    from zbcompile.planner.exact.crossing import crossing_bound

    instance, facts = Instance.of(problem).relaxed(), Facts(problem)
    rank = None if witness.get("rank", 0) is None else rank_of(facts, witness)
    grid = witness.get("grid")
    if not is_chain(instance):
        raise refuse("the crossing bound is for a chain with one stage per rank")
    if (
        not isinstance(grid, (list, tuple))
        or len(grid) != 2
        or not all(type(n) is int and n > 0 for n in grid)
    ):
        raise refuse("the witness's grid is no pair of positive whole numbers", given=grid)
    head = facts.head(rank) if problem.objective == "makespan" and rank is not None else 0
    beside = Derivation(out.lines)
    once = add_once_a_step(problem, "crossing", beside)
    wanted = solver.target - head - once
    if wanted * grid[1] > _MOST_UNITS * grid[0]:
        raise refuse("the witness's grid is too fine", f"at most {_MOST_UNITS} units", grid)
    known: dict[str, object] = {"solver": "CP-SAT", "rank": rank, "head_ns": head, "grid": grid}
    known |= beside.numbers
    known["units"] = _units(witness.get("units"), wanted, Fraction(grid[0], grid[1]))
    Derivation(numbers=known).compare(witness)
    if solver.limit <= 0:
        return _without_solver(problem, out, solver)
    found = crossing_bound(
        instance, rank, Fraction(grid[0], grid[1]), upper_ns=max(1, wanted), time_limit_s=solver.limit
    )
    if found.value_ns < wanted:
        if found.closed:
            raise refuse(
                "the crossing model has a shorter order than the bound",
                solver.target,
                found.value_ns + head + once,
            )
        return _without_solver(problem, out, solver)
    if head:
        out.add(f"F's before the first F of rank {rank}", head)
    scale = f"{grid[0]}/{grid[1]}" if grid[1] != 1 else f"{grid[0]}"
    who = "the chain" if rank is None else f"rank {rank}"
    out.add(f"CP-SAT: times in units of {scale} ns, {who} takes no less than {wanted:,} ns", wanted)
    return solver.target


def _units(given: object, wanted: int, grid: Fraction) -> int:
    """Return the units of a grid that make up a bound, those given if they do: whole ns are rounded up."""
    if type(given) is int and (given - 1) * grid < wanted <= math.ceil(given * grid):
        return given
    return math.ceil(wanted / grid)


def _without_solver(problem: Problem, out: Derivation, solver: _Solver) -> int:
    """Return what holds where the solver did not finish: the best bound that can be summed by hand."""
    solver.out_of_time = True
    simple = best_bound(problem)
    return _derive(problem, simple.method, simple.witness, out, solver, None)
