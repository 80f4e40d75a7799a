"""Search beyond the first orders: patterns and list schedules evolved, then annealing by halving.

Everything is counted in tries, so that a seed decides the result; the time limit only cuts it off.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from zbcompile.planner.anneal import Annealer
from zbcompile.planner.blocks import block_order
from zbcompile.planner.dispatch import Dispatcher
from zbcompile.planner.flat import Codes, Flat
from zbcompile.planner.offsets import Pattern, mutate, standard_patterns, waves_of
from zbcompile.planner.state import Best

__all__ = ["Effort", "block_orders", "dispatched_orders", "improve", "pattern_orders"]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to search.

    blocks, dispatches : patterns tried by each decoder. tries : annealing tries per order in the first
    round; three times as many in each further round, over the better third of the orders.
    """

    blocks: int = 40
    dispatches: int = 500
    tries: int = 40_000

    @staticmethod
    def of(flat: Flat, level: int = 1) -> Effort:
        """A budget that shrinks with the number of actions, so that the seconds stay in bounds."""
        actions = 3 * flat.num_stages * flat.num_microbatches
        scale = min(1.0, 1200 / actions)
        return Effort(
            max(15, int(40 * scale)), max(60, int(500 * scale)), max(500, int(40_000 * scale * level))
        )


Scored = tuple[int, int, Codes]
_HEATS = (4e-4, 1.5e-4)
"""First temperatures to take in turn, as shares of the value."""


def block_orders(flat: Flat, annealer: Annealer, tries: int, rng: random.Random) -> list[Scored]:
    """The two best orders of `tries` patterns decoded as repeated blocks."""
    standard = standard_patterns(len(waves_of(flat)), flat.num_ranks)
    pool: list[tuple[int, int, Pattern, Codes]] = []
    for k in range(tries):
        if k < len(standard) or not pool:
            pattern = standard[k % len(standard)]
        else:
            pattern = mutate(pool[rng.randrange(min(8, len(pool)))][2], rng)
        codes = block_order(flat, pattern)
        score = annealer.score(codes)
        if score is not None and all(score != entry[:2] for entry in pool):
            pool = sorted([*pool, (*score, pattern, codes)], key=lambda entry: entry[:2])[:12]
    return [(value, score, codes) for value, score, _, codes in pool[:2]]


def dispatched_orders(flat: Flat, annealer: Annealer, tries: int, rng: random.Random) -> list[Scored]:
    """The two best orders of `tries` recipes decoded by keyed dispatch.

    A recipe is a pattern and the most microbatches in flight per stage; both are changed, since
    under a tight cap the limits decide more than the pattern.
    """
    standard = standard_patterns(len(waves_of(flat)), flat.num_ranks)
    dispatcher = Dispatcher(flat)
    pool: list[tuple[int, int, Pattern, list[int], Codes]] = []
    for k in range(tries):
        turn, first = divmod(k, len(standard))
        if turn < 3 or not pool:
            pattern = standard[first]
            keys, flying = pattern.keys(flat)
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
            keys, _ = pattern.keys(flat)
        codes = dispatcher.run(keys, flying, pattern.share)
        score = None if codes is None else annealer.score(codes)
        if codes is not None and score is not None and all(score != entry[:2] for entry in pool):
            pool = sorted([*pool, (*score, pattern, flying, codes)], key=lambda entry: entry[:2])[:16]
    return [(entry[0], entry[1], entry[4]) for entry in pool[:2]]


def pattern_orders(best: Best, annealer: Annealer, effort: Effort, rng: random.Random) -> list[Scored]:
    """Orders from patterns by both decoders, as far as the time goes."""
    found = [] if best.seconds_left <= 0 else block_orders(best.flat, annealer, effort.blocks, rng)
    if best.seconds_left > 0:
        found += dispatched_orders(best.flat, annealer, effort.dispatches, rng)
    return found


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
