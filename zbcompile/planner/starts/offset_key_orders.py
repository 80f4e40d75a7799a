"""Orders decoded from offset keys that are evolved, by repeated blocks and by keyed dispatch.

Everything is counted in tries, so that a seed decides the result; the time limit only cuts it off.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from zbcompile.planner.core.dispatch import Dispatcher, dispatch_pays
from zbcompile.planner.core.instance import Codes, Instance
from zbcompile.planner.core.scorer import Scored, Scorer
from zbcompile.planner.core.tables import unpack
from zbcompile.planner.incumbent import Incumbent
from zbcompile.planner.starts.offset_keys import OffsetKeys, mutate, standard_offset_keys, waves_of
from zbcompile.planner.starts.repeated_blocks import block_order

__all__ = ["block_orders", "dispatched_orders", "offset_key_orders"]


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
        line = dispatcher.run_line(keys, in_flight, offset_keys.share)
        score = None if line is None else scorer.score_line(dispatcher.offsets, line)
        if score is None or (len(pool) == 16 and score >= pool[-1][:2]):
            continue
        if all(score != entry[:2] for entry in pool):
            gained = k if not pool or score[0] < pool[0][0] else gained
            codes = unpack(instance, dispatcher.offsets, line)
            pool = sorted([*pool, (*score, offset_keys, in_flight, codes)], key=lambda entry: entry[:2])[:16]
    return [(entry[0], entry[1], entry[4]) for entry in pool[:2]]


def offset_key_orders(
    incumbent: Incumbent, scorer: Scorer, rng: random.Random, *, blocks: int, dispatches: int
) -> list[Scored]:
    """Return orders from both decoders, as far as the time goes.

    Parameters
    ----------
    incumbent
        The problem, and the time that is left.
    scorer
        Its scorer.
    rng
        Decides the changes.
    blocks
        Offset keys to decode as repeated blocks, if a rank has several stages.
    dispatches
        Recipes to decode by keyed dispatch, per period.

    Returns
    -------
    list of Scored
        The best of each decoder and period.
    """

    def over() -> bool:
        return incumbent.seconds_left <= 0

    found: list[Scored] = []
    several = any(len(stages) > 1 for stages in incumbent.instance.stages_of)
    if several and not over():
        found = block_orders(incumbent.instance, scorer, blocks, rng, over)
    if not dispatch_pays(incumbent.instance):
        return found
    dispatcher = Dispatcher(incumbent.instance)
    slots = 3 * -(-incumbent.instance.num_stages // incumbent.instance.num_ranks)
    periods = (slots, slots + 2, slots + 3, slots + 2, slots + 3, slots) if several else (slots, 2 * slots)
    for period in periods:
        own = random.Random(rng.random())
        if not over():
            found += dispatched_orders(incumbent.instance, scorer, dispatcher, dispatches, period, own, over)
    return found
