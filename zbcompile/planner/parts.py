"""The three kinds of parts that a portfolio is made of, and the loop that runs them.

A part is a small frozen object with a name. A `Start` proposes orders from nothing (or from a plan for
another problem), an `Improve` makes orders from orders, a `Prove` raises the bound and may find orders on the
way. Each yields what it finds as it finds it: the loop offers every order before the part goes on, so that a
part sees at once that the search has ended, and Ctrl-C loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import PartRun, Run
from zbcompile.schedule.problem import Problem

__all__ = ["AnalyticBound", "Improve", "Part", "Prove", "Start", "planned", "search"]


class _Named(Protocol):
    """What every part has.

    Attributes
    ----------
    name
        How lineages and ``plan(without=...)`` call it: one word, unique in the portfolio.
    """

    @property
    def name(self) -> str: ...

    def applies(self, run: Run) -> bool:
        """Return whether the part can do anything for the problem now."""


@runtime_checkable
class Start(_Named, Protocol):
    """Makes orders from nothing.

    Attributes
    ----------
    instant
        Whether it takes a moment only: it runs even where the time is over.
    """

    @property
    def instant(self) -> bool: ...

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield orders; those with a score join the pool."""


@runtime_checkable
class Improve(_Named, Protocol):
    """Makes orders from the best one, or from those of the pool."""

    def improve(self, run: Run) -> Iterator[Order]:
        """Yield orders; those with a score join the pool."""


@runtime_checkable
class Prove(_Named, Protocol):
    """Raises the bound."""

    def share(self, run: Run) -> float:
        """Return which share of the run's nominal seconds improving should leave for it."""

    def prove(self, run: Run) -> Iterator[Bound | Order]:
        """Yield bounds, and orders found on the way."""


Part = Start | Improve | Prove


@dataclass(frozen=True, slots=True)
class AnalyticBound:
    """A `Prove` for a bound that needs no solver and no order.

    Attributes
    ----------
    name
        Its name.
    of
        Returns the bound of a problem, or ``None`` where it says nothing.
    where
        Returns whether it applies to a run.
    """

    name: str
    of: Callable[[Problem], Bound | None]
    where: Callable[[Run], bool]

    def applies(self, run: Run) -> bool:
        """Return whether the bound says anything."""
        return self.where(run)

    def share(self, run: Run) -> float:
        """Return 0: it takes a moment."""
        return 0.0

    def prove(self, run: Run) -> Iterator[Bound | Order]:
        """Yield the bound."""
        bound = self.of(run.problem)
        if bound is not None:
            yield bound


def search(run: Run, parts: Sequence[Part]) -> None:
    """Run the parts, one after the other, until the best order meets the bound or the time is over."""
    chosen = [part for part in parts if part.name not in run.options.without]
    shares = [part.share(run) for part in chosen if isinstance(part, Prove)]
    run.reserve_s = run.nominal_s * max(shares, default=0.0)
    for part in chosen:
        if run.proved:
            return
        hurried = isinstance(part, Start) and part.instant
        if (hurried or not run.done) and part.applies(run):
            _perform(part, run)


def planned(inner: Run, parts: Sequence[Part]) -> Iterator[Order]:
    """Run the parts on a problem inside another plan and yield the orders known then, best first.

    Ctrl-C is passed on after the orders.
    """
    try:
        search(inner, parts)
    except KeyboardInterrupt:
        yield from [order for _, order in inner.known]
        raise
    yield from [order for _, order in inner.known]


def _perform(part: Part, run: Run) -> None:
    """Run one part, offer what it finds, and tell what it did."""
    began, began_cpu = time.monotonic(), time.process_time()
    inner, before = run.inner_cpu_s, _state(run)
    run.read.clear()
    scored: list[Order] = []
    for found in _results(part, run):
        if isinstance(found, Bound):
            run.incumbent.raise_bound(found)
            continue
        if found.score is not None:
            _ = run.pool  # as it was before this part
            scored.append(found)
        if found.folded is not None:
            run.folded.append(found)
        taken = run.incumbent.offer(found)
        if not taken and isinstance(part, Improve):
            run.incumbent.report(part.name)
    read = frozenset(run.read)
    if scored:
        run.join(scored)
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    if run.inside is not None:
        run.inside.inner_cpu_s += cpu_s
    if run.options.trace is not None:
        after = _state(run)
        changed = frozenset(key for key, value in after.items() if value != before[key])
        own = cpu_s - (run.inner_cpu_s - inner)
        run.options.trace(PartRun(part.name, run.depth, wall_s, own, changed, read))


def _results(part: Part, run: Run) -> Iterator[Bound | Order]:
    if isinstance(part, Start):
        yield from part.propose(run)
    elif isinstance(part, Improve):
        yield from part.improve(run)
    else:
        yield from part.prove(run)


def _state(run: Run) -> dict[str, object]:
    """Return what a part may change and a later one may read."""
    return {
        "best": run.incumbent.order,
        "bound": run.bound,
        "known": list(run.incumbent.known),
        "pool": run.pool_changes,
        "folded": len(run.folded),
    }
