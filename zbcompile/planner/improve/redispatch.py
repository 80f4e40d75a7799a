"""Redispatch: the times of a known order become keys, and keyed dispatch places its actions anew.

A published order was made for other times. Its starts under the real ones say what should come first; what
fills the gaps, W's above all, is decided again. If that helps, the keys of single rows, the microbatches in
flight and the gap that a W may fill are evolved.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zbcompile.planner.core.dispatch import Dispatcher, Recipe, dispatch_pays
from zbcompile.planner.core.instance import BW, B, Codes, F, Instance, W, is_chain
from zbcompile.planner.core.score import latest_starts
from zbcompile.planner.core.scorer import Scored, Scorer
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run
from zbcompile.planner.starts.evolve import Pool

__all__ = ["Redispatch", "redispatched"]

_MOST = 4
"""Orders of the pool that are dispatched anew."""

_LATE = (0, 1, 3, 6)
"""How many W's later than in the order W's are due."""

_SHARES = (50, 75, 100, 125)


@dataclass(frozen=True, slots=True)
class Redispatch:
    """The best orders of the pool with their actions placed anew."""

    name: str = "redispatch"

    def applies(self, run: Run) -> bool:
        """Return whether the stages are no chain of one per rank, and no send holds up its rank."""
        return not run.holds_rank and not is_chain(run.instance) and dispatch_pays(run.instance)

    def improve(self, run: Run) -> Iterator[Order]:
        """Yield the best three of each that gets shorter, the best of all first."""
        instance, dispatcher = run.instance, Dispatcher(run.instance)
        every: list[tuple[Scored, Order]] = []
        for k, order in enumerate(run.pool[:_MOST]):
            rng, tries = random.Random(run.seed + k), run.effort.dispatches // 2
            found = redispatched(instance, order.codes, run.scorer, dispatcher, tries, rng, run.over)
            every += [(scored, order) for scored in found]
        for (value, score, codes), order in sorted(every, key=lambda entry: entry[0][:2]):
            yield order.then(self.name, codes, (value, score))


@dataclass(frozen=True, slots=True)
class _Shifts:
    """Parameters of one dispatch.

    Attributes
    ----------
    shift
        Shift of each row (kind x stages + stage) in ns.
    in_flight
        Most microbatches in flight per stage.
    share
        As in `Recipe`.
    """

    shift: tuple[int, ...]
    in_flight: tuple[int, ...]
    share: int


def redispatched(
    instance: Instance,
    codes: Codes,
    scorer: Scorer,
    dispatcher: Dispatcher,
    tries: int,
    rng: random.Random,
    stop: Callable[[], bool] = lambda: False,
) -> list[Scored]:
    """Return the three best orders with their scores, best first.

    Parameters
    ----------
    instance
        The problem.
    codes
        A legal order without BW.
    scorer
        Scorer of the problem.
    dispatcher
        Its dispatcher.
    tries
        Recipes of the evolution, after the 32 first ones.
    rng
        Decides the changes.
    stop
        Asked before every recipe whether to end early.

    Returns
    -------
    list of Scored
        Empty if no first recipe beats ``codes``.
    """
    given = scorer.score(codes)
    if given is None or any(kind == BW for row in codes for kind, _ in row):
        return []
    S, m = instance.num_stages, instance.num_microbatches
    starts = latest_starts(instance, codes)
    rows = [[starts[kind, s, i] for i in range(m)] for kind in (F, B, W) for s in range(S)]
    longest = max(instance.weight)
    most = _in_flight(instance, codes)
    first = [
        _Shifts((0,) * (2 * S) + (late * longest,) * S, in_flight, share)
        for in_flight in ((m,) * S, most)
        for late in _LATE
        for share in _SHARES
    ]

    def made(shifts: _Shifts) -> tuple[list[int], Recipe]:
        keys = [key + late for row, late in zip(rows, shifts.shift, strict=True) for key in row]
        return keys, Recipe(share=shifts.share, in_flight=shifts.in_flight)

    pool = Pool[_Shifts](lambda shifts: dispatcher.score(*made(shifts), scorer), changed=4)

    def change(old: _Shifts) -> _Shifts:
        return _mutate(old, most, longest, m, rng)

    list(pool.evolve(first, change, rng, len(first), stop))
    if not pool.best or pool.best[0][0] >= given:
        return []
    list(pool.evolve((), change, rng, tries, stop))
    return pool.orders(3, lambda shifts: dispatcher.run(*made(shifts)))


def _mutate(shifts: _Shifts, most: tuple[int, ...], longest: int, m: int, rng: random.Random) -> _Shifts:
    """Return the parameters with one to three changes.

    A row or some neighbouring rows move by up to three halves of a W, one stage's microbatches in flight
    change by one, or the share is another one.
    """
    S = len(most)
    shift, in_flight, share = list(shifts.shift), list(shifts.in_flight), shifts.share
    for _ in range(rng.randint(1, 3)):
        dice = rng.random()
        step = rng.choice((-3, -2, -1, 1, 2, 3)) * longest // 2
        if dice < 0.45:
            shift[rng.randrange(3 * S)] += step
        elif dice < 0.6:
            low = rng.randrange(S)
            high, kind = rng.randrange(low, S), rng.randrange(3)
            for row in range(kind * S + low, kind * S + high + 1):
                shift[row] += step
        elif dice < 0.95:
            s = rng.randrange(S)
            in_flight[s] = max(1, min(m, min(in_flight[s], most[s] + 4) + rng.choice((-1, 1))))
        else:
            share = rng.choice((0, 25, 50, 75, 90, 100, 125, 150))
    return replace(shifts, shift=tuple(shift), in_flight=tuple(in_flight), share=share)


def _in_flight(instance: Instance, codes: Codes) -> tuple[int, ...]:
    """Return the most microbatches between F and B per stage."""
    most, now = [1] * instance.num_stages, [0] * instance.num_stages
    for row in codes:
        for kind, s in row:
            now[s] += (1, -1, 0)[kind]
            most[s] = max(most[s], now[s])
    return tuple(most)
