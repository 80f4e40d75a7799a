"""Search beyond the first orders: patterns and list schedules evolved, then annealing by halving.

Everything is counted in tries, so that a seed decides the result; the time limit only cuts it off.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from zbcompile.planner.anneal import Annealer
from zbcompile.planner.blocks import block_order
from zbcompile.planner.dispatch import Dispatcher
from zbcompile.planner.flat import Codes, Flat
from zbcompile.planner.offsets import Pattern, mutate, standard_patterns, waves_of
from zbcompile.planner.state import Best

__all__ = ["Effort", "improve", "pattern_orders"]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to search.

    blocks, dispatches : patterns tried by each decoder. tries : annealing tries per order in the first
    round; three times as many in each further round, over the better third of the orders.
    """

    blocks: int = 40
    dispatches: int = 160
    tries: int = 40_000

    @staticmethod
    def of(flat: Flat, level: int = 1) -> Effort:
        """A budget that shrinks with the number of actions, so that the seconds stay in bounds."""
        actions = 3 * flat.num_stages * flat.num_microbatches
        scale = min(1.0, 1200 / actions)
        return Effort(
            max(15, int(40 * scale)), max(30, int(160 * scale)), max(500, int(40_000 * scale * level))
        )


Scored = tuple[int, int, Codes]
_HEATS = (4e-4, 1.5e-4)
"""First temperatures to take in turn, as shares of the value."""


def pattern_orders(best: Best, annealer: Annealer, effort: Effort, rng: random.Random) -> list[Scored]:
    """Orders from patterns, decoded as repeated blocks and by keyed dispatch: the two best of each."""
    flat = best.flat
    num_waves = len(waves_of(flat))
    dispatcher = Dispatcher(flat)
    kept: list[Scored] = []
    for decoder, tries in (("block", effort.blocks), ("dispatch", effort.dispatches)):
        pool: list[tuple[int, int, Pattern, Codes]] = []
        for pattern in _proposals(num_waves, flat.num_ranks, pool, tries, rng):
            if best.seconds_left <= 0:
                break
            if decoder == "block":
                codes: Codes | None = block_order(flat, pattern)
            else:
                keys, flying = pattern.keys(flat)
                codes = dispatcher.run(keys, flying, pattern.share)
            score = None if codes is None else annealer.score(codes)
            if codes is None or score is None or any(score == entry[:2] for entry in pool):
                continue
            pool.append((*score, pattern, codes))
            pool.sort(key=lambda entry: entry[:2])
            del pool[12:]
        kept.extend((value, score, codes) for value, score, _, codes in pool[:2])
    return kept


def _proposals(
    num_waves: int,
    num_ranks: int,
    pool: list[tuple[int, int, Pattern, Codes]],
    tries: int,
    rng: random.Random,
) -> Iterator[Pattern]:
    """The standard patterns, then changes to the best of the pool (which the caller fills)."""
    standard = standard_patterns(num_waves, num_ranks)
    for k in range(tries):
        if k < len(standard) or not pool:
            yield standard[k % len(standard)]
        else:
            yield mutate(pool[rng.randrange(min(8, len(pool)))][2], rng)


def improve(best: Best, seeds: list[Codes], effort: Effort, seed: int) -> None:
    """Anneal the given orders and those of patterns; the better third goes on, with three times the tries."""
    flat, rng = best.flat, random.Random(seed)
    if best.done:
        return
    annealer = Annealer(flat)
    pool = _distinct(_scored(annealer, seeds))[:4]
    if any(len(stages) > 1 for stages in flat.stages_of):
        pool = _distinct([*pool, *pattern_orders(best, annealer, effort, rng)])
        for _, _, codes in pool:
            best.offer(codes, "pattern")
    tries, turn = effort.tries, 0
    while pool and not best.done:
        following: list[Scored] = []
        for _, _, codes in pool:
            turn += 1
            improved = annealer.run(
                codes,
                tries,
                seed=seed * 1000 + turn,
                heat=_HEATS[turn % len(_HEATS)],
                goal=best.bound.value_ns,
                stop=lambda: best.seconds_left <= 0,
            )
            following.extend(_scored(annealer, [improved]))
            best.offer(improved, "search")
            best.report("search")
            if best.done:
                return
        if len(pool) == 1:
            return
        pool = _distinct(following)[: max(1, len(pool) // 3)]
        tries *= 3


def _scored(annealer: Annealer, orders: list[Codes]) -> list[Scored]:
    scored = []
    for codes in orders:
        score = annealer.score(codes)
        if score is not None:
            scored.append((*score, codes))
    return scored


def _distinct(pool: list[Scored]) -> list[Scored]:
    """Best first, one order per score."""
    result: list[Scored] = []
    for entry in sorted(pool, key=lambda entry: entry[:2]):
        if not result or entry[:2] != result[-1][:2]:
            result.append(entry)
    return result
