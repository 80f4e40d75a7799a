"""Search beyond the first orders: more orders to begin with, then annealing by halving.

Everything is counted in tries, so that a seed decides the result; the time limit only cuts it off.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from zbcompile.planner.core.compiled import can_compile
from zbcompile.planner.core.dispatch import Dispatcher, dispatch_pays
from zbcompile.planner.core.instance import Codes, Instance, is_chain
from zbcompile.planner.core.scorer import Scored, Scorer
from zbcompile.planner.improve.anneal import Annealer
from zbcompile.planner.improve.fold import Folded, fold
from zbcompile.planner.improve.redispatch import redispatched
from zbcompile.planner.incumbent import Incumbent
from zbcompile.planner.starts.kind_ranking import kind_ranking_orders
from zbcompile.planner.starts.offset_key_orders import offset_key_orders
from zbcompile.planner.starts.v_list import v_list_orders

__all__ = ["Effort", "Search"]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to search.

    Attributes
    ----------
    blocks, dispatches
        Tries of each decoder of offset keys.
    tries
        Annealing tries per order in the first round; three times as many in each further round, over the
        better third of the orders.
    orders
        Most orders annealed: few where every try is slow.
    """

    blocks: int
    dispatches: int
    tries: int
    orders: int

    @staticmethod
    def of(instance: Instance, level: int = 1) -> Effort:
        """Return a budget that shrinks with the number of actions, so that the seconds stay in bounds."""
        actions = 3 * instance.num_stages * instance.num_microbatches
        scale = min(1.0, 1200 / actions)
        return Effort(
            max(15, int(40 * scale)),
            max(60, int(800 * scale * min(3, level))),
            max(500, int(8_000 * scale * level)),
            12 if actions < 6000 else 5,
        )


_HEATS = (4e-4, 1.5e-4)
_CHAIN_HEATS = (4e-4, 3e-3, 1e-3, 1.5e-4)
"""First temperatures to take in turn, as shares of the value; a chain's values lie further apart."""

_HOPELESS = 1.05
"""Orders longer than the best by this factor are not annealed, but three are always."""


class Search:
    """A search in steps: `start` collects orders, `anneal_folded` and `anneal` improve them by halving.

    Parameters
    ----------
    incumbent
        The problem, its best order, and the time that is left.
    effort
        How much to search.
    seed
        Decides all random choices.
    """

    def __init__(self, incumbent: Incumbent, effort: Effort, seed: int) -> None:
        self.incumbent, self.effort, self.seed = incumbent, effort, seed
        self.scorer = Scorer(incumbent.instance)
        self.pool: list[Scored] = []

    def start(self, initial: list[Codes]) -> None:
        """Take the best of the initial orders, V list schedules, kind rankings and redispatched orders."""
        instance, scorer, rng = self.incumbent.instance, self.scorer, random.Random(self.seed)
        scored = _distinct(_scored(scorer, initial))
        most = int(scored[0][0] * _HOPELESS) if scored else None
        scored += v_list_orders(instance, scorer, most, self._over)
        if dispatch_pays(instance):
            scored += kind_ranking_orders(instance, scorer, Dispatcher(instance), rng, self._over)
        found = _distinct(scored)[:4]
        self._offer(found + self._redispatched([codes for _, _, codes in found]))

    def add_offset_key_orders(self) -> None:
        """Take orders decoded from offset keys."""
        rng = random.Random(self.seed)
        blocks, dispatches = self.effort.blocks, self.effort.dispatches
        self._offer(offset_key_orders(self.incumbent, self.scorer, rng, blocks=blocks, dispatches=dispatches))

    def _offer(self, found: list[Scored]) -> None:
        self._take(found)
        for _, _, codes in self.pool:
            self.incumbent.offer(codes, "pattern")

    def _redispatched(self, orders: list[Codes]) -> list[Scored]:
        """Return orders of several stages per rank with their actions placed anew."""
        found: list[Scored] = []
        instance, tries = self.incumbent.instance, self.effort.dispatches // 2
        if is_chain(instance) or not dispatch_pays(instance):
            return found
        dispatcher = Dispatcher(instance)
        for k, codes in enumerate(orders):
            rng = random.Random(self.seed + k)
            found += redispatched(instance, codes, self.scorer, dispatcher, tries, rng, self._over)
        return found

    def _over(self) -> bool:
        return self.incumbent.seconds_left <= 0

    def anneal_folded(self, reserve_s: float = 0.0, last: int = 27) -> list[Folded]:
        """Anneal the orders with a periodic middle without its repetitions; the results join the pool.

        Parameters
        ----------
        reserve_s
            Seconds of the limit to leave for what comes after.
        last
            Tries of the last round, in those of the first.

        Returns
        -------
        list of Folded
            All that was found.
        """
        incumbent = self.incumbent
        starts = [
            fold(incumbent.instance, codes, self.scorer)
            for _, _, codes in self.pool
            if incumbent.seconds_left > reserve_s
        ]
        found = self._halve([start for start in starts if start is not None], reserve_s, last)
        self._take(_scored(self.scorer, [folded.unfold() for folded in found]))
        return found

    def _take(self, found: list[Scored]) -> None:
        """Let orders join the pool: the best stay, as many as are annealed."""
        pool = _distinct(found + self.pool)[: self.effort.orders]
        self.pool = [e for k, e in enumerate(pool) if k < 3 or e[0] <= _HOPELESS * pool[0][0]]

    def anneal(self, reserve_s: float = 0.0) -> None:
        """Anneal every order of the pool, and leave ``reserve_s`` seconds for what comes after."""
        self._halve([Folded(self.incumbent.instance, codes) for _, _, codes in self.pool], reserve_s, 27)

    def _halve(self, starts: list[Folded], reserve_s: float, last: int) -> list[Folded]:
        """Anneal all; the better third goes on with three times the tries. Return all that was found.

        The last two rounds start twice from the best.
        """
        incumbent, tries, used, every = self.incumbent, self.effort.tries, 0, []
        while starts and not incumbent.done and incumbent.seconds_left > reserve_s:
            found: list[tuple[tuple[int, int], Folded]] = []
            for improved in self._round(starts, tries, used, reserve_s):
                every.append(improved)
                codes = improved.unfold()
                incumbent.offer(codes, "search")
                incumbent.report("search")
                score = self.scorer.score(codes)
                if score is not None:
                    found.append((score, improved))
                if incumbent.done:
                    return every
            if tries >= last * self.effort.tries:
                break
            used += len(starts)
            tries *= 3
            found.sort(key=lambda entry: entry[0])
            kept = [one for k, (score, one) in enumerate(found) if k == 0 or score != found[k - 1][0]]
            starts = kept[: len(starts) // 3] if len(starts) >= 6 else kept[:1] * 2
        return every

    def _round(self, starts: list[Folded], tries: int, used: int, reserve_s: float) -> Iterator[Folded]:
        """Anneal all, on as many cores as there are: who computes what does not depend on their number."""
        incumbent, halted = self.incumbent, threading.Event()
        heats = _CHAIN_HEATS if is_chain(incumbent.instance) else _HEATS

        def run(k: int) -> Folded:
            number, start = used + k, starts[k]
            found = Annealer(start.instance).run(
                start.codes,
                tries,
                seed=self.seed * 1000 + number + 1,
                heat=heats[number % len(heats)],
                goal=incumbent.bound.value_ns if start.repeats == 0 else 0,
                stop=lambda: halted.is_set() or incumbent.seconds_left <= reserve_s,
                frozen_blocks=start.frozen_blocks,
            )
            return replace(start, codes=found)

        if not can_compile():
            yield from map(run, range(len(starts)))
            return
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores:
            try:
                yield from cores.map(run, range(len(starts)))
            finally:
                halted.set()


def _scored(scorer: Scorer, orders: list[Codes]) -> list[Scored]:
    """Return the orders that are legal, with their scores."""
    scored = []
    for codes in orders:
        score = scorer.score(codes)
        if score is not None:
            scored.append((*score, codes))
    return scored


def _distinct(pool: list[Scored]) -> list[Scored]:
    """Return the orders best first, one per score."""
    result: list[Scored] = []
    for entry in sorted(pool, key=lambda entry: entry[:2]):
        if not result or entry[:2] != result[-1][:2]:
            result.append(entry)
    return result
