"""Starts from plans of other problems: coarser, shorter, or with another send mode.

A rank's stages in a row run their F's one after the other, their B's in reverse and their W's in reverse. So
an order of the coarsened problem, with one stage per rank, becomes an order of the problem itself::

    F B W  -->  F0 F1 B1 B0 W1 W0

Of a plan for few microbatches the middle is repeated. A plan for another send mode is taken as it is, which
may hang here or take longer, and dispatched anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zbcompile.planner.core.instance import Codes, F
from zbcompile.planner.incumbent import Order
from zbcompile.planner.parts import Part, planned
from zbcompile.planner.run import Effort, Run
from zbcompile.planner.starts.held_dispatch import dispatched_anew
from zbcompile.planner.starts.stretch import stretch
from zbcompile.schedule.coarsen import coarsened
from zbcompile.schedule.problem import Problem

__all__ = ["Coarse", "OtherMode", "Short", "coarse_problem", "is_long", "taken_apart"]

_LONG = 2500
"""Actions beyond which several stages per rank are planned short first."""

_BLOCKS = 12
"""The microbatches to repeat are a multiple of this, so that blocks of 1, 2, 3, 4, 6 and 12 will do."""

_MOST_STEPS = 50_000
"""Most actions times ranks that are dispatched: a quarter of a second each time."""

_BASES = 2
"""Orders whose times become keys."""


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


def is_long(run: Run) -> bool:
    """Return whether the problem is so long that it is planned short first."""
    return run.actions > _LONG and run.several


def _count(run: Run) -> int:
    """Return how many microbatches the short problem has: about 3 p."""
    p, m = run.instance.num_ranks, run.instance.num_microbatches
    return 3 * p + (m - 3 * p) % _BLOCKS


@dataclass(frozen=True, slots=True)
class Short:
    """A plan of about 3 p microbatches: a block of its middle is repeated, or one is made for it.

    Attributes
    ----------
    parts
        What plans the short problem.
    """

    parts: tuple[Part, ...]
    name: str = "short"
    instant: bool = False

    def applies(self, run: Run) -> bool:
        """Return whether the problem is long, and no send holds up its rank."""
        return not run.holds_rank and is_long(run) and _count(run) < run.instance.num_microbatches

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield the orders with a middle that repeats, grown, then the best two others stretched."""
        count, m = _count(run), run.instance.num_microbatches
        problem = run.problem.with_(num_microbatches=count)
        effort = replace(Effort.of(problem, max(1, run.level // 2)), rounds=0)
        inner = run.inner(problem, max(0.0, run.seconds_left * 0.6), effort)
        found = list(planned(inner, self.parts))
        for order in inner.folded:
            assert order.folded is not None
            codes = order.folded.grown(m)
            if codes is not None:
                yield order.then(self.name, codes)
        for order in found[:2]:
            for codes in stretch(run.instance, order.codes, count, run.scorer, run.over):
                yield order.then(self.name, codes)


@dataclass(frozen=True, slots=True)
class OtherMode:
    """A plan for the mode that `zbcompile.schedule.semantics.SendMode.starts_as` names.

    Its orders are taken as they are, which may hang here or take longer, and dispatched anew as this mode
    holds ranks.

    Attributes
    ----------
    parts
        Returns what plans for that mode.
    """

    parts: Callable[[], tuple[Part, ...]]
    name: str = "other_mode"
    instant: bool = False

    def applies(self, run: Run) -> bool:
        """Return whether there is such a mode, and some rank has several stages."""
        problem = run.problem
        return problem.sends.starts_as is not None and problem.num_stages != problem.num_ranks

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield what is known or in the pool after a third of the time left, then orders dispatched anew."""
        other = run.problem.sends.starts_as
        assert other is not None
        problem = run.problem.with_(transport=other.name)
        inner = run.inner(problem, run.seconds_left / 3)
        orders = list(planned(inner, self.parts()))
        for order in (*orders, *(() if inner.holds_rank else inner.pool)):
            yield order.then(self.name, order.codes)
        if run.actions * run.instance.num_ranks > _MOST_STEPS:
            return
        for k, order in enumerate(orders[:_BASES]):
            yield from dispatched_anew(run, problem, order, random.Random(run.seed + k), self.name)
