"""Orders that keyed dispatch makes of offset keys, which are evolved.

Everything is counted in tries, so that a seed decides the result; the time limit only cuts it off.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from zbcompile.planner.core.dispatch import Dispatcher, Recipe, dispatch_pays
from zbcompile.planner.core.instance import Codes, Instance
from zbcompile.planner.core.scorer import Score, Scored, Scorer
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run
from zbcompile.planner.starts.evolve import Pool
from zbcompile.planner.starts.list_settings import is_looped
from zbcompile.planner.starts.offset_keys import (
    OffsetKeys,
    mutate,
    standard_offset_keys,
    waves_of,
)
from zbcompile.planner.starts.other_problems import is_long

__all__ = ["KeysInFlight", "OffsetKeyOrders", "first_keys", "offset_key_orders"]


def standard_orders(
    instance: Instance,
    scorer: Scorer,
    dispatcher: Dispatcher,
    stop: Callable[[], bool] = lambda: False,
) -> list[Scored]:
    """Return what keyed dispatch makes of the standard offset keys, one order per score, best first.

    With three periods, and with up to two microbatches in flight beyond those that the keys imply. Below the
    memory of V-Half all of them are worth annealing: the shortest often become the longest.
    """
    pool = Pool[KeysInFlight](lambda setting: setting.score(dispatcher, scorer), most=sys.maxsize)
    for setting in chain.from_iterable(first_keys(instance, period) for period in _periods(instance)):
        if stop():
            break
        pool.take(setting)
    return pool.orders(sys.maxsize, lambda setting: setting.order(dispatcher))


@dataclass(frozen=True, slots=True)
class KeysInFlight:
    """Offset keys, and the most microbatches in flight per stage."""

    keys: OffsetKeys
    in_flight: tuple[int, ...]

    def changed(self, rng: random.Random) -> KeysInFlight:
        """Return other keys with the same limits, or the same keys with one to three other limits."""
        if rng.random() < 0.5:
            return replace(self, keys=mutate(self.keys, rng))
        in_flight = list(self.in_flight)
        for _ in range(rng.randint(1, 3)):
            s = rng.randrange(len(in_flight))
            in_flight[s] = max(1, in_flight[s] + rng.choice((-1, 1)))
        return replace(self, in_flight=tuple(in_flight))

    def score(self, dispatcher: Dispatcher, scorer: Scorer) -> Score | None:
        """Return the score of what keyed dispatch makes of it."""
        return dispatcher.score(*self._dispatched(dispatcher.instance), scorer)

    def order(self, dispatcher: Dispatcher) -> Codes | None:
        """Return what keyed dispatch makes of it."""
        return dispatcher.run(*self._dispatched(dispatcher.instance))

    def _dispatched(self, instance: Instance) -> tuple[list[int], Recipe]:
        return self.keys.keys(instance)[0], Recipe(share=self.keys.share, in_flight=self.in_flight)


def _standard(instance: Instance) -> list[OffsetKeys]:
    return standard_offset_keys(len(waves_of(instance)), instance.num_ranks)


def first_keys(instance: Instance, period: int = 0) -> Iterator[KeysInFlight]:
    """Yield standard keys with as many microbatches in flight as they imply, with one more, and with two."""
    for more in range(3):
        for standard in _standard(instance):
            keys = replace(standard, period=period)
            yield KeysInFlight(keys, tuple(limit + more for limit in keys.keys(instance)[1]))


def _periods(instance: Instance) -> tuple[int, int, int]:
    """Return slots from one microbatch to the next: as many as a rank has actions, and a few more."""
    slots = 3 * -(-instance.num_stages // instance.num_ranks)
    return slots, slots + 2, slots + 3


@dataclass(frozen=True, slots=True)
class OffsetKeyOrders:
    """Orders that keyed dispatch makes of offset keys.

    Attributes
    ----------
    always
        Whether they are made for long problems and loops, too, and, timed as if they did not, where sends
        hold up their rank. Rounds are shorter on loops.
    """

    always: bool = False
    name: str = "offset_keys"
    instant: bool = False

    def applies(self, run: Run) -> bool:
        """Return whether they are wanted, and a dispatch takes little enough time."""
        wanted = self.always or not (run.holds_rank or is_long(run) or is_looped(run.instance))
        return wanted and run.effort.dispatches > 0 and dispatch_pays(run.instance)

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield the best of each period, best first; under little memory those of all first keys, too."""
        instance, rng, dispatches = run.instance, random.Random(run.seed), run.effort.dispatches
        found = offset_key_orders(instance, run.scorer, rng, run.over, dispatches=dispatches)
        found.sort(key=lambda entry: entry[:2])
        if run.is_tight and not run.holds_rank:
            found += standard_orders(instance, run.scorer, Dispatcher(instance), run.over)
        for value, score, codes in found:
            yield Order(codes, (self.name,), None if run.holds_rank else (value, score))


def offset_key_orders(
    instance: Instance,
    scorer: Scorer,
    rng: random.Random,
    over: Callable[[], bool] = lambda: False,
    *,
    dispatches: int,
) -> list[Scored]:
    """Return the best two orders of every period, as far as the time goes; none where a dispatch is slow.

    Both keys and the most microbatches in flight are changed, since under a tight cap the limits decide more
    than the keys. A period ends after a third of its tries without gain.

    Parameters
    ----------
    instance
        The problem.
    scorer
        Its scorer.
    rng
        Decides the changes.
    over
        Asked before every try whether to end early.
    dispatches
        Most tries per period.
    """
    if not dispatch_pays(instance):
        return []
    dispatcher, found = Dispatcher(instance), list[Scored]()

    def evolved(period: int, own: random.Random) -> list[Scored]:
        without_gain = 0

        def score(setting: KeysInFlight) -> Score | None:
            nonlocal without_gain
            made = setting.score(dispatcher, scorer)
            shorter = made is not None and (not pool.best or made[0] < pool.best[0][0][0])
            without_gain = 1 if shorter else without_gain + 1
            return made

        pool = Pool[KeysInFlight](score)
        first, stop = first_keys(instance, period), lambda: without_gain > dispatches // 3 or over()
        list(pool.evolve(first, lambda old: old.changed(own), own, dispatches, stop))
        return pool.orders(2, lambda setting: setting.order(dispatcher))

    slots, *more = _periods(instance)
    several = instance.num_stages > instance.num_ranks
    for period in (slots, *more, *more, slots) if several else (slots, 2 * slots):
        own = random.Random(rng.random())
        if not over():
            found += evolved(period, own)
    return found
