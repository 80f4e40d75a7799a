"""Search beyond the first orders: patterns and list schedules evolved, then annealing by halving.

Everything is counted in tries, so that a seed decides the result; the time limit only cuts it off.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from zbcompile.planner.anneal import Annealer
from zbcompile.planner.blocks import block_order
from zbcompile.planner.dispatch import Dispatcher
from zbcompile.planner.flat import Codes, Flat
from zbcompile.planner.offsets import Pattern, mutate, standard_patterns, waves_of
from zbcompile.planner.state import Best

__all__ = ["Effort", "Search", "block_orders", "dispatched_orders", "improve", "pattern_orders"]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to search.

    blocks, dispatches : patterns tried by each decoder. tries : annealing tries per order in the first
    round; three times as many in each further round, over the better third of the orders. seeds : most
    orders annealed: few where every try is slow.
    """

    blocks: int = 40
    dispatches: int = 400
    tries: int = 40_000
    seeds: int = 12

    @staticmethod
    def of(flat: Flat, level: int = 1) -> Effort:
        """A budget that shrinks with the number of actions, so that the seconds stay in bounds."""
        actions = 3 * flat.num_stages * flat.num_microbatches
        scale = min(1.0, 1200 / actions)
        return Effort(
            max(15, int(40 * scale)),
            max(60, int(400 * scale * min(2, level))),
            max(500, int(40_000 * scale * level)),
            12 if actions < 2000 else 5 if actions < 4000 else 2,
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


def dispatched_orders(
    flat: Flat, annealer: Annealer, dispatcher: Dispatcher, tries: int, period: int, rng: random.Random
) -> list[Scored]:
    """The two best orders of `tries` recipes decoded by keyed dispatch.

    A recipe is a pattern and the most microbatches in flight per stage; both are changed, since
    under a tight cap the limits decide more than the pattern.
    """
    standard = [
        replace(pattern, period=period) for pattern in standard_patterns(len(waves_of(flat)), flat.num_ranks)
    ]
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
    found: list[Scored] = []
    several = any(len(stages) > 1 for stages in best.flat.stages_of)
    if several and best.seconds_left > 0:
        found = block_orders(best.flat, annealer, effort.blocks, rng)
    dispatcher, slots = Dispatcher(best.flat), 3 * -(-best.flat.num_stages // best.flat.num_ranks)
    for period in (slots, slots, slots, slots + 3) if several else (slots, 2 * slots):
        own = random.Random(rng.random())
        if best.seconds_left > 0:
            found += dispatched_orders(best.flat, annealer, dispatcher, effort.dispatches, period, own)
    return found


class Search:
    """The two halves of a search: `start` collects orders, `anneal` improves them by halving."""

    def __init__(self, best: Best, effort: Effort, seed: int) -> None:
        self.best, self.effort, self.seed = best, effort, seed
        self.annealer = Annealer(best.flat)
        self.pool: list[Scored] = []

    def start(self, seeds: list[Codes]) -> None:
        """Take the best of the orders given and of those that patterns make."""
        found = _distinct(_scored(self.annealer, seeds))[:4]
        found += pattern_orders(self.best, self.annealer, self.effort, random.Random(self.seed))
        self.pool = _distinct(found)[: self.effort.seeds]
        for _, _, codes in self.pool:
            self.best.offer(codes, "pattern")

    def anneal(self, reserve_s: float = 0.0) -> None:
        """Anneal every order; the better third goes on with three times the tries, until one is left.

        reserve_s : seconds of the limit to leave for what comes after.
        """
        best, pool, tries, turn = self.best, self.pool, self.effort.tries, 0

        def over() -> bool:
            return best.seconds_left <= reserve_s

        while pool and not best.done and not over():
            following: list[Scored] = []
            for _, _, codes in pool:
                turn += 1
                improved = self.annealer.run(
                    codes,
                    tries,
                    seed=self.seed * 1000 + turn,
                    heat=_HEATS[turn % len(_HEATS)],
                    goal=best.bound.value_ns,
                    stop=over,
                )
                following.extend(_scored(self.annealer, [improved]))
                best.offer(improved, "search")
                best.report("search")
                if best.done:
                    return
            if len(pool) == 1:
                return
            pool = _distinct(following)[: max(1, len(pool) // 3)]
            tries *= 3


def improve(best: Best, seeds: list[Codes], effort: Effort, seed: int) -> None:
    """Both halves of a `Search` in a row."""
    if not best.done:
        search = Search(best, effort, seed)
        search.start(seeds)
        search.anneal()


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
