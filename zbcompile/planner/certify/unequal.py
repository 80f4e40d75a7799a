"""The second derivation of the bounds where microbatches differ in cost.

The arguments are those of `zbcompile.planner.bounds.unequal`; paths and sums are computed here anew. What a
microbatch costs is part of the problem (`Problem.one`) and not of a bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zbcompile.planner.certify.derive import derivations
from zbcompile.planner.certify.facts import (
    OUTERMOST,
    Derivation,
    Facts,
    Inner,
    Witness,
    number,
    rank_of,
    refuse,
)
from zbcompile.planner.certify.once_a_step import add_once_a_step
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.problem import Problem

__all__ = ["derive_unequal"]


def derive_unequal(
    problem: Problem,
    method: str,
    witness: Witness,
    out: Derivation,
    inner: Inner,
) -> int:
    """Derive a bound of a problem whose microbatches differ, and return its value.

    Parameters
    ----------
    inner
        Derives a bound of a problem whose microbatches are alike.

    Raises
    ------
    CheckError
        The method proves nothing where microbatches differ, or the witness does not follow.
    """
    if method == "least_microbatch":
        of, inside = witness.get("of"), witness.get("witness")
        if not isinstance(of, str) or not isinstance(inside, Mapping) or len(witness) != 2:
            raise refuse("the witness of the least microbatch has no bound in it", given=of)
        if of in OUTERMOST:
            raise refuse("a bound of the least microbatch has no usable method", given=of)
        out.note("every microbatch with the least of each cost that any of them has:")
        return inner(_least(problem), of, inside)
    part = Derivation(out.lines)
    if method == "microbatch_work":
        _work(problem, witness, part)
    elif method == "longest_microbatch" and problem.objective == "makespan":
        _longest(problem, witness, part)
    else:
        raise refuse(f"{method[:40]!r} proves nothing where microbatches differ in cost")
    add_once_a_step(problem, method, part)
    part.compare(witness)
    return part.total


def _work(problem: Problem, witness: Witness, out: Derivation) -> None:
    """Add the head of a rank at least costs, for the makespan, and every microbatch's own work."""
    facts = Facts(_least(problem))
    rank, head, work = rank_of(facts, witness), 0, 0
    stages = problem.placement.stages_of(rank)
    if problem.objective == "makespan":
        head = min(facts.head(s) for s in stages)
        out.add(f"F's before the first action of rank {rank}, at the least costs", head)
    for i in range(problem.num_microbatches):
        own = Facts(problem.one(i))
        work += sum(own.f[s] + own.b[s] + own.w[s] for s in stages)
    out.add(f"work of rank {rank}, each microbatch at its own costs", work)
    out.numbers.update(rank=rank, head_ns=head, work_ns=work)


def _longest(problem: Problem, witness: Witness, out: Derivation) -> None:
    """Add the longest path of one microbatch at its own costs."""
    i = number(witness, "microbatch", problem.num_microbatches - 1)
    out.note(f"microbatch {i} alone:")
    derivations("makespan")["one_microbatch"](Facts(problem.one(i)), {}, out)
    out.numbers["microbatch"] = i


def _least(problem: Problem) -> Problem:
    """Return the problem whose microbatches all have the least of each cost.

    Notes
    -----
    `Problem.alike` does the same for the search. The two stay apart on purpose.
    """
    profiles: list[Profile] = [problem.one(i).profile for i in range(problem.num_microbatches)]
    stages = []
    for s, stage in enumerate(problem.profile.stages):
        ways = [profile.stages[s] for profile in profiles]
        stages.append(
            replace(
                stage,
                forward_ns=min(way.forward_ns for way in ways),
                backward_input_ns=min(way.backward_input_ns for way in ways),
                backward_weight_ns=min(way.backward_weight_ns for way in ways),
                full_backward_ns=min(way.full_backward_ns for way in ways),
                saved_bytes=min(way.saved_bytes for way in ways),
                saved_for_weight_bytes=min(way.saved_for_weight_bytes for way in ways),
            )
        )
    edges = []
    for k, edge in enumerate(problem.profile.edges):
        forward = min(profile.edges[k].forward_bytes for profile in profiles)
        backward = min(profile.edges[k].backward_bytes for profile in profiles)
        edges.append(replace(edge, forward_bytes=forward, backward_bytes=backward))
    profile = replace(problem.profile, stages=tuple(stages), edges=tuple(edges))
    return problem.with_(profile=profile, microbatch_costs=())
