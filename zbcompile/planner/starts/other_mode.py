"""A plan for another send mode, where that is a good start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zbcompile.planner.incumbent import Order
from zbcompile.planner.parts import Part, planned
from zbcompile.planner.run import Run

__all__ = ["OtherMode"]


@dataclass(frozen=True, slots=True)
class OtherMode:
    """A plan for the mode that `zbcompile.schedule.semantics.SendMode.starts_as` names.

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
        """Yield every order that is known after half of the time left."""
        other = run.problem.sends.starts_as
        assert other is not None
        inner = run.inner(run.problem.with_(transport=other.name), run.seconds_left / 2)
        for order in planned(inner, self.parts()):
            yield order.then(self.name, order.codes)
