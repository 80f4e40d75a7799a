"""Checking a certificate without trusting who wrote it.

The order is judged by `zbcompile.schedule.check` and its value by `simulate`. The bound is derived again from
the problem's own numbers: sums of paths, windows and work by `zbcompile.planner.certify.derive`, bounds that
a solver proved by asking it for an order shorter than the bound. Every number of the witness must be the one
that is derived here, so that whoever adds them up by hand comes to the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbcompile.errors import CheckError, UsageError
from zbcompile.planner.certify.cuts import check_cuts
from zbcompile.planner.certify.facts import Derivation, refuse
from zbcompile.planner.certify.methods import derive
from zbcompile.planner.certify.solver_bounds import Solver
from zbcompile.schedule.check import check
from zbcompile.schedule.held_gradients import gradients_words
from zbcompile.schedule.renumber import Numbering
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Solution

__all__ = ["Verified", "explain", "verify", "verify_certificate"]


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


def _derive_numbered(solution: Solution, time_limit_s: float) -> tuple[Derivation, Solver, int]:
    """Derive a solution's bound with its ranks numbered by their first stages, as planning numbers them.

    A witness that needs them as they are holds as well.
    """
    numbering = Numbering.by_first_stage(solution.problem.placement)
    given = [numbering.of_solution(solution), *(() if numbering.is_same else (solution,))]
    faults: list[CheckError] = []
    for here in given:
        out, solver = Derivation(), Solver(here.certificate.bound_ns, time_limit_s)
        if here is not solution and not numbering.is_same:
            out.note(numbering.words)
        try:
            total = derive(here.problem, here.certificate.method, here.certificate.witness, out, solver, here)
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
