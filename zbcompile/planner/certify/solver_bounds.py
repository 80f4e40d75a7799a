"""The second derivation of bounds that a solver proved: it is asked again for an order below them."""

from __future__ import annotations

import math
from fractions import Fraction

from zbcompile.planner.certify.facts import Derivation, Facts, Witness, rank_of, refuse
from zbcompile.planner.certify.once_a_step import add_once_a_step
from zbcompile.planner.core.instance import Instance, is_chain
from zbcompile.planner.core.times import Clock
from zbcompile.schedule.problem import Problem

__all__ = ["Solver", "derive_crossing", "derive_exact"]

_MOST_ACTIONS = 7000
"""Largest step for which the exact model is built again."""

_MOST_UNITS = 2**53
"""Most units of a grid in a bound: whole numbers that the solver can add up."""


class Solver:
    """Time for bounds that a solver proved, and whether it was enough.

    Attributes
    ----------
    target
        The bound to be proved, in ns.
    limit
        Seconds for it.
    out_of_time
        Whether they were too few.
    """

    def __init__(self, target_ns: int, time_limit_s: float) -> None:
        self.target, self.limit = target_ns, time_limit_s
        self.out_of_time = False


def derive_exact(problem: Problem, witness: Witness, out: Derivation, solver: Solver) -> int | None:
    """Prove a bound of the exact model: ask for anything shorter, and fail. ``None`` where time ran out."""
    from zbcompile.planner.exact.model import refute
    from zbcompile.planner.exact.reach import MODELS, can_model, split_is_exact

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
    return None


def derive_crossing(problem: Problem, witness: Witness, out: Derivation, solver: Solver) -> int | None:
    """Prove a crossing bound of one rank or of the chain: ask its model, on its grid, for less.

    ``None`` where time ran out.
    """
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
        return None
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
        return None
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
