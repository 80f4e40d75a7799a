"""Split or fuse: for every (stage, microbatch) either B and W, or one BW.

A split lets the gradient leave before W has run and lets W fill a gap. A fused BW is shorter where the
profile says so (one collective less), holds no M_W, and where sends hold up their rank a gradient sent early
does so anyway. No rule is built in: whole patterns are tried first, then
changes to the best of them, each timed under the send mode. Order and split are searched
together, since fusing frees memory for further F's.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from zbcompile.planner.core.instance import Codes, Fusing, Instance, W, shaped
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.core.score import fits
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.improve.jitter import jittered_mean
from zbcompile.planner.improve.row_changes import (
    RowChange,
    advance,
    fuse_next,
    fuse_own,
    in_order,
    small_move,
    split_here,
    split_later,
)
from zbcompile.planner.incumbent import Incumbent
from zbcompile.planner.starts.fused_patterns import (
    FusedPattern,
    fused_list_schedule,
    fused_patterns,
    window_choices,
)
from zbcompile.planner.starts.list_schedule import Recipe, standard_limits
from zbcompile.planner.starts.offset_key_orders import offset_key_orders
from zbcompile.schedule.semantics import SendMode

__all__ = ["fusing_matters", "fusing_tries", "improve_fusing"]

_RULE_ACTIONS = 40_000
"""Most actions in all of the rule's forms that are offered: a fraction of a second."""


def fusing_matters(instance: Instance, sends: SendMode) -> bool:
    """Return whether fusing can shorten any order.

    It can if a BW is cheaper than B and W or holds less somewhere, or if sends hold up their rank.
    """
    cheaper = any(
        d < b + w for d, b, w in zip(instance.fused, instance.backward, instance.weight, strict=True)
    )
    wide = any(uses.split_holds_more for uses in instance.memory.uses)
    return cheaper or wide or sends.holds_rank


def fusing_tries(actions: int) -> int:
    """Return how many tries for a step of so many actions take a few seconds: the count ends the search."""
    return max(200, min(1500, 400_000 // max(1, actions)))


def improve_fusing(
    incumbent: Incumbent, *, tries: int = 1500, seed: int = 0, share: float = 0.9, whole: bool = True
) -> None:
    """Offer orders with some backwards fused, counted in tries.

    Parameters
    ----------
    incumbent
        What to offer them to, and the order to begin with.
    tries
        Most orders timed.
    seed
        Decides the random changes.
    share
        Most of the time left that may be used.
    whole
        Whether to start from whole patterns and list schedules as well as from the best order so far.
    """
    if incumbent.proved or not fusing_matters(incumbent.instance, incumbent.problem.sends):
        return
    if incumbent.done:
        _offer_rule(incumbent)
        return
    search = _Search(incumbent, tries, seed, share)
    try:
        if whole and any(len(stages) > 1 for stages in incumbent.instance.stages_of):
            search.keyed_orders()
        elif whole:
            search.whole_patterns()
            search.list_schedules()
        search.ranges()
        search.single_actions()
        search.small_moves()
        search.settle_ties()
    finally:
        search.hand_over()


def _offer_rule(incumbent: Incumbent) -> None:
    """Offer the rule of thumb where no time is left for a search: long orders in fewer forms.

    Does nothing if a rank has several stages.
    """
    instance = incumbent.instance
    if any(len(stages) != 1 for stages in instance.stages_of):
        return
    actions = 3 * instance.num_stages * instance.num_microbatches
    rule = window_choices(instance)[0]
    forms = (pattern for pattern in fused_patterns(instance) if pattern.windows == rule)
    for pattern in itertools.islice(forms, max(1, _RULE_ACTIONS // actions)):
        incumbent.offer(pattern.codes(instance), "rule of thumb")


class _Search:
    """One search, with the best order by value, then rank spans, then number of splits."""

    def __init__(self, incumbent: Incumbent, tries: int, seed: int, share: float) -> None:
        self.incumbent, self.left, self.seed = incumbent, tries, seed
        self.reserve = incumbent.seconds_left * (1 - share)
        self.score: tuple[int, int, int] | None = None
        self.codes: Codes = []
        if incumbent.codes is not None:
            self.take(incumbent.codes)

    @property
    def over(self) -> bool:
        """Whether no tries or no time are left, or nothing is left to gain."""
        return self.left <= 0 or self.incumbent.proved or self.incumbent.seconds_left <= self.reserve

    def take(self, codes: Codes) -> bool:
        """Keep an order if it is shorter, or as long with shorter rank spans, or with fewer splits."""
        self.left -= 1
        if not fits(self.incumbent.instance, codes):
            return False
        found = self.incumbent.clock.score(codes)
        if found is None:
            return False
        score = (*found, sum(kind == W for row in codes for kind, _ in row))
        if self.score is not None and score >= self.score:
            return False
        self.score, self.codes = score, codes
        self.incumbent.offer(codes, "split or fuse")
        return True

    def whole_patterns(self) -> None:
        """Try every fused pattern once, then the best one's neighbours until none is better."""
        instance, kept = self.incumbent.instance, None
        seen: set[FusedPattern] = set()

        def try_pattern(pattern: FusedPattern) -> bool:
            nonlocal kept
            if pattern in seen:
                return False
            seen.add(pattern)
            codes = pattern.codes(instance)
            score = self.incumbent.clock.score(codes)
            self.left -= 1
            if score is None or (kept is not None and score >= kept[0]):
                return False
            kept = (score, pattern)
            self.take(codes)
            return True

        for pattern in fused_patterns(instance):
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
        """Try the list scheduler with each choice of split windows."""
        instance = self.incumbent.instance
        paths = Paths.of(instance)
        trips = [paths.f_to_b(stages[0], stages[0]) for stages in instance.stages_of]
        budget = tuple(
            max(0, self.incumbent.bound.value_ns - instance.work(r)) for r in range(instance.num_ranks)
        )
        for windows in window_choices(instance):
            for limits in standard_limits(instance, trips):
                for theta in (100, 50, 0):
                    if self.over:
                        return
                    codes = fused_list_schedule(instance, Recipe(limits, theta, budget), windows)
                    if codes is not None:
                        self.take(codes)

    def keyed_orders(self) -> None:
        """Several stages per rank: try orders from offset keys, as they are and all fused."""
        scorer, rng = Scorer(self.incumbent.instance), random.Random(self.seed)
        for _, _, codes in offset_key_orders(self.incumbent, scorer, rng, blocks=20, dispatches=40):
            for order in (codes, shaped(codes, Fusing.ALWAYS)):
                if self.over:
                    return
                self.take(order)

    def ranges(self) -> None:
        """Fuse or split ranges of microbatches of one stage or of several, until nothing helps."""
        m, p = self.incumbent.instance.num_microbatches, self.incumbent.instance.num_ranks
        every = tuple(range(self.incumbent.instance.num_stages))
        cuts = sorted({0, 1, *(k for k in (p // 2, p, m - p, m - p // 2, m - 1, m) if 0 < k <= m)})
        windows = [(low, high) for a, low in enumerate(cuts) for high in cuts[a + 1 :]]
        better = True
        while better and not self.over:
            better = False
            for stages in (every, every[1:], *((s,) for s in every)):
                for low, high in windows:
                    for change in (fuse_own, fuse_next, split_here):
                        better = self.change(stages, change, low, high) or better
                    if self.over:
                        return
                for first in range(0, m, max(1, m // 8)):
                    better = self.change(stages, advance, first, m) or better

    def change(self, stages: Sequence[int], change: RowChange, low: int, high: int) -> bool:
        """Change the rows of some stages of the best order so far; return whether that is better."""
        if self.over:
            return False
        codes = list(self.codes)
        for s in stages:
            rank = self.incumbent.instance.rank_of[s]
            codes[rank] = change(codes[rank], s, low, high)
        return not self.over and codes != self.codes and self.take(codes)

    def single_actions(self) -> None:
        """Fuse or split single backwards, a split's W directly behind its B or a few actions later."""
        instance, better = self.incumbent.instance, True
        while better and not self.over:
            better = False
            for s in range(instance.num_stages):
                for i in range(instance.num_microbatches):
                    for change in (fuse_own, fuse_next, split_here, split_later):
                        better = self.change((s,), change, i, i + 1) or better
                    if self.over:
                        return

    def small_moves(self) -> None:
        """With the tries that are left, move an action by a few places or flip a backward, at random."""
        rng, instance = random.Random(self.seed), self.incumbent.instance
        while not self.over:
            rank = rng.randrange(instance.num_ranks)
            row = self.codes[rank]
            for _ in range(rng.randint(1, 3)):
                moved = small_move(row, rng)
                row = moved if in_order(moved) else row
            if row is self.codes[rank]:
                self.left -= 1
            else:
                self.take([row if r == rank else old for r, old in enumerate(self.codes)])

    def settle_ties(self) -> None:
        """Among equally long orders, keep the one that varying times hurt least, then that with fewer splits.

        Compared per stage and kind of phase (start, middle, end), and always within the best value. Means
        that differ by less than a ten-thousandth count as equal.
        """
        instance, clock = self.incumbent.instance, self.incumbent.clock
        if self.score is None or self.incumbent.seconds_left <= self.reserve / 2:
            return
        m, p = instance.num_microbatches, instance.num_ranks
        phases = sorted({0, min(p, m), max(0, m - p), m})
        grain = max(1, self.score[0] // 10_000)
        mean = jittered_mean(clock, self.codes, seed=self.seed)
        for s in range(instance.num_stages):
            for low, high in zip(phases, phases[1:], strict=False):
                for change in (fuse_own, split_here):
                    if self.incumbent.seconds_left <= self.reserve / 2:
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
        """Among orders of the best value, give back the one that ties were settled for, as what it is."""
        if self.score is None or self.score[0] != self.incumbent.value:
            return
        if self.codes != self.incumbent.codes:
            self.incumbent.codes, self.incumbent.origin = self.codes, "split or fuse"


def _splits(codes: Codes) -> int:
    """Return the number of split backwards."""
    return sum(kind == W for row in codes for kind, _ in row)
