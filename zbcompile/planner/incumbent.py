"""What planning knows so far: the best order, the best bound, and how much time is left."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass

from zbcompile.errors import NoOrderError
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.instance import Codes, Fusing, Instance, shaped, to_schedule
from zbcompile.planner.core.score import fits, value_of
from zbcompile.planner.core.times import Clock
from zbcompile.schedule.check import check
from zbcompile.schedule.dependency_graph import planned_rules
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Certificate, Solution

__all__ = ["Incumbent", "PlanState", "Progress"]


class PlanState(enum.Enum):
    """Whether a search goes on or was ended by the user."""

    SEARCHING = "searching"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Progress:
    """One report of progress.

    Attributes
    ----------
    best_ns
        Value of the best order so far, ``None`` if there is none.
    bound_ns
        The best bound so far.
    seconds
        Time since the start.
    step
        What was done, for people.
    state
        Whether the search goes on.
    """

    best_ns: int | None
    bound_ns: int
    seconds: float
    step: str
    state: PlanState = PlanState.SEARCHING

    @property
    def interrupted(self) -> bool:
        """Whether the user ended the search."""
        return self.state is PlanState.INTERRUPTED


class Incumbent:
    """The best order of one problem and the best bound: orders are offered, bounds raised.

    Parameters
    ----------
    problem
        The problem.
    bound
        A first bound.
    time_limit_s
        Seconds until the search has to end.
    observer
        Called with a `Progress` at every better order or bound.
    fusing
        Which backwards orders fuse: every order offered is brought into that shape.

    Attributes
    ----------
    problem, instance, clock
        The problem, the same as plain tuples, and what times its orders.
    bound
        The best bound.
    codes, value, origin
        The best order, its value in ns and how it was found; ``None`` and empty before the first order.
    pool
        Up to twelve (value, order) of different values, best first.
    """

    def __init__(
        self,
        problem: Problem,
        bound: Bound,
        *,
        time_limit_s: float,
        observer: Callable[[Progress], None] | None = None,
        fusing: Fusing = Fusing.AUTO,
    ) -> None:
        self.problem, self.bound = problem, bound
        self.instance = Instance.under(problem, planned_rules(problem))
        self.started = time.monotonic()
        self.deadline = self.started + time_limit_s
        self.observer = observer
        self.clock, self.fusing = Clock.of(problem), fusing
        self.codes: Codes | None = None
        self.pool: list[tuple[int, Codes]] = []
        self.value: int | None = None
        self.origin = ""

    @property
    def done(self) -> bool:
        """Whether the best order meets the bound, or there is an order and the time is over."""
        return self.proved or (self.value is not None and self.seconds_left <= 0)

    @property
    def proved(self) -> bool:
        """Whether the best order meets the bound."""
        return self.value is not None and self.value <= self.bound.value_ns

    @property
    def seconds_left(self) -> float:
        """Time until the limit in seconds."""
        return self.deadline - time.monotonic()

    def measure(self, codes: Codes) -> int | None:
        """Return the value of an order in ns under the problem's send mode, or ``None`` on deadlock."""
        if self.problem.sends.holds_rank:
            return self.clock.value(codes)
        return value_of(self.instance, codes)

    def offer(self, codes: Codes | None, origin: str) -> bool:
        """Take an order if it fits and is shorter than the best.

        Parameters
        ----------
        codes
            The order; ``None`` is never taken.
        origin
            How it was found, for people and files.

        Returns
        -------
        bool
            Whether it was taken.
        """
        given = codes
        codes = None if given is None else shaped(given, self.fusing)
        if codes is None or not fits(self.instance, codes):
            return False
        value = self.measure(codes)
        if value is None:
            return False
        if all(value != known for known, _ in self.pool):
            self.pool = sorted([*self.pool, (value, codes)], key=lambda entry: entry[0])[:12]
        if self.value is not None and value >= self.value:
            return False
        if codes != given:
            origin += ", split" if self.fusing is Fusing.NEVER else ", fused"
        self.codes, self.value, self.origin = codes, value, origin
        self.report(origin)
        return True

    def raise_bound(self, bound: Bound) -> None:
        """Keep the better of two bounds."""
        if bound.value_ns > self.bound.value_ns:
            self.bound = bound
            self.report(bound.method)

    def report(self, step: str, state: PlanState = PlanState.SEARCHING) -> None:
        """Tell the observer how far the search is."""
        if self.observer is not None:
            seconds = time.monotonic() - self.started
            self.observer(Progress(self.value, self.bound.value_ns, seconds, step, state))

    def interrupt(self) -> None:
        """Tell the observer that the user ended the search."""
        self.report("interrupted", PlanState.INTERRUPTED)

    def schedule(self) -> Schedule:
        """Return the best order with numbered microbatches. Raises `NoOrderError` if there is none."""
        if self.codes is None:
            raise NoOrderError("no order was found in the time given", fix="raise the time limit")
        return to_schedule(self.codes, self.problem)

    def solution(self) -> Solution:
        """Have the best order judged by `check`, and certify it.

        Its value was measured by the fast clocks, which equal `zbcompile.schedule.simulate` by test. Raises
        `NoOrderError` if there is no order.
        """
        schedule, value = self.schedule(), self.value
        assert value is not None
        check(schedule, self.problem)
        certificate = Certificate(
            self.problem.objective, value, self.bound.value_ns, self.bound.method, self.bound.witness
        )
        return Solution(self.problem, schedule, certificate, origin=self.origin)
