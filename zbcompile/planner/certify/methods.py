"""Deriving a bound again by the name of its method."""

from __future__ import annotations

from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.bounds.blocking_send import instant_links
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.certify.cuts import cuts_bound
from zbcompile.planner.certify.derive import derivations
from zbcompile.planner.certify.facts import OUTERMOST, Derivation, Facts, Inner, Witness, alike, refuse
from zbcompile.planner.certify.once_a_step import add_once_a_step
from zbcompile.planner.certify.solver_bounds import Solver, derive_crossing, derive_exact
from zbcompile.planner.certify.unequal import derive_unequal
from zbcompile.planner.certify.variants import derive_variants
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Solution

__all__ = ["derive", "rederived"]


def derive(
    problem: Problem,
    method: str,
    witness: Witness,
    out: Derivation,
    solver: Solver,
    solution: Solution | None = None,
) -> int:
    """Derive a bound by its method and return its value.

    ``solution`` is given at the outermost level only.

    Raises
    ------
    CheckError
        The bound does not follow from its witness.
    """

    def inner(other: Problem, name: str, inside: Witness) -> int:
        return derive(other, name, inside, out, solver)

    if problem.microbatch_costs and method != "variants":
        return derive_unequal(problem, method, witness, out, inner)
    simple = derivations(problem.objective).get(method)
    if simple is not None:
        part = Derivation(out.lines)
        simple(Facts(problem), witness, part)
        add_once_a_step(problem, method, part)
        part.compare(witness)
        return part.total
    if method == "blocking_send":
        return _blocking_send(problem, witness, out, inner)
    if method == "variants":
        if solution is None or solution.offered is None:
            raise refuse("variants inside another bound")
        return derive_variants(problem, solution.offered, witness, out, inner)
    if method == "cuts":
        if solution is None or solution.cuts is None:
            raise refuse("the solution does not say how its stages were cut", "its pieces and cuts")
        return cuts_bound(problem, solution.cuts, witness, solver.target, out)
    if method not in ("cp_sat", "crossing"):
        raise refuse(f"unknown method {method[:40]!r} for the {problem.objective}")
    ask = derive_exact if method == "cp_sat" else derive_crossing
    proved = ask(problem, witness, out, solver)
    if proved is not None:
        return proved
    solver.out_of_time = True
    simple_bound = best_bound(problem)  # what can be summed by hand
    return inner(problem, simple_bound.method, simple_bound.witness)


def rederived(problem: Problem, bound: Bound) -> int:
    """Return the value of a bound that needs no solver, variants or cuts, as derived here.

    Raises
    ------
    CheckError
        It does not follow from its witness.
    """
    return derive(problem, bound.method, bound.witness, Derivation(), Solver(bound.value_ns, 0.0))


def _blocking_send(problem: Problem, witness: Witness, out: Derivation, inner: Inner) -> int:
    """Derive a blocking-send bound: travel times belong to F and B, less one last message."""
    pair, method = instant_links(problem), witness.get("of")
    if pair is None or not isinstance(method, str) or method in ("blocking_send", *OUTERMOST):
        raise refuse("sends hold up nobody here", given=method)
    instant, last_message_ns = pair
    out.note(
        f"{problem.transport}: every F and B counts with the shortest travel time of what it sends, its links"
        " without it"
    )
    given = witness.get("last_message_ns", last_message_ns)
    if not alike(given, last_message_ns):
        raise refuse("last_message_ns of the witness is not what follows", last_message_ns, given)
    inside = {name: value for name, value in witness.items() if name not in ("of", "last_message_ns")}
    total = inner(instant, method, inside)
    out.add("a last message that nobody waits for", -last_message_ns)
    return max(0, total - last_message_ns)
