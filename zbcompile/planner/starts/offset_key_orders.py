"""Orders that keyed dispatch makes of offset keys, which are evolved.

Everything is counted in tries, so that a seed decides the result; the time limit only cuts it off.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from zbcompile.planner.core.dispatch import Dispatcher, dispatch_pays
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.scorer import Scored, Scorer
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run
from zbcompile.planner.starts.evolve import Pool
from zbcompile.planner.starts.list_settings import is_looped
from zbcompile.planner.starts.offset_keys import OffsetKeys, standard_offset_keys, waves_of
from zbcompile.planner.starts.other_problems import is_long

__all__ = ["OffsetKeyOrders", "first_keys", "offset_key_orders"]


def first_keys(instance: Instance, period: int = 0) -> Iterator[OffsetKeys]:
    """Yield standard keys with as many microbatches in flight as they imply, with one more, and with two."""
    for more in range(3):
        for standard in standard_offset_keys(len(waves_of(instance)), instance.num_ranks):
            yield replace(standard, period=period).limited(instance, more)


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
        """Yield the best of each period, best first; under little memory those of all first keys, too.

        Below the memory of V-Half all of these are worth annealing: the shortest often become the longest.
        """
        instance, rng = run.instance, random.Random(run.seed)
        found = offset_key_orders(instance, run.scorer, rng, run.over, dispatches=run.effort.dispatches)
        found.sort(key=lambda entry: entry[:2])
        if run.is_tight and not run.holds_rank:
            first = [keys for period in _periods(instance) for keys in first_keys(instance, period)]
            found += _orders(instance, run.scorer, first, rng, run.over, len(first), len(first), sys.maxsize)
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
    """Return the best two orders of every period, with so many dispatches each, as far as the time goes.

    Both keys and the most microbatches in flight are changed, since under a tight cap the limits decide more
    than the keys.
    """
    found, (slots, *more) = list[Scored](), _periods(instance)
    several = instance.num_stages > instance.num_ranks
    for period in (slots, *more, *more, slots) if several else (slots, 2 * slots):
        first, own = first_keys(instance, period), random.Random(rng.random())
        found += _orders(instance, scorer, first, own, over, dispatches, dispatches // 3, 2)
    return found


def _orders(
    instance: Instance,
    scorer: Scorer,
    first: Iterable[OffsetKeys],
    rng: random.Random,
    over: Callable[[], bool],
    tries: int,
    patience: int,
    most: int,
) -> list[Scored]:
    """Return the best orders that keyed dispatch makes of the first keys, and of changes to the best."""
    dispatcher = Dispatcher(instance)
    pool = Pool[OffsetKeys](
        lambda keys: dispatcher.score(keys.keys(instance), keys.recipe(), scorer), max(16, most)
    )
    for _ in pool.evolve(first, OffsetKeys.changed, rng, tries, over, patience):
        pass
    return pool.orders(most, lambda keys: dispatcher.run(keys.keys(instance), keys.recipe()))
