"""A plan as if no send held up its rank, for send modes where sends do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zbcompile.planner.incumbent import Order
from zbcompile.planner.parts import Part, planned
from zbcompile.planner.run import Run

__all__ = ["AsAsync"]


@dataclass(frozen=True, slots=True)
class AsAsync:
    """A plan for ``async``, for ``rendezvous`` with several stages per rank.

    Under ``batched`` such orders deadlock or are longer than what the same time finds otherwise.

    Attributes
    ----------
    parts
        Returns what plans for ``async``.
    """

    parts: Callable[[], tuple[Part, ...]]
    name: str = "as_async"
    instant: bool = False

    def applies(self, run: Run) -> bool:
        """Return whether sends wait for their receivers and some rank has several stages."""
        problem = run.problem
        return problem.transport == "rendezvous" and problem.num_stages != problem.num_ranks

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield every order that is known after half of the time left."""
        inner = run.inner(run.problem.with_(transport="async"), run.seconds_left / 2)
        for order in planned(inner, self.parts()):
            yield order.then(self.name, order.codes)
