"""Orders decoded from offset keys that are evolved, by repeated blocks and by keyed dispatch.

Everything is counted in tries, so that a seed decides the result; the time limit only cuts it off.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zbcompile.planner.core.dispatch import Dispatcher, Recipe, dispatch_pays
from zbcompile.planner.core.instance import Codes, Instance
from zbcompile.planner.core.scorer import Scored, Scorer
from zbcompile.planner.core.tables import unpack
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run
from zbcompile.planner.starts.offset_keys import (
    OffsetKeys,
    block_order,
    mutate,
    standard_offset_keys,
    waves_of,
)
from zbcompile.planner.starts.other_problems import is_long

__all__ = ["OffsetKeyOrders", "block_orders", "dispatched_orders", "offset_key_orders", "standard_orders"]


def block_orders(
    instance: Instance,
    scorer: Scorer,
    tries: int,
    rng: random.Random,
    stop: Callable[[], bool] = lambda: False,
) -> list[Scored]:
    """Return the two best orders of ``tries`` offset keys decoded as repeated blocks, fewer if ``stop()``."""
    standard = standard_offset_keys(len(waves_of(instance)), instance.num_ranks)
    pool: list[tuple[int, int, OffsetKeys, Codes]] = []
    for k in range(tries):
        if stop():
            break
        if k < len(standard) or not pool:
            offset_keys = standard[k % len(standard)]
        else:
            offset_keys = mutate(pool[rng.randrange(min(8, len(pool)))][2], rng)
        codes = block_order(instance, offset_keys)
        score = scorer.score(codes)
        if score is not None and all(score != entry[:2] for entry in pool):
            pool = sorted([*pool, (*score, offset_keys, codes)], key=lambda entry: entry[:2])[:12]
    return [(value, score, codes) for value, score, _, codes in pool[:2]]


def dispatched_orders(
    instance: Instance,
    scorer: Scorer,
    dispatcher: Dispatcher,
    tries: int,
    period: int,
    rng: random.Random,
    stop: Callable[[], bool] = lambda: False,
) -> list[Scored]:
    """Return the two best orders decoded by keyed dispatch.

    A recipe is offset keys and the most microbatches in flight per stage. Both are changed, since under a
    tight cap the limits decide more than the keys. It ends after a third of the tries without gain.

    Parameters
    ----------
    instance
        The problem.
    scorer
        Its scorer.
    dispatcher
        Its dispatcher.
    tries
        Most recipes.
    period
        Slots from one microbatch to the next.
    rng
        Decides the changes.
    stop
        Asked before every recipe whether to end early.
    """
    standard = [
        replace(offset_keys, period=period)
        for offset_keys in standard_offset_keys(len(waves_of(instance)), instance.num_ranks)
    ]
    pool: list[tuple[int, int, OffsetKeys, list[int], Codes]] = []
    gained = 0
    for k in range(tries):
        if k - gained > tries // 3 or stop():
            break
        more, first = divmod(k, len(standard))
        if more < 3 or not pool:
            offset_keys = standard[first]
            keys, in_flight = offset_keys.keys(instance)
            in_flight = [limit + more for limit in in_flight]
        else:
            _, _, offset_keys, in_flight, _ = pool[rng.randrange(min(8, len(pool)))]
            if rng.random() < 0.5:
                offset_keys = mutate(offset_keys, rng)
            else:
                in_flight = list(in_flight)
                for _ in range(rng.randint(1, 3)):
                    s = rng.randrange(len(in_flight))
                    in_flight[s] = max(1, in_flight[s] + rng.choice((-1, 1)))
            keys, _ = offset_keys.keys(instance)
        line = dispatcher.run_line(keys, Recipe(share=offset_keys.share, in_flight=tuple(in_flight)))
        score = None if line is None else scorer.score_line(dispatcher.offsets, line)
        if score is None or (len(pool) == 16 and score >= pool[-1][:2]):
            continue
        if all(score != entry[:2] for entry in pool):
            gained = k if not pool or score[0] < pool[0][0] else gained
            codes = unpack(instance, dispatcher.offsets, line)
            pool = sorted([*pool, (*score, offset_keys, in_flight, codes)], key=lambda entry: entry[:2])[:16]
    return [(entry[0], entry[1], entry[4]) for entry in pool[:2]]


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
    found: dict[tuple[int, int], Codes] = {}
    slots = 3 * -(-instance.num_stages // instance.num_ranks)
    for period in (slots, slots + 2, slots + 3):
        for offset_keys in standard_offset_keys(len(waves_of(instance)), instance.num_ranks):
            keys, in_flight = replace(offset_keys, period=period).keys(instance)
            for more in range(3):
                if stop():
                    break
                limits = [limit + more for limit in in_flight]
                line = dispatcher.run_line(keys, Recipe(share=offset_keys.share, in_flight=tuple(limits)))
                score = None if line is None else scorer.score_line(dispatcher.offsets, line)
                if line is not None and score is not None and score not in found:
                    found[score] = unpack(instance, dispatcher.offsets, line)
    return [(*score, codes) for score, codes in sorted(found.items())]


@dataclass(frozen=True, slots=True)
class OffsetKeyOrders:
    """Orders decoded from offset keys, by both decoders.

    Attributes
    ----------
    always
        Whether they are made for long problems, too, and, timed as if they did not, where sends hold up
        their rank.
    """

    always: bool = False
    name: str = "offset_keys"
    instant: bool = False

    def applies(self, run: Run) -> bool:
        """Return whether a decoder can be used for the problem."""
        wanted = self.always or not (run.holds_rank or is_long(run))
        return wanted and run.effort.dispatches > 0 and (run.several or dispatch_pays(run.instance))

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield the best of each decoder and period, best first."""
        rng, effort = random.Random(run.seed), run.effort
        found = offset_key_orders(
            run.instance, run.scorer, rng, run.over, blocks=effort.blocks, dispatches=effort.dispatches
        )
        for value, score, codes in sorted(found, key=lambda entry: entry[:2]):
            yield Order(codes, (self.name,), None if run.holds_rank else (value, score))
        if run.is_tight and not run.holds_rank and dispatch_pays(run.instance):
            dispatcher = Dispatcher(run.instance)
            for value, score, codes in standard_orders(run.instance, run.scorer, dispatcher, run.over):
                yield Order(codes, (self.name,), (value, score))


def offset_key_orders(
    instance: Instance,
    scorer: Scorer,
    rng: random.Random,
    over: Callable[[], bool] = lambda: False,
    *,
    blocks: int,
    dispatches: int,
) -> list[Scored]:
    """Return orders from both decoders, as far as the time goes.

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
    blocks
        Offset keys to decode as repeated blocks, if a rank has several stages.
    dispatches
        Recipes to decode by keyed dispatch, per period.

    Returns
    -------
    list of Scored
        The best of each decoder and period.
    """
    found: list[Scored] = []
    several = any(len(stages) > 1 for stages in instance.stages_of)
    if several and not over():
        found = block_orders(instance, scorer, blocks, rng, over)
    if not dispatch_pays(instance):
        return found
    dispatcher = Dispatcher(instance)
    slots = 3 * -(-instance.num_stages // instance.num_ranks)
    periods = (slots, slots + 2, slots + 3, slots + 2, slots + 3, slots) if several else (slots, 2 * slots)
    for period in periods:
        own = random.Random(rng.random())
        if not over():
            found += dispatched_orders(instance, scorer, dispatcher, dispatches, period, own, over)
    return found
