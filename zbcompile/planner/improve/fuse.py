"""Split or fuse: for every (stage, microbatch) either B and W, or one BW.

A split lets the gradient leave before W has run and lets W fill a gap. A fused BW is shorter where the
profile says so (one collective less), holds no M_W, and where sends hold up their rank a gradient sent early
does so anyway. No rule is built in: whole patterns are tried first, then changes to the best of them, each
timed under the send mode. Order and split are searched together, since fusing frees memory for further F's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zbcompile.planner.core.early_weights import fitted
from zbcompile.planner.core.instance import Codes, Fusing, Instance, W
from zbcompile.planner.core.score import fits
from zbcompile.planner.improve.jitter import jittered_mean
from zbcompile.planner.improve.row_changes import (
    RowChange,
    fuse_range,
    in_order,
    small_move,
    split_here,
)
from zbcompile.planner.incumbent import Order, extended
from zbcompile.planner.run import Run
from zbcompile.planner.starts.fused_patterns import (
    Pattern,
    neighbours,
    pattern_codes,
    patterns,
    some_by_rule,
    split_windows,
)
from zbcompile.schedule.semantics import SendMode

__all__ = ["RuleOfThumb", "SplitOrFuse", "fusing_matters"]

_HEAT = 0.001
"""By which share of the best value annealed moves may lengthen an order at first, e-fold as seldom each."""

_Change = tuple[Sequence[int], RowChange, int, int]
"""Stages, and what to do to their microbatches from one to another, as `row_changes` takes it."""


def fusing_matters(instance: Instance, sends: SendMode) -> bool:
    """Return whether fusing can shorten any order.

    It can if a BW is cheaper than B and W or holds less somewhere, or if sends hold up their rank.
    """
    cheaper = any(
        d < b + w for d, b, w in zip(instance.fused, instance.backward, instance.weight, strict=True)
    )
    wide = any(uses.split_holds_more for uses in instance.memory.uses)
    return cheaper or wide or sends.holds_rank


@dataclass(frozen=True, slots=True)
class RuleOfThumb:
    """The rule of thumb, among the first orders: long orders in fewer forms."""

    name: str = "rule_of_thumb"
    instant: bool = True

    def applies(self, run: Run) -> bool:
        """Return whether fusing matters and every rank has one stage."""
        return run.alone and fusing_is_searched(run)

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield the rule's forms."""
        for codes in some_by_rule(run.instance):
            yield Order(codes, (self.name,))


@dataclass(frozen=True, slots=True)
class SplitOrFuse:
    """Orders with some backwards fused, counted in tries: a few seconds.

    Attributes
    ----------
    whole
        Whether to start from whole patterns, where every rank has one stage, as well as from the best order.
    """

    name: str = "split_or_fuse"
    whole: bool = True

    def applies(self, run: Run) -> bool:
        """Return whether fusing matters; the second time only where orders are annealed in between."""
        return fusing_is_searched(run) and (self.whole or not run.holds_rank)

    def improve(self, run: Run) -> Iterator[Order]:
        """Yield every order that is shorter, as long with shorter rank spans, or with fewer splits."""
        tries = run.effort.fusing if self.whole else run.effort.fusing // 3
        search = _Search(run, self.name, tries, share=0.9 if run.holds_rank else 0.3)
        if self.whole and run.alone:
            yield from search.whole_patterns()
        if not search.codes:  # the parts that make first orders were left out
            return
        annealed = run.holds_rank and run.several
        search.kept = 3 * search.left // 4 if annealed else 0
        yield from search.swept(_range_changes(run.instance))
        search.kept = 0
        if annealed:
            yield from search.annealed_moves()
        search.settle_ties()
        if search.score is not None:
            yield replace(search.found(), settles_tie=True)


def fusing_is_searched(run: Run) -> bool:
    """Return whether the planner decides what fuses, and it can shorten an order."""
    return run.options.fusing is Fusing.AUTO and fusing_matters(run.instance, run.problem.sends)


class _Search:
    """One search, with the best order by value, then rank spans, then number of splits."""

    def __init__(self, run: Run, name: str, tries: int, share: float) -> None:
        self.run, self.instance, self.clock = run, run.instance, run.incumbent.clock
        self.name, self.left, self.kept = name, tries, 0
        self.reserve = run.seconds_left * (1 - share)
        self.score: tuple[int, int, int] | None = None
        self.codes: Codes = []
        self.lineage: tuple[str, ...] = ()
        if run.incumbent.order is not None:
            self.take(run.incumbent.order.codes)
            self.lineage = run.incumbent.lineage

    @property
    def over(self) -> bool:
        """Whether no tries but those kept or no time are left, or nothing is left to gain."""
        return self.left <= self.kept or self.run.proved or self.run.seconds_left <= self.reserve

    def found(self) -> Order:
        """Return the best order with its lineage."""
        return Order(self.codes, self.lineage)

    def take(self, codes: Codes, kind: str = "") -> bool:
        """Keep an order if it is shorter, or as long with shorter rank spans, or with fewer splits.

        ``kind`` names orders that are made from nothing.
        """
        self.left -= 1
        fitting = fitted(self.instance, codes)
        if fitting is None:
            return False
        codes, found = fitting, self.clock.score(fitting)
        if found is None:
            return False
        score = (*found, _splits(codes))
        if self.score is not None and score >= self.score:
            return False
        self.score, self.codes = score, codes
        self.lineage = (f"{self.name} {kind}",) if kind else extended(self.lineage, self.name)
        return True

    def whole_patterns(self) -> Iterator[Order]:
        """Try every whole pattern once, then the best one's neighbours until none is better."""
        instance, seen = self.instance, set[Pattern]()
        best: tuple[tuple[int, int], Pattern] | None = None
        found = patterns(instance, split_windows(instance))
        while True:
            before = best
            for pattern in found:
                if self.over:
                    return
                if pattern in seen:
                    continue
                seen.add(pattern)
                codes = fitted(instance, pattern_codes(instance, pattern))
                score = None if codes is None else self.clock.score(codes)
                self.left -= 1
                if codes is not None and score is not None and (best is None or score < best[0]):
                    best = score, pattern
                    if self.take(codes, "pattern"):
                        yield self.found()
            if best is None or best == before:
                return
            found = neighbours(best[1], instance.num_microbatches)

    def swept(self, changes: Sequence[_Change]) -> Iterator[Order]:
        """Try changes to the best order so far, one after the other, until none of them helps."""
        better = True
        while better and not self.over:
            better = False
            for change in changes:
                if self.over:
                    return
                codes = self.changed(*change)
                if codes is not None and self.take(codes):
                    better = True
                    yield self.found()

    def changed(self, stages: Sequence[int], change: RowChange, low: int, high: int) -> Codes | None:
        """Return the best order so far with the rows of some stages changed; ``None`` if nothing changes."""
        codes = list(self.codes)
        for s in stages:
            rank = self.instance.rank_of[s]
            codes[rank] = change(codes[rank], s, low, high)
        return None if codes == self.codes else codes

    def moved(self, codes: Codes, rng: random.Random) -> Codes | None:
        """Move an action of one rank by a few places or flip a backward, one to three times.

        ``None`` if that leaves the order as it is.
        """
        rank = rng.randrange(self.instance.num_ranks)
        row = codes[rank]
        for _ in range(rng.randint(1, 3)):
            moved = small_move(row, rng)
            row = moved if in_order(moved) else row
        return None if row is codes[rank] else [row if r == rank else old for r, old in enumerate(codes)]

    def annealed_moves(self) -> Iterator[Order]:
        """With the tries that are left, move actions or flip backwards at random.

        Longer orders are taken on the way, ever less so: for orders that hang together by messages. An
        order is worth its value and a tenth of its ranks' mean span, so that orders of one value differ.
        """
        rng, instance, tries = random.Random(self.run.seed), self.instance, max(1, self.left)

        def worth(score: Sequence[int]) -> float:
            return score[0] + score[1] / (10 * instance.num_ranks)

        if self.score is None:
            return
        codes, cost = self.codes, worth(self.score)
        while not self.over:
            self.left -= 1
            changed = self.moved(codes, rng)
            found = self.clock.score(changed) if changed and fits(instance, changed) else None
            if changed is None or found is None:
                continue
            heat = _HEAT * self.score[0] * self.left / tries
            if worth(found) <= cost - heat * math.log(1 - rng.random()):
                codes, cost = changed, worth(found)
            if found < self.score[:2] and self.take(changed):
                yield self.found()

    def settle_ties(self) -> None:
        """Among equally long orders, keep the one that varying times hurt least, then that with fewer splits.

        Compared per stage and kind of phase (start, middle, end), and always within the best value. Means
        that differ by less than a ten-thousandth count as equal.
        """
        instance, clock, run = self.instance, self.clock, self.run
        if self.score is None or run.seconds_left <= self.reserve / 2:
            return
        m, p = instance.num_microbatches, instance.num_ranks
        phases = sorted({0, min(p, m), max(0, m - p), m})
        grain = max(1, self.score[0] // 10_000)
        mean = jittered_mean(clock, self.codes, seed=run.seed)
        for s in range(instance.num_stages):
            for low, high in zip(phases, phases[1:], strict=False):
                for change in (fuse_range, split_here):
                    if run.seconds_left <= self.reserve / 2:
                        return
                    codes = self.changed((s,), change, low, high)
                    if codes is None or not fits(instance, codes) or clock.value(codes) != self.score[0]:
                        continue
                    other = jittered_mean(clock, codes, seed=run.seed)
                    alike = abs(other - mean) < grain
                    if _splits(codes) < _splits(self.codes) if alike else other < mean:
                        self.codes, mean = codes, other
                        self.lineage = extended(self.lineage, self.name)


def _range_changes(instance: Instance) -> list[_Change]:
    """Return changes to ranges of microbatches of one stage or of several: fuse, split."""
    m, p, every = instance.num_microbatches, instance.num_ranks, tuple(range(instance.num_stages))
    cuts = sorted({0, 1, *(k for k in (p // 2, p, m - p, m - p // 2, m - 1, m) if 0 < k <= m)})
    windows = [(low, high) for a, low in enumerate(cuts) for high in cuts[a + 1 :]]
    groups: list[tuple[int, ...]] = [every, every[1:], *((s,) for s in every)]
    kinds = (fuse_range, split_here)
    return [(stages, change, *window) for stages in groups for window in windows for change in kinds]


def _splits(codes: Codes) -> int:
    """Return the number of split backwards."""
    return sum(kind == W for row in codes for kind, _ in row)
