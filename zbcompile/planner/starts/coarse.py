"""Orders of the coarsened problem: neighbouring stages of a rank planned as one and taken apart again.

A rank's stages in a row run their F's one after the other, their B's in reverse and their W's in reverse. So
an order of the coarsened problem, with one stage per rank, becomes an order of the problem itself::

    F B W  -->  F0 F1 B1 B0 W1 W0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zbcompile.planner.core.instance import Codes, F
from zbcompile.planner.incumbent import Order
from zbcompile.planner.parts import Part, planned
from zbcompile.planner.run import Run
from zbcompile.schedule.coarsen import coarsened
from zbcompile.schedule.problem import Problem

__all__ = ["Coarse", "coarse_problem", "taken_apart"]


@dataclass(frozen=True, slots=True)
class Coarse:
    """A plan of the coarsened problem, taken apart.

    Attributes
    ----------
    parts
        What plans the coarsened problem.
    """

    parts: tuple[Part, ...]
    name: str = "coarse"
    instant: bool = False

    def applies(self, run: Run) -> bool:
        """Return whether some rank has several stages, neighbours all of them."""
        return coarse_problem(run.problem) is not None

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield every order of the coarsened problem that is known after a third of the time left."""
        coarse = coarse_problem(run.problem)
        assert coarse is not None
        effort = replace(run.effort, list_schedules=run.effort.coarse_list_schedules)
        inner = run.inner(coarse, run.seconds_left / 3, effort)
        for order in planned(inner, self.parts):
            yield order.then(self.name, taken_apart(order.codes, run.problem))


def coarse_problem(problem: Problem) -> Problem | None:
    """Return the problem with each rank's stages joined into one.

    Returns
    -------
    Problem or None
        ``None`` if every rank has one stage already, if a rank's stages are not neighbours, or if the stages
        are not a plain chain.
    """
    rank_of, edges = problem.placement.rank_of, problem.profile.edges
    if list(rank_of) != sorted(rank_of) or len(rank_of) == problem.num_ranks:
        return None
    chain = all(e.target == e.source + 1 and e.has_gradient for e in edges)
    if not chain or len(edges) != len(rank_of) - 1:
        return None
    return coarsened(problem, problem.placement)


def taken_apart(codes: Codes, problem: Problem) -> Codes:
    """Return an order of the coarsened problem as one of ``problem`` itself."""
    result: Codes = []
    for rank, row in enumerate(codes):
        stages = problem.placement.stages_of(rank)
        result.append([(kind, s) for kind, _ in row for s in (stages if kind == F else stages[::-1])])
    return result
