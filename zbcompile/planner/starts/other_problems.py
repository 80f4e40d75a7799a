"""Starts from plans of other problems: shorter, or with another send mode.

Of a plan for few microbatches the middle is repeated. A plan for another send mode is taken as it is: it may
hang here, or take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zbcompile.planner.incumbent import Order
from zbcompile.planner.parts import Part, planned
from zbcompile.planner.run import Effort, Run
from zbcompile.planner.starts.stretch import stretch

__all__ = ["OtherMode", "Short", "is_long"]

_LONG = 2500
"""Actions beyond which several stages per rank are planned short first."""

_BLOCKS = 12
"""The microbatches to repeat are a multiple of this, so that blocks of 1, 2, 3, 4, 6 and 12 will do."""


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
        effort = replace(Effort.of(problem, max(1, run.level // 2)), list_schedules=120)
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

    Its orders are taken as they are: they may hang here, or take longer.

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
        """Yield what is known or in the pool after a third of the time left."""
        other = run.problem.sends.starts_as
        assert other is not None
        problem = run.problem.with_(transport=other.name)
        inner = run.inner(problem, run.seconds_left / 3)
        for order in planned(inner, self.parts()):
            yield order.then(self.name, order.codes)
        for order in () if inner.holds_rank else inner.pool:
            yield order.then(self.name, order.codes)
