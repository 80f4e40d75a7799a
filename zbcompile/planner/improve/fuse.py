"""Split or fuse: for every (stage, microbatch) either B and W, or one BW.

A split lets the gradient leave before W has run and lets W fill a gap; a fused BW is shorter where
the profile says so (one collective less), holds no M_W, and under ``rendezvous`` and ``batched``
transports a gradient sent early holds up its rank anyway. No rule is built in: whole patterns are
tried first, then changes to the best of them, each timed by the event graph of the transport.
Order and split are searched together, since fusing frees memory for further F's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from zbcompile.planner.core.instance import BW, B, Codes, F, Instance, W, shaped
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.core.score import fits
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.improve.jitter import jittered_mean
from zbcompile.planner.incumbent import Incumbent
from zbcompile.planner.starts.fused_patterns import (
    FusedPattern,
    fused_list_schedule,
    patterns,
    window_choices,
)
from zbcompile.planner.starts.list_schedule import Recipe, standard_limits
from zbcompile.planner.starts.offset_key_orders import offset_key_orders

__all__ = ["fuse_range", "fusing_tries", "improve_fusing", "matters", "split_range"]


Row = list[tuple[int, int]]
_Change = Callable[[Row, int, int, int], Row]


def matters(instance: Instance, transport: str) -> bool:
    """Whether fusing can shorten any order: a cheaper BW, a smaller footprint, or sends that block."""
    cheaper = any(
        d < b + w for d, b, w in zip(instance.fused, instance.backward, instance.weight, strict=True)
    )
    wide = any(w > b for w, b in zip(instance.pending, instance.saved, strict=True))
    return cheaper or wide or transport != "async"


def fuse_range(row: Row, stage: int, low: int, high: int, *, own: bool) -> Row:
    """The row with the backwards of microbatches low..high-1 of a stage fused.

    own : the W that belongs to each of them goes, else the first W behind it. Memory never rises.
    """
    pending: list[bool] = []
    result: Row = []
    number = spare = 0
    for kind, s in row:
        if s != stage or kind == F:
            result.append((kind, s))
        elif kind == W:
            chosen = pending.pop(0)
            if chosen if own else spare:
                spare -= not own
            else:
                result.append((W, s))
        else:
            inside = low <= number < high
            number += 1
            if kind == B:
                pending.append(inside)
                spare += inside
            result.append((BW if inside else kind, s))
    return result


def split_range(row: Row, stage: int, low: int, high: int, later: int) -> Row:
    """The row with fused backwards low..high-1 of a stage split, each W ``later`` actions behind its B."""
    result: Row = []
    due: list[int] = []
    number = 0
    for kind, s in row:
        while due and due[0] <= len(result):
            due.pop(0)
            result.append((W, stage))
        if s == stage and kind in (B, BW):
            if kind == BW and low <= number < high:
                kind = B
                due.append(len(result) + 1 + later)
            number += 1
        result.append((kind, s))
    return result + [(W, stage)] * len(due)


def fusing_tries(actions: int) -> int:
    """Tries for a step of so many actions that take a few seconds, so that the count ends the search."""
    return max(200, min(1500, 400_000 // max(1, actions)))


def improve_fusing(
    incumbent: Incumbent, *, tries: int = 1500, seed: int = 0, share: float = 0.9, whole: bool = True
) -> None:
    """Offer orders with some backwards fused, counted in tries.

    share : most of the time left that may be used. whole : start from whole patterns and list
        schedules, not only from the best order so far.
    """
    if incumbent.done or not matters(incumbent.instance, incumbent.problem.transport):
        return
    search = _Search(incumbent, tries, seed, share)
    try:
        if whole and any(len(stages) > 1 for stages in incumbent.instance.stages_of):
            search.offset_patterns()
        elif whole:
            search.whole_patterns()
            search.list_schedules()
        search.ranges()
        search.single_actions()
        search.small_moves()
        search.settle_ties()
    finally:
        search.hand_over()


class _Search:
    def __init__(self, incumbent: Incumbent, tries: int, seed: int, share: float) -> None:
        self.best, self.left, self.seed = incumbent, tries, seed
        self.reserve = incumbent.seconds_left * (1 - share)
        self.score: tuple[int, int, int] | None = None
        self.codes: Codes = []
        if incumbent.codes is not None:
            self.take(incumbent.codes)

    @property
    def over(self) -> bool:
        """No tries or no time left, or nothing left to gain."""
        return self.left <= 0 or self.best.proved or self.best.seconds_left <= self.reserve

    def take(self, codes: Codes, origin: str = "split or fuse") -> bool:
        """Keep an order if it is shorter, or as long with shorter rank spans, or with fewer splits."""
        self.left -= 1
        if not fits(self.best.instance, codes):
            return False
        found = self.best.clock.score(codes)
        if found is None:
            return False
        score = (*found, sum(kind == W for row in codes for kind, _ in row))
        if self.score is not None and score >= self.score:
            return False
        self.score, self.codes = score, codes
        self.best.offer(codes, origin)
        return True

    def whole_patterns(self) -> None:
        """Every pattern once, then the best one's neighbours until none is better."""
        instance, kept = self.best.instance, None
        seen: set[FusedPattern] = set()

        def try_pattern(pattern: FusedPattern) -> bool:
            nonlocal kept
            if pattern in seen:
                return False
            seen.add(pattern)
            codes = pattern.codes(instance)
            score = self.best.clock.score(codes)
            self.left -= 1
            if score is None or (kept is not None and score >= kept[0]):
                return False
            kept = (score, pattern)
            self.take(codes)
            return True

        for pattern in patterns(instance):
            if self.over:
                return
            try_pattern(pattern)
        better = True
        while better and kept is not None:
            better = False
            for pattern in kept[1].neighbours(instance.num_microbatches):
                if self.over:
                    return
                better = try_pattern(pattern) or better

    def list_schedules(self) -> None:
        """The list scheduler with each choice of split windows."""
        instance = self.best.instance
        paths = Paths.of(instance)
        trips = [paths.f_to_b(stages[0], stages[0]) for stages in instance.stages_of]
        budget = tuple(max(0, self.best.bound.value_ns - instance.work(r)) for r in range(instance.num_ranks))
        for windows in window_choices(instance):
            for limits in standard_limits(instance, trips):
                for theta in (100, 50, 0):
                    if self.over:
                        return
                    codes = fused_list_schedule(instance, Recipe(limits, theta, budget), windows)
                    if codes is not None:
                        self.take(codes)

    def offset_patterns(self) -> None:
        """Several stages per rank: the patterns of the split search, as they are and all fused."""
        scorer, rng = Scorer(self.best.instance), random.Random(self.seed)
        for _, _, codes in offset_key_orders(self.best, scorer, rng, blocks=20, dispatches=40):
            for order in (codes, shaped(codes, "always")):
                if self.over:
                    return
                self.take(order)

    def ranges(self) -> None:
        """Fuse or split ranges of microbatches of one stage or of several, until nothing helps."""
        m, p = self.best.instance.num_microbatches, self.best.instance.num_ranks
        every = tuple(range(self.best.instance.num_stages))
        cuts = sorted({0, 1, *(k for k in (p // 2, p, m - p, m - p // 2, m - 1, m) if 0 < k <= m)})
        windows = [(low, high) for a, low in enumerate(cuts) for high in cuts[a + 1 :]]
        better = True
        while better and not self.over:
            better = False
            for stages in (every, every[1:], *((s,) for s in every)):
                for low, high in windows:
                    for change in (_fuse_own, _fuse_next, _split_here):
                        better = self.change(stages, change, low, high) or better
                for first in range(0, m, max(1, m // 8)):
                    better = self.change(stages, _advance, first, m) or better

    def change(self, stages: Sequence[int], change: _Change, low: int, high: int) -> bool:
        """Change the rows of some stages of the best order so far; True if that is better."""
        codes = list(self.codes)
        for s in stages:
            rank = self.best.instance.rank_of[s]
            codes[rank] = change(codes[rank], s, low, high)
        return not self.over and codes != self.codes and self.take(codes)

    def single_actions(self) -> None:
        """Fuse or split single backwards, a split's W directly behind its B or a few actions later."""
        instance, better = self.best.instance, True
        while better and not self.over:
            better = False
            for s in range(instance.num_stages):
                for i in range(instance.num_microbatches):
                    for change in (_fuse_own, _fuse_next, _split_here, _split_later):
                        better = self.change((s,), change, i, i + 1) or better

    def small_moves(self) -> None:
        """With the tries that are left: move an action by a few places, or flip a backward, at random."""
        rng, instance = random.Random(self.seed), self.best.instance
        while not self.over:
            rank = rng.randrange(instance.num_ranks)
            row = self.codes[rank]
            for _ in range(rng.randint(1, 3)):
                moved = _small_move(row, rng)
                row = moved if _in_order(moved) else row
            if row is self.codes[rank]:
                self.left -= 1
            else:
                self.take([row if r == rank else old for r, old in enumerate(self.codes)])

    def settle_ties(self) -> None:
        """Among equally long orders, the one that varying times hurt least, then the one with fewer splits.

        Compared per stage and kind of phase (start, middle, end), and always within the best value.
        Means that differ by less than a ten-thousandth count as equal.
        """
        instance, clock = self.best.instance, self.best.clock
        if self.score is None:
            return
        m, p = instance.num_microbatches, instance.num_ranks
        phases = sorted({0, min(p, m), max(0, m - p), m})
        grain = max(1, self.score[0] // 10_000)
        mean = jittered_mean(clock, self.codes, seed=self.seed)
        for s in range(instance.num_stages):
            for low, high in zip(phases, phases[1:], strict=False):
                for change in (_fuse_own, _split_here):
                    if self.best.seconds_left <= self.reserve / 2:
                        return
                    rank = instance.rank_of[s]
                    row = change(self.codes[rank], s, low, high)
                    codes = [row if r == rank else old for r, old in enumerate(self.codes)]
                    if (
                        codes == self.codes
                        or not fits(instance, codes)
                        or clock.value(codes) != self.score[0]
                    ):
                        continue
                    other = jittered_mean(clock, codes, seed=self.seed)
                    alike = abs(other - mean) < grain
                    if _splits(codes) < _splits(self.codes) if alike else other < mean:
                        self.codes, mean = codes, other

    def hand_over(self) -> None:
        """Among orders of the best value, give back the one that ties were settled for."""
        if self.score is not None and self.score[0] == self.best.value:
            self.best.codes = self.codes


def _splits(codes: Codes) -> int:
    return sum(kind == W for row in codes for kind, _ in row)


def _small_move(row: Row, rng: random.Random) -> Row:
    """Another row: one backward flipped, or one action moved by up to four places."""
    k = rng.randrange(len(row))
    kind, s = row[k]
    if kind in (B, BW) and rng.random() < 0.3:
        i = sum(other in (B, BW) and stage == s for other, stage in row[:k])
        change = rng.choice((_fuse_own, _fuse_next, _split_here, _split_later))
        return change(row, s, i, i + 1)
    rest = row[:k] + row[k + 1 :]
    place = max(0, min(len(rest), k + rng.choice((-4, -3, -2, -1, -1, 1, 1, 2, 3, 4))))
    return [*rest[:place], (kind, s), *rest[place:]]


def _in_order(row: Row) -> bool:
    """Whether no B stands before its F and no W before its B."""
    held: dict[int, list[int]] = {}
    for kind, s in row:
        pair = held.setdefault(s, [0, 0])
        if kind == F:
            pair[0] += 1
        elif kind == W:
            pair[1] -= 1
        else:
            pair[0] -= 1
            pair[1] += kind == B
        if min(pair) < 0:
            return False
    return True


def _fuse_own(row: Row, stage: int, low: int, high: int) -> Row:
    return fuse_range(row, stage, low, high, own=True)


def _fuse_next(row: Row, stage: int, low: int, high: int) -> Row:
    return fuse_range(row, stage, low, high, own=False)


def _split_here(row: Row, stage: int, low: int, high: int) -> Row:
    return split_range(row, stage, low, high, 0)


def _split_later(row: Row, stage: int, low: int, high: int) -> Row:
    return split_range(row, stage, low, high, 2)


def _advance(row: Row, stage: int, first: int, last: int) -> Row:
    """The row with each of the F's first..last-1 of a stage one place earlier among its F's."""
    places = [k for k, op in enumerate(row) if op == (F, stage)][first:last]
    if len(places) < 2:
        return row
    return [*row[: places[0]], (F, stage), *row[places[0] : places[-1]], *row[places[-1] + 1 :]]
