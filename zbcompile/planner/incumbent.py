"""What planning knows so far: the best order, the best bound, and how much time is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from zbcompile.errors import NoOrderError
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.instance import Codes, Instance, shaped, to_schedule
from zbcompile.planner.core.score import fits, value_of
from zbcompile.planner.core.times import Clock
from zbcompile.schedule.check import check
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Certificate, Solution

__all__ = ["Incumbent", "Progress"]


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of progress: best value (``None``: no order yet), bound, seconds since the start, step."""

    best_ns: int | None
    bound_ns: int
    seconds: float
    step: str


class Incumbent:
    """The best order of one problem and the best bound; orders are offered, bounds raised."""

    def __init__(
        self,
        problem: Problem,
        bound: Bound,
        *,
        time_limit_s: float,
        observer: Callable[[Progress], None] | None = None,
        started: float | None = None,
        fuse: str = "auto",
    ) -> None:
        self.problem, self.instance, self.bound = problem, Instance.of(problem), bound
        self.started = time.monotonic() if started is None else started
        self.deadline = self.started + time_limit_s
        self.observer = observer
        self.clock, self.fuse = Clock.of(problem), fuse
        self.codes: Codes | None = None
        self.pool: list[tuple[int, Codes]] = []
        self.value: int | None = None
        self.origin = ""

    @property
    def done(self) -> bool:
        """True when the best order meets the bound or the time is over."""
        return self.proved or (self.value is not None and self.seconds_left <= 0)

    @property
    def proved(self) -> bool:
        """True when the best order meets the bound."""
        return self.value is not None and self.value <= self.bound.value_ns

    @property
    def seconds_left(self) -> float:
        """Time until the limit."""
        return self.deadline - time.monotonic()

    def measure(self, codes: Codes) -> int | None:
        """Value of an order under the problem's transport; ``None`` on deadlock."""
        if self.problem.transport == "async":
            return value_of(self.instance, codes)
        return self.clock.value(codes)

    def offer(self, codes: Codes | None, origin: str) -> bool:
        """Take an order, split or fused as asked for, if it fits and is shorter. True if taken."""
        codes = None if codes is None else shaped(codes, self.fuse)
        if codes is None or not fits(self.instance, codes):
            return False
        value = self.measure(codes)
        if value is None:
            return False
        if all(value != known for known, _ in self.pool):
            self.pool = sorted([*self.pool, (value, codes)], key=lambda entry: entry[0])[:12]
        if self.value is not None and value >= self.value:
            return False
        self.codes, self.value, self.origin = codes, value, origin
        self.report(origin)
        return True

    def raise_bound(self, bound: Bound) -> None:
        """Keep the better bound."""
        if bound.value_ns > self.bound.value_ns:
            self.bound = bound
            self.report(bound.method)

    def report(self, step: str) -> None:
        """Tell the observer."""
        if self.observer is not None:
            seconds = time.monotonic() - self.started
            self.observer(Progress(self.value, self.bound.value_ns, seconds, step))

    def schedule(self) -> Schedule:
        """The best order with numbered microbatches."""
        if self.codes is None:
            raise NoOrderError("no order was found in the time given", fix="raise the time limit")
        return to_schedule(self.codes, self.problem)

    def solution(self, variants: tuple[int, ...] = ()) -> Solution:
        """Have the best order judged by `check`, and certify it.

        Its value was measured by the fast clocks, which equal `zbcompile.schedule.simulate` by test.
        """
        schedule, value = self.schedule(), self.value
        assert value is not None
        check(schedule, self.problem)
        certificate = Certificate(
            self.problem.objective, value, self.bound.value_ns, self.bound.method, self.bound.witness
        )
        return Solution(self.problem, schedule, certificate, variants, self.origin)
