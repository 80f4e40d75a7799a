"""Orders decoded from offset keys: as repeated blocks, and by keyed dispatch.

Everything is counted in tries, so that a seed decides the result; the time limit only cuts it off.
"""

from __future__ import annotations

import random
from dataclasses import replace

from zbcompile.planner.core.dispatch import Dispatcher
from zbcompile.planner.core.instance import Codes, Instance
from zbcompile.planner.core.scorer import Scored, Scorer
from zbcompile.planner.core.tables import unpack
from zbcompile.planner.incumbent import Incumbent
from zbcompile.planner.starts.offset_keys import OffsetKeys, mutate, standard_patterns, waves_of
from zbcompile.planner.starts.repeated_blocks import block_order

__all__ = ["block_orders", "dispatched_orders", "offset_key_orders"]


def block_orders(instance: Instance, scorer: Scorer, tries: int, rng: random.Random) -> list[Scored]:
    """The two best orders of `tries` patterns decoded as repeated blocks."""
    standard = standard_patterns(len(waves_of(instance)), instance.num_ranks)
    pool: list[tuple[int, int, OffsetKeys, Codes]] = []
    for k in range(tries):
        if k < len(standard) or not pool:
            pattern = standard[k % len(standard)]
        else:
            pattern = mutate(pool[rng.randrange(min(8, len(pool)))][2], rng)
        codes = block_order(instance, pattern)
        score = scorer.score(codes)
        if score is not None and all(score != entry[:2] for entry in pool):
            pool = sorted([*pool, (*score, pattern, codes)], key=lambda entry: entry[:2])[:12]
    return [(value, score, codes) for value, score, _, codes in pool[:2]]


def dispatched_orders(
    instance: Instance,
    scorer: Scorer,
    dispatcher: Dispatcher,
    tries: int,
    period: int,
    rng: random.Random,
) -> list[Scored]:
    """The two best orders of `tries` recipes decoded by keyed dispatch; it ends after a third without gain.

    A recipe is a pattern and the most microbatches in flight per stage; both are changed, since
    under a tight cap the limits decide more than the pattern.
    """
    standard = [
        replace(pattern, period=period)
        for pattern in standard_patterns(len(waves_of(instance)), instance.num_ranks)
    ]
    pool: list[tuple[int, int, OffsetKeys, list[int], Codes]] = []
    gained = 0
    for k in range(tries):
        if k - gained > tries // 3:
            break
        turn, first = divmod(k, len(standard))
        if turn < 3 or not pool:
            pattern = standard[first]
            keys, flying = pattern.keys(instance)
            flying = [limit + turn for limit in flying]
        else:
            _, _, pattern, flying, _ = pool[rng.randrange(min(8, len(pool)))]
            if rng.random() < 0.5:
                pattern = mutate(pattern, rng)
            else:
                flying = list(flying)
                for _ in range(rng.randint(1, 3)):
                    s = rng.randrange(len(flying))
                    flying[s] = max(1, flying[s] + rng.choice((-1, 1)))
            keys, _ = pattern.keys(instance)
        line = dispatcher.run_line(keys, flying, pattern.share)
        score = None if line is None else scorer.score_line(dispatcher.offsets, line)
        if score is None or (len(pool) == 16 and score >= pool[-1][:2]):
            continue
        if all(score != entry[:2] for entry in pool):
            gained = k if not pool or score[0] < pool[0][0] else gained
            codes = unpack(instance, dispatcher.offsets, line)
            pool = sorted([*pool, (*score, pattern, flying, codes)], key=lambda entry: entry[:2])[:16]
    return [(entry[0], entry[1], entry[4]) for entry in pool[:2]]


def offset_key_orders(
    incumbent: Incumbent, scorer: Scorer, rng: random.Random, *, blocks: int, dispatches: int
) -> list[Scored]:
    """Orders from patterns by both decoders, as far as the time goes."""
    found: list[Scored] = []
    several = any(len(stages) > 1 for stages in incumbent.instance.stages_of)
    if several and incumbent.seconds_left > 0:
        found = block_orders(incumbent.instance, scorer, blocks, rng)
    dispatcher, slots = (
        Dispatcher(incumbent.instance),
        3 * -(-incumbent.instance.num_stages // incumbent.instance.num_ranks),
    )
    periods = (slots, slots + 2, slots + 3, slots + 2, slots + 3, slots) if several else (slots, 2 * slots)
    for period in periods:
        own = random.Random(rng.random())
        if incumbent.seconds_left > 0:
            found += dispatched_orders(incumbent.instance, scorer, dispatcher, dispatches, period, own)
    return found
