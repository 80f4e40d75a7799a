"""A plan for few microbatches whose middle is repeated, for long problems with several stages per rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zbcompile.planner.incumbent import Order
from zbcompile.planner.parts import Part, planned
from zbcompile.planner.run import Effort, Run
from zbcompile.planner.starts.stretch import stretch

__all__ = ["Short", "is_long"]

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
