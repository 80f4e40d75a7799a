"""Kind ranking: keyed dispatch by a fixed ranking of the kinds of actions, whatever the microbatch.

Where memory does not bind, as with hardly more microbatches than ranks, good orders have no period: what
counts is whether an F of the first wave runs before a B of the second. The ways to rank the F's and B's of
each wave and the W's are few enough to be tried all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from math import factorial

from zbcompile.planner.core.dispatch import Dispatcher, dispatch_pays
from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.scorer import Scored, Scorer
from zbcompile.planner.core.tables import unpack
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run
from zbcompile.planner.starts.offset_keys import waves_of

__all__ = ["KindRanking", "kind_ranking_orders"]

_MOST = 120
"""Rankings tried: all of them for one or two stages per rank."""
_SHARES = (50, 100)


@dataclass(frozen=True, slots=True)
class KindRanking:
    """Keyed dispatch by rankings of the kinds."""

    name: str = "kind_ranking"
    instant: bool = False

    def applies(self, run: Run) -> bool:
        """Return whether there are few microbatches, and no send holds up its rank."""
        instance = run.instance
        few = instance.num_microbatches <= 2 * instance.num_ranks
        return few and not run.holds_rank and dispatch_pays(instance)

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield the best two."""
        rng, dispatcher = random.Random(run.seed), Dispatcher(run.instance)
        for value, score, codes in kind_ranking_orders(run.instance, run.scorer, dispatcher, rng, run.over):
            yield Order(codes, (self.name,), (value, score))


def kind_ranking_orders(
    instance: Instance,
    scorer: Scorer,
    dispatcher: Dispatcher,
    rng: random.Random,
    stop: Callable[[], bool] = lambda: False,
) -> list[Scored]:
    """Return the two best orders over the rankings, best first.

    Parameters
    ----------
    instance
        The problem.
    scorer
        Its scorer.
    dispatcher
        Its dispatcher.
    rng
        Draws the rankings where there are too many.
    stop
        Asked before every ranking whether to end early.

    Returns
    -------
    list of Scored
        For more than 2 p microbatches they are hardly ever any good.
    """
    m, waves = instance.num_microbatches, waves_of(instance)
    wave_of = {s: w for w, wave in enumerate(waves) for s in wave}
    classes = 2 * len(waves) + 1
    pool: list[Scored] = []
    for ranks in _rankings(classes, rng):
        if stop():
            break
        keys: list[int] = []
        for kind in range(3):
            for s in range(instance.num_stages):
                first = ranks[classes - 1 if kind == 2 else kind * len(waves) + wave_of[s]] * m
                keys.extend(range(first, first + m))
        for share in _SHARES:
            line = dispatcher.run_line(keys, [m] * instance.num_stages, share)
            score = None if line is None else scorer.score_line(dispatcher.offsets, line)
            if line is None or score is None or (len(pool) == 2 and score >= pool[-1][:2]):
                continue
            if all(score != entry[:2] for entry in pool):
                codes = unpack(instance, dispatcher.offsets, line)
                pool = sorted([*pool, (*score, codes)], key=lambda entry: entry[:2])[:2]
    return pool


def _rankings(classes: int, rng: random.Random) -> Iterator[tuple[int, ...]]:
    """Yield all permutations, or as many random ones as are tried."""
    if factorial(classes) <= _MOST:
        yield from permutations(range(classes))
        return
    for _ in range(_MOST):
        yield tuple(rng.sample(range(classes), classes))
