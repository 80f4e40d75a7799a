"""What planning knows so far: the best order, the best bound, and how much time is left."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from zbcompile.errors import NoOrderError
from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.compiled import SearchClock
from zbcompile.planner.core.early_reductions import with_early_reductions
from zbcompile.planner.core.early_weights import fitted, with_fewest_waits
from zbcompile.planner.core.instance import Codes, Fusing, Instance, shaped, to_schedule
from zbcompile.planner.core.score import fits, value_of
from zbcompile.planner.core.scorer import Score, Scorer
from zbcompile.planner.core.times import Clock
from zbcompile.schedule.check import check
from zbcompile.schedule.dependency_graph import planned_rules
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Certificate, Solution

__all__ = ["Growable", "Incumbent", "Order", "PlanState", "Progress", "extended"]


EARLY_REDUCTIONS = "early_reductions"
"""In lineages: W's of one stage of a rank were moved first, so that its reduction is hidden."""

SUM_ORDER = "sum_order"
"""In lineages: W's were moved so that gradients come in the order of their sum."""


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


class Growable(Protocol):
    """An order whose middle repeats, so that it can be made for more microbatches."""

    def grown(self, count: int) -> Codes | None:
        """Return the order for ``count`` microbatches, or ``None`` if whole blocks do not make them up."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order and how it came to be.

    Attributes
    ----------
    codes
        The order.
    lineage
        The parts of the portfolio that made it, the first from nothing, the others from the one before. An
        entry is a part's name, and a remark after a blank where the part makes several kinds of orders
        (``classic ZB-H1``). ``fused`` or ``split`` at the end: the choice of fusing gave it another shape;
        ``sum_order``: W's were moved so that gradients come in the order of their sum; ``early_reductions``:
        W's of one stage of a rank were moved first, so that its reduction is hidden.
    score
        Value in ns and tie-breaking score, where `zbcompile.planner.core.scorer` gave them: such orders join
        the pool of orders to improve.
    folded
        The order with a middle that repeats, where it has one.
    settles_tie
        Whether it takes the place of a best order that is as long.
    """

    codes: Codes
    lineage: tuple[str, ...]
    score: Score | None = None
    folded: Growable | None = None
    settles_tie: bool = False

    def then(self, name: str, codes: Codes, score: Score | None = None) -> Order:
        """Return what a part made of this order."""
        return Order(codes, extended(self.lineage, name), score)


def extended(lineage: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the lineage with one more part; a part that goes on with its own order adds nothing."""
    return lineage if lineage and lineage[-1].split(" ")[0] == name else (*lineage, name)


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
    order, value
        The best order and its value in ns; ``None`` before the first.
    known
        Up to twelve (value, order) of different values, best first.
    scorer
        Times orders from the moment that the search has compiled kernels, where no send holds up its rank.
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
        self.started, self.searched, self.limit_s = time.monotonic(), SearchClock(), time_limit_s
        self.observer = observer
        self.clock, self.fusing = Clock.of(problem), fusing
        self.order: Order | None = None
        self.value: int | None = None
        self.known: list[tuple[int, Order]] = []
        self.scorer: Scorer | None = None

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
        """Time until the limit in seconds, the compiling of kernels not counted."""
        return self.limit_s - self.searched.seconds

    @property
    def codes(self) -> Codes | None:
        """The best order, bare."""
        return None if self.order is None else self.order.codes

    @property
    def lineage(self) -> tuple[str, ...]:
        """How the best order came to be; empty before the first."""
        return () if self.order is None else self.order.lineage

    def measure(self, codes: Codes) -> int | None:
        """Return the value of an order in ns under the problem's send mode, or ``None`` on deadlock."""
        if self.problem.sends.holds_rank:
            return self.clock.value(codes)
        if self.scorer is not None:
            return self.scorer.value(codes)
        return value_of(self.instance, codes)

    def offer(self, order: Order) -> bool:
        """Take an order if it fits and is shorter than the best, or settles a tie with it.

        Returns
        -------
        bool
            Whether it was taken.
        """
        given = shaped(order.codes, self.fusing)
        codes = fitted(self.instance, given)
        if codes is None:
            return False
        scored = order.score if codes is order.codes and not self.problem.sends.holds_rank else None
        value = self.measure(codes) if scored is None else scored[0]
        if value is None:
            return False
        in_turn = codes
        codes, value = with_early_reductions(self.instance, codes, value, self.measure, self.value)
        if codes != order.codes:
            names = ["split" if self.fusing is Fusing.NEVER else "fused"] if given != order.codes else []
            names += [SUM_ORDER] if in_turn != given else []
            names += [EARLY_REDUCTIONS] if codes != in_turn else []
            order = replace(order, codes=codes, lineage=(*order.lineage, *names), score=None, folded=None)
        if all(value != other for other, _ in self.known):
            self.known = sorted([*self.known, (value, order)], key=lambda entry: entry[0])[:12]
        if order.settles_tie and value == self.value and codes != self.codes:
            self.order = order
            return True
        if self.value is not None and value >= self.value:
            return False
        self.order, self.value = order, value
        self.report(" > ".join(order.lineage))
        return True

    def offer_all(self, orders: Iterable[Order]) -> None:
        """Offer orders that were found for another problem."""
        for order in orders:
            self.offer(replace(order, score=None, folded=None, settles_tie=False))

    def raise_bound(self, bound: Bound) -> bool:
        """Keep the better of two bounds; return whether it is the new one."""
        if bound.value_ns <= self.bound.value_ns:
            return False
        self.bound = bound
        self.report(bound.method)
        return True

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
            raise NoOrderError(
                "no order was found in the time given", fix="raise the time limit, or leave out fewer parts"
            )
        return to_schedule(self.codes, self.problem)

    def _keep_sum_order(self) -> None:
        """Change the best order where that lets fewer gradients wait and costs nothing."""
        if self.order is None:
            return
        codes = with_fewest_waits(self.instance, self.order.codes, self.measure)
        if codes != self.order.codes and fits(self.instance, codes):
            lineage = extended(self.order.lineage, SUM_ORDER)
            self.order, self.value = replace(self.order, codes=codes, lineage=lineage), self.measure(codes)

    def solution(self) -> Solution:
        """Have the best order judged by `check`, and certify it.

        Its value was measured by the fast clocks, which equal `zbcompile.schedule.simulate` by test. Where it
        is free, gradients of weights come in the order of their sum. Raises `NoOrderError` if there is no
        order.
        """
        self._keep_sum_order()
        schedule, value, bound = self.schedule(), self.value, self.bound
        assert value is not None
        check(schedule, self.problem)
        certificate = Certificate(
            self.problem.objective, value, bound.value_ns, bound.method, bound.witness, self.lineage
        )
        return Solution(self.problem, schedule, certificate, origin=" > ".join(self.lineage))
