"""Evolution: the best few of some first settings are changed at random, again and again.

List schedules and offset keys are searched this way.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from zbcompile.planner.core.instance import Codes
from zbcompile.planner.core.scorer import Score, Scored

__all__ = ["Pool"]

T = TypeVar("T")


class Pool(Generic[T]):
    """The best settings so far, one per score.

    Parameters
    ----------
    score
        Returns a setting's score, or ``None`` if it makes no order.
    most
        How many are kept.
    changed
        How many of them, best first, are changed.

    Attributes
    ----------
    best
        (score, setting), best first.
    """

    def __init__(self, score: Callable[[T], Score | None], most: int = 16, changed: int = 8) -> None:
        self.score, self.most, self.changed = score, most, changed
        self.best: list[tuple[Score, T]] = []

    def take(self, setting: T) -> bool:
        """Score a setting, keep it if it is good enough, and return whether it is the best now."""
        score = self.score(setting)
        if score is None or any(score == known for known, _ in self.best):
            return False
        self.best = sorted([*self.best, (score, setting)], key=lambda entry: entry[0])[: self.most]
        return self.best[0][0] == score

    def orders(self, count: int, make: Callable[[T], Codes | None]) -> list[Scored]:
        """Return the orders of the best few settings with their scores."""
        made = ((score, make(setting)) for score, setting in self.best[:count])
        return [(*score, codes) for score, codes in made if codes is not None]

    def evolve(
        self,
        first: Iterable[T],
        change: Callable[[T, random.Random], T],
        rng: random.Random,
        tries: int,
        stop: Callable[[], bool] = lambda: False,
        patience: int = sys.maxsize,
    ) -> Iterator[T]:
        """Yield every setting that is better than all before.

        Parameters
        ----------
        first
            Settings to begin with.
        change
            Returns a setting with a few changes.
        rng
            Decides which one is changed.
        tries
            Most settings, the first ones included.
        stop
            Asked before every try whether to end early.
        patience
            Most tries without gain.
        """
        settings, last_gain = chain(first, self._changes(change, rng)), 0
        for number in range(tries):
            setting = None if stop() or number - last_gain > patience else next(settings, None)
            if setting is None:
                return
            if self.take(setting):
                last_gain = number
                yield setting

    def _changes(self, change: Callable[[T, random.Random], T], rng: random.Random) -> Iterator[T]:
        """Yield changed settings, as long as there are some to change."""
        while self.best:
            yield change(rng.choice(self.best[: self.changed])[1], rng)
