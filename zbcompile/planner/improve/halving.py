"""Annealing by halving: all orders of the pool, then the better part of them with more tries each.

Everything is counted in tries, so that a seed decides the result; the time limit only cuts it off. Where the
time limit alone says how much to search, and time is left, the best orders are annealed again and again.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from zbcompile.planner.core.compiled import can_compile, uncounted_seconds
from zbcompile.planner.core.instance import is_chain
from zbcompile.planner.core.scorer import Score
from zbcompile.planner.improve.anneal import Annealer
from zbcompile.planner.improve.fold import Folded, fold
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run

__all__ = ["Anneal", "AnnealOn", "Fold"]

_HEATS = (4e-4, 1.5e-4)
_CHAIN_HEATS = (4e-4, 3e-3, 1e-3, 1.5e-4)
"""First temperatures to take in turn, as shares of the value; a chain's values lie further apart. Under
little memory the first one only."""

_Rounds = tuple[tuple[int, int], ...]
"""Of every round but the first: one of how many orders goes on, with how many times the tries."""

_THIRDS: _Rounds = ((3, 3),) * 3
"""The last of four rounds has 27 times the tries of the first."""

_SIEVE: _Rounds = ((4, 4), (3, 3), (4, 6))
"""Where a run `sieves`: a short first look at many orders, and most tries for the last two."""

_APART = 1_000_003
"""Between the random choices of one turn and those of the next."""

_LONGER = 4.0
"""Most by which a round is made longer than its counts say."""

_FEWEST = 12
"""Orders that are looked at however little time there is."""

_ENOUGH = 0.6
"""Share of the tries for which there must be time, or else the first look is made shorter."""

_AGAIN = 4
"""Orders that are annealed again every other time."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Anneals the orders with a periodic middle without its repetitions."""

    rounds: int = 4
    name: str = "fold"

    def applies(self, run: Run) -> bool:
        """Return whether no send holds up its rank; under little memory, whether microbatches are many."""
        long = run.instance.num_microbatches > 4 * run.instance.num_ranks
        return not run.holds_rank and (long or not run.is_tight)

    def improve(self, run: Run) -> Iterator[Order]:
        """Yield all orders found, unfolded; they keep their folded form as well."""
        starts = []
        for order in run.promising():
            folded = None
            if run.seconds_left > run.reserve_s:
                folded = fold(run.instance, order.codes, run.scorer)
            if folded is not None:
                starts.append(_Annealed(folded, order))
        for found in _halve(run, starts, run.effort.anneal, _THIRDS[: self.rounds - 1]):
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
        for found in _ladder(run, run.promising(wide=True)):
            yield found.order.then(self.name, found.folded.codes, found.score)


@dataclass(frozen=True, slots=True)
class AnnealOn:
    """Anneals the best orders again and again, as long as there is time.

    In turn as at first, with other random choices, and from the best few. It is for plans that the time limit
    ends: where a level of effort is asked for, the counts end the search.

    Attributes
    ----------
    larger_than
        Actions of the largest problem that the exact model, which uses the time too, is built for.
    """

    larger_than: int
    name: str = "anneal_on"

    def applies(self, run: Run) -> bool:
        """Return whether the time alone ends the search, and a rank has several stages."""
        large = run.several and run.actions > self.larger_than
        return large and not run.holds_rank and run.options.level is None and can_compile()

    def improve(self, run: Run) -> Iterator[Order]:
        """Yield all orders found."""
        run.reserve_s = 0.0  # the proofs have had their share
        first = [order for order in run.promising(wide=True) if not {"anneal", self.name} & {*order.lineage}]
        for turn in itertools.count(1):
            best = run.promising()[:_AGAIN]
            if not best or run.done:
                return
            used = _APART * turn
            if turn % 2 and first:
                ladder = _ladder(run, first, used)
            else:
                ladder = _halve(run, _whole(run, best), 9 * run.effort.anneal, _THIRDS[:1], used)
            found = []
            for one in ladder:
                found.append(one.order.then(self.name, one.folded.codes, one.score))
                yield found[-1]
            run.join(found)


@dataclass(frozen=True, slots=True)
class _Annealed:
    """What annealing made of an order of the pool, and its score as a whole order."""

    folded: Folded
    order: Order
    score: Score | None = None


def _whole(run: Run, orders: list[Order]) -> list[_Annealed]:
    """Return the orders as they are, to begin with."""
    return [_Annealed(Folded(run.instance, order.codes), order) for order in orders]


def _ladder(run: Run, orders: list[Order], used: int = 0) -> Iterator[_Annealed]:
    """Anneal whole orders by halving; yield all that is found."""
    if run.sieves:
        starts, tries = _first_look(run, _whole(run, orders), run.effort.anneal)
        return _halve(run, starts, tries, _SIEVE, used)
    tries = 2 * run.effort.anneal if run.is_tight else run.effort.anneal
    return _halve(run, _whole(run, orders), tries, _THIRDS, used)


def _first_look(run: Run, starts: list[_Annealed], tries: int) -> tuple[list[_Annealed], int]:
    """Return which orders are looked at first, and with how many tries.

    All of them, where the time allows about what the counts say or the counts end the search. A slow or busy
    machine would else spend all its time on the first look: it gets fewer orders, spread over all, with fewer
    tries. One order is annealed to see how long a try takes.
    """
    if run.options.level is not None or len(starts) <= _FEWEST or run.done:
        return starts, tries
    compiled, began = uncounted_seconds(), time.monotonic()
    for _ in _round(run, starts[:1], tries, 0):
        pass
    took = time.monotonic() - began - (uncounted_seconds() - compiled)
    cores = len(os.sched_getaffinity(0)) if can_compile() else 1
    allowed = (run.seconds_left - run.reserve_s) * cores * tries / max(took, 1e-9)
    share = allowed / _planned(len(starts), tries, _SIEVE)
    if share >= _ENOUGH:
        return starts, tries
    part = max(0.0, share) ** 0.5
    count = max(_FEWEST, int(part * len(starts)))
    return [starts[k * len(starts) // count] for k in range(count)], max(1, int(part * tries))


def _halve(
    run: Run, starts: list[_Annealed], tries: int, rounds: _Rounds, used: int = 0
) -> Iterator[_Annealed]:
    """Anneal all; the better part goes on with more tries each, round by round. Yield all that is found.

    Of a few the best two go on.

    Parameters
    ----------
    run
        The run.
    starts
        The orders to begin with.
    tries
        Tries per order in the first round.
    rounds
        The further rounds.
    used
        How many orders were annealed before: it decides the random choices.
    """
    pace = _Pace(run)
    for number in range(len(rounds) + 1):
        if not starts or run.done or run.seconds_left <= run.reserve_s:
            return
        tries = max(1, int(tries * pace.share(_planned(len(starts), tries, rounds[number:]))))
        found: list[tuple[Score, _Annealed]] = []
        for annealed in _round(run, starts, tries, used):
            score = run.scorer.score(annealed.folded.unfold())
            yield replace(annealed, score=score)
            if score is not None:
                found.append((score, annealed))
            if run.done:
                return
        pace.done += len(starts) * tries
        used += len(starts)
        found.sort(key=lambda entry: entry[0])
        kept = [one for k, (score, one) in enumerate(found) if k == 0 or score != found[k - 1][0]]
        if number < len(rounds):
            one_of, times = rounds[number]
            count = _next_count(len(starts), one_of)
            starts = kept[:count] if len(starts) >= 2 * one_of else (kept * 2)[:count]
            tries *= times


def _next_count(count: int, one_of: int) -> int:
    """Return how many of so many orders go on: one of so many, but two."""
    return max(2, count // one_of)


def _planned(count: int, tries: int, rounds: _Rounds) -> int:
    """Return the tries of a round and of those that follow."""
    total = count * tries
    for one_of, times in rounds:
        count, tries = _next_count(count, one_of), tries * times
        total += count * tries
    return total


class _Pace:
    """How many tries the time allows, so that annealing cools down before it is over.

    It changes nothing where the counts end before the time does, unless memory is little and the time alone
    says how much to search: further rounds are then made longer until they fill it.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.done = run, 0
        self.began = time.monotonic() - uncounted_seconds()
        self.most = _LONGER if run.sieves and run.options.level is None else 1.0

    def share(self, tries: int) -> float:
        """Return which share of so many tries there is time for, at the pace until now; at most `most`."""
        took = time.monotonic() - uncounted_seconds() - self.began
        if not self.done or took <= 0:
            return 1.0
        return min(self.most, (self.run.seconds_left - self.run.reserve_s) * self.done / took / tries)


def _round(run: Run, starts: list[_Annealed], tries: int, used: int) -> Iterator[_Annealed]:
    """Anneal all, on as many cores as there are: who computes what does not depend on their number."""
    halted, goal = threading.Event(), run.bound.value_ns
    heats = _CHAIN_HEATS if is_chain(run.instance) else _HEATS[:1] if run.is_tight else _HEATS

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
