"""Annealing by halving: all orders of the pool, then the better third with three times the tries.

Everything is counted in tries, so that a seed decides the result; the time limit only cuts it off.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from zbcompile.planner.core.compiled import can_compile
from zbcompile.planner.core.instance import is_chain
from zbcompile.planner.core.scorer import Score
from zbcompile.planner.improve.anneal import Annealer
from zbcompile.planner.improve.fold import Folded, fold
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run

__all__ = ["Anneal", "Fold", "Shortlist"]

_HEATS = (4e-4, 1.5e-4)
_CHAIN_HEATS = (4e-4, 3e-3, 1e-3, 1.5e-4)
"""First temperatures to take in turn, as shares of the value; a chain's values lie further apart."""

_LAST = 27
"""Tries of the last round, in those of the first."""


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Cuts the pool to its best few, before orders are made from them."""

    most: int = 4
    name: str = "shortlist"

    def applies(self, run: Run) -> bool:
        """Return whether no send holds up its rank: the pool's scores are for that."""
        return not run.holds_rank

    def improve(self, run: Run) -> Iterator[Order]:
        """Cut the pool; offer its best order again, which changes nothing."""
        run.pool = run.pool[: self.most]
        yield from run.pool[:1]


@dataclass(frozen=True, slots=True)
class Fold:
    """Anneals the orders with a periodic middle without its repetitions."""

    last: int = _LAST
    name: str = "fold"

    def applies(self, run: Run) -> bool:
        """Return whether no send holds up its rank."""
        return not run.holds_rank

    def improve(self, run: Run) -> Iterator[Order]:
        """Yield all orders found, unfolded; they keep their folded form as well."""
        starts = []
        for order in run.promising():
            folded = None
            if run.seconds_left > run.reserve_s:
                folded = fold(run.instance, order.codes, run.scorer)
            if folded is not None:
                starts.append(_Annealed(folded, order))
        for found in _halve(run, starts, self.last):
            order = found.order.then(self.name, found.folded.unfold(), found.score)
            yield replace(order, folded=found.folded)


@dataclass(frozen=True, slots=True)
class Anneal:
    """Anneals the orders of the pool."""

    name: str = "anneal"

    def applies(self, run: Run) -> bool:
        """Return whether no send holds up its rank."""
        return not run.holds_rank

    def improve(self, run: Run) -> Iterator[Order]:
        """Yield all orders found."""
        starts = [_Annealed(Folded(run.instance, order.codes), order) for order in run.promising()]
        for found in _halve(run, starts, _LAST):
            yield found.order.then(self.name, found.folded.codes, found.score)


@dataclass(frozen=True, slots=True)
class _Annealed:
    """What annealing made of an order of the pool, and its score as a whole order."""

    folded: Folded
    order: Order
    score: Score | None = None


def _halve(run: Run, starts: list[_Annealed], last: int) -> Iterator[_Annealed]:
    """Anneal all; the better third goes on with three times the tries. Yield all that is found.

    The last two rounds start twice from the best.
    """
    tries, used = run.effort.anneal, 0
    while starts and not run.done and run.seconds_left > run.reserve_s:
        found: list[tuple[Score, _Annealed]] = []
        for annealed in _round(run, starts, tries, used):
            score = run.scorer.score(annealed.folded.unfold())
            yield replace(annealed, score=score)
            if score is not None:
                found.append((score, annealed))
            if run.done:
                return
        if tries >= last * run.effort.anneal:
            return
        used += len(starts)
        tries *= 3
        found.sort(key=lambda entry: entry[0])
        kept = [one for k, (score, one) in enumerate(found) if k == 0 or score != found[k - 1][0]]
        starts = kept[: len(starts) // 3] if len(starts) >= 6 else kept[:1] * 2


def _round(run: Run, starts: list[_Annealed], tries: int, used: int) -> Iterator[_Annealed]:
    """Anneal all, on as many cores as there are: who computes what does not depend on their number."""
    halted, goal = threading.Event(), run.bound.value_ns
    heats = _CHAIN_HEATS if is_chain(run.instance) else _HEATS

    def anneal(k: int) -> _Annealed:
        number, start = used + k, starts[k].folded
        codes = Annealer(start.instance).run(
            start.codes,
            tries,
            seed=run.seed * 1000 + number + 1,
            heat=heats[number % len(heats)],
            goal=goal if start.repeats == 0 else 0,
            stop=lambda: halted.is_set() or run.seconds_left <= run.reserve_s,
            frozen_blocks=start.frozen_blocks,
        )
        return _Annealed(replace(start, codes=codes), starts[k].order)

    if not can_compile():
        yield from map(anneal, range(len(starts)))
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores:
        try:
            yield from cores.map(anneal, range(len(starts)))
        finally:
            halted.set()
