"""First settings of list schedules: microbatches in order, rounds of microbatches, and published orders.

In order, for one stage or neighbouring stages per rank: F's and B's alternate, with as many microbatches in
flight as fill the round trip.

Rounds, for looped placements and those without published orders: microbatches go in groups, as in interleaved
1F1B (arXiv 2104.04473, section 2.2): a rank runs F's of a group stage by stage, B's in reverse. The sizes
of the groups matter most.

Published orders: F's and B's in their order, W's where the real times leave gaps. ZB-V, made for equal times,
so becomes the greedy search of arXiv 2401.10241 (section 6) without a search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zbcompile.planner.bounds.warmup import warmup_forwards
from zbcompile.planner.core.dispatch import ALTERNATE, B_FIRST, IN_TURN, Recipe
from zbcompile.planner.core.instance import BW, B, Codes, F, Instance, numbered
from zbcompile.planner.core.paths import Paths

__all__ = [
    "Setting",
    "even_groups",
    "in_order_settings",
    "is_looped",
    "largest_group",
    "less_idle",
    "published_settings",
    "round_settings",
]

_SHARES = (100, 75, 50, 25, 0)

_STEPS = 24
"""Idle times tried, an eighth of a W apart."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What decides one list schedule.

    Attributes
    ----------
    name
        What it is called in lineages.
    recipe
        How a rank chooses.
    groups
        Numbers of microbatches of the groups.
    order
        Keys of F's, B's and W's where they follow a published order; else the groups make them.
    early
        By how many places of its rank's order the F's of every stage run earlier than the groups say.
    """

    name: str
    recipe: Recipe
    groups: tuple[int, ...]
    order: tuple[int, ...] = ()
    early: tuple[int, ...] = ()

    def keys(self, instance: Instance) -> Sequence[int]:
        """Return the key of every action: group by group, in a group stage by stage, B's in reverse."""
        if self.order:
            return self.order
        most, place = max(map(len, instance.stages_of)), [0] * instance.num_stages
        back = list(place)
        for stages in instance.stages_of:
            for k, s in enumerate(stages):
                place[s], back[s] = k, len(stages) - 1 - k
        shifts = [2 * e + (e > 0) - (e < 0) for e in self.early or (0,) * len(place)]
        groups = [
            (most * (end - group), group)
            for group, end in zip(self.groups, accumulate(self.groups), strict=True)
        ]
        forward, backward = list[int](), list[int]()
        for s, shift in enumerate(shifts):
            for begin, group in groups:
                at = begin + place[s] * group
                forward.extend(range(2 * at - shift, 2 * (at + group) - shift, 2))
                backward.extend(range(begin + back[s] * group, begin + (back[s] + 1) * group))
        return forward + backward + backward


def is_looped(instance: Instance) -> bool:
    """Return whether the placement is looped, with two or more stages on some rank: stage s on s mod p."""
    p = instance.num_ranks
    return instance.num_stages > p and all(r == s % p for s, r in enumerate(instance.rank_of))


def in_order_settings(instance: Instance, target: int) -> Iterator[Setting]:
    """Yield settings for stages in order, idle no longer than a value of ``target`` ns allows.

    As many microbatches are in flight as the warm-up bound counts, or fill the round trip, one more or fewer.
    """
    paths = Paths.of(instance)
    idle = tuple(target - instance.work(r) for r in range(instance.num_ranks))
    base = [
        -(-paths.f_to_b(stages[0], stages[0]) // max(1, sum(instance.forward[s] for s in stages)))
        for stages in instance.stages_of
    ]
    around = [tuple(max(1, count + more) for count in base) for more in (-1, 0, 1)]
    for share in _SHARES:
        for limits in filter(None, (warmup_forwards(instance, paths, target), *around)):
            forwards = tuple(c * len(stages) for c, stages in zip(limits, instance.stages_of, strict=True))
            recipe = Recipe(ALTERNATE, share, on_rank=forwards, idle=idle)
            yield Setting("", recipe, (1,) * instance.num_microbatches)


def largest_group(instance: Instance) -> int:
    """Return the most microbatches of a first group that memory allows, 0 if it does not allow one.

    Before its first B a rank holds the F's of the whole group for all of its stages but the last, and one of
    that, and leaves headroom for the B.
    """
    most, change, peak = instance.num_microbatches, instance.memory.change[F], instance.memory.peak[F]
    for r, stages in enumerate(instance.stages_of):
        last, reserve = stages[-1], max(instance.memory.peak[B][s] for s in stages)
        headroom = instance.headroom[r] - max(peak[last], change[last] + reserve)
        before = sum(change[s] for s in stages[:-1])
        if headroom < 0:
            return 0
        if before:
            most = min(most, headroom // before)
    return most


def even_groups(group: int, count: int) -> tuple[int, ...]:
    """Return groups of ``group`` microbatches and one of what is left of ``count``."""
    return (group,) * (count // group) + ((count % group,) if count % group else ())


def round_settings(instance: Instance) -> Iterator[Setting]:
    """Yield the rounds that memory allows, those that are mostly best first.

    Groups have as many microbatches as there are ranks, fewer where memory allows no more, or 1 or 3 more, or
    as many more as F's run while a message travels once around the ranks: then the next F is always there.
    Or the second has one more and the third one fewer, or the last is halved.
    With (v - 1) G + 1 + 2 n F's in flight, n stages behind its last, no rank waits for B's of stage S - 1.
    The settings that alternate come a second time as `_hastened` says.
    """
    p, m, room = instance.num_ranks, instance.num_microbatches, largest_group(instance)
    if room == 0:
        return
    travel = sum(max((lag for _, lag in row), default=0) for row in instance.forward_from[1 : p + 1])
    around = -(-travel * instance.num_stages // max(1, sum(instance.forward)))
    group = min(p, room)
    even = even_groups(group, m)
    stepped = (even[0], even[1] + 1, even[2] - 1, *even[3:]) if len(even) > 2 else even
    halved = (*even[:-1], even[-1] // 2 + 1, even[-1] - even[-1] // 2 - 1)
    found: dict[Setting, None] = {}
    for sizes, rule, share in (
        (even, ALTERNATE, 0),
        (even_groups(group + around, m), ALTERNATE, 0),
        (even_groups(group + 1, m), ALTERNATE, 0),
        (stepped, ALTERNATE, 0),
        (halved, ALTERNATE, 0),
        (halved, ALTERNATE, 100),
        (even, B_FIRST, 0),
        (even_groups(group + 3, m), ALTERNATE, 0),
    ):
        most = max(sizes)
        limits = (
            (len(stages) - 1) * most + 1 + 2 * (instance.num_stages - 1 - stages[-1])
            for stages in instance.stages_of
        )
        if most <= room:
            recipe = Recipe(rule, share, on_rank=tuple(limits))
            found[Setting("rounds", recipe, tuple(size for size in sizes if size))] = None
    yield from found
    yield from [_hastened(setting, instance) for setting in found if setting.recipe.rule == ALTERNATE]


def _hastened(setting: Setting, instance: Instance) -> Setting:
    """Return a setting by which rank 0 waits less.

    The last two ranks begin the next group one place earlier: its F's are back on rank 0 when that has few
    others. And all ranks wait up to half an F for a B rather than delay it by an F.
    """
    last = instance.num_ranks - 2
    early = tuple(int(r >= last and s != instance.stages_of[r][-1]) for s, r in enumerate(instance.rank_of))
    patience = tuple(max(instance.forward[s] for s in stages) // 2 for stages in instance.stages_of)
    return replace(setting, recipe=replace(setting.recipe, patience=patience), early=early)


def published_settings(instance: Instance, name: str, codes: Codes) -> Iterator[Setting]:
    """Yield a published order with its W's placed anew, and looser ones where B's go first."""
    rows = {
        (B if kind == BW else kind, s, i): k for row in numbered(codes) for k, (kind, s, i) in enumerate(row)
    }
    S, m = instance.num_stages, instance.num_microbatches
    keys = [rows[kind, s, i] for kind in (F, B) for s in range(S) for i in range(m)]
    order = (*keys, *keys[S * m :])
    for rule in (IN_TURN, B_FIRST):
        for share in (100, 50, 0):
            yield Setting(name, Recipe(rule, share), (), order)


def less_idle(setting: Setting, instance: Instance, value: int) -> Iterator[Setting]:
    """Yield a setting of that value with less idle time allowed before W's fill every gap, first with none.

    With none a rank fills its gap wherever it would be the one that has been idle for longest, as in the
    greedy search of arXiv 2401.10241 (section 6).
    """
    step = max(1, max(instance.weight) // 8)
    for less in (value, *(k * step for k in range(1, _STEPS))):
        idle = tuple(max(0, value - instance.work(r) - less) for r in range(instance.num_ranks))
        yield Setting(
            setting.name,
            Recipe(setting.recipe.rule, setting.recipe.share, idle=idle),
            setting.groups,
            setting.order,
        )
