"""List schedules from the real times: first settings, then random changes to the best of them.

Time runs forward over all ranks, and each decides by the rule and the limits of a setting
(`zbcompile.planner.core.dispatch`). What is tried first depends on the placement
(`zbcompile.planner.starts.list_settings`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from zbcompile.planner.core.compiled import can_compile
from zbcompile.planner.core.dispatch import ALTERNATE, B_FIRST, F_FIRST, IN_TURN, Dispatcher, Recipe
from zbcompile.planner.core.instance import Codes, Instance
from zbcompile.planner.core.scorer import Score, Scorer
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import HOPELESS, Run
from zbcompile.planner.starts import classic
from zbcompile.planner.starts.evolve import Pool
from zbcompile.planner.starts.list_settings import (
    Setting,
    even_groups,
    in_order_settings,
    is_looped,
    largest_group,
    less_idle,
    published_settings,
    round_settings,
)

__all__ = ["ListSchedules", "changed"]

_PLAIN = 12_000
"""Actions placed in plain Python before kernels are compiled or loaded."""

_KEPT = 6
"""Settings kept, one of which is changed in every try."""

_FEW = 200
"""Most tries of other placements than one stage per rank and the loop: random changes gain little there."""


@dataclass(frozen=True, slots=True)
class ListSchedules:
    """List schedules."""

    name: str = "list_schedule"
    instant: bool = False

    def applies(self, run: Run) -> bool:
        """Return True: there are first settings for every placement."""
        return True

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield what is better than all before, then the best few, made in two thirds of the time left."""
        instance, makers = run.instance, _Makers(run)
        rng, room, enough_s = random.Random(run.seed), largest_group(instance), run.seconds_left / 3
        pool = Pool(makers.score, _KEPT, _KEPT)

        def over() -> bool:
            return run.done or run.seconds_left <= enough_s

        def order(setting: Setting) -> Order:
            codes = makers.codes(setting)
            assert codes is not None
            return Order(codes, (f"{self.name} {setting.name}".strip(),))

        tries = run.effort.list_schedules
        if not (run.alone or is_looped(instance)):
            tries = min(tries, _FEW)
        first = _first_settings(run, pool)
        for setting in pool.evolve(
            first, lambda old, rng: changed(old, instance, room, rng), rng, tries, over
        ):
            yield order(setting)
        for _, setting in pool.best[1:]:
            if not run.done:
                yield order(setting)


class _Makers:
    """Makes and scores orders, in plain Python at first and by compiled kernels from then on."""

    def __init__(self, run: Run) -> None:
        self.run, self.placed = run, 0
        self.dispatcher, self.scorer = Dispatcher(run.instance, list), Scorer(run.instance, list)

    def score(self, setting: Setting) -> Score | None:
        """Return the score of a setting's order under the problem's send mode; ``None`` if there is none."""
        self.placed += self.run.actions
        if self.placed > _PLAIN and self.dispatcher.vector is list and can_compile():
            self.dispatcher = Dispatcher(self.run.instance)
            if not self.run.holds_rank:
                self.scorer = self.run.scorer
        if self.run.holds_rank:
            codes = self.codes(setting)
            return None if codes is None else self.run.incumbent.clock.score(codes)
        return self.dispatcher.score(setting.keys(self.run.instance), setting.recipe, self.scorer)

    def codes(self, setting: Setting) -> Codes | None:
        """Return a setting's order."""
        return self.dispatcher.run(setting.keys(self.run.instance), setting.recipe)


def _first_settings(run: Run, pool: Pool[Setting]) -> Iterator[Setting]:
    """Yield what is tried first; published orders that are far from the best known are not gone on with."""
    instance = run.instance
    if run.problem.placement.is_contiguous:
        yield from in_order_settings(instance, run.bound.value_ns)
        return
    published = classic.orders_for(run.problem)
    if is_looped(instance) or not published:
        yield from round_settings(instance)
        return
    yield from chain.from_iterable(published_settings(instance, *order) for order in published)
    best = pool.best[:2]
    for (value, _), setting in best:
        if run.value is None or value <= HOPELESS * run.value:
            yield from less_idle(setting, instance, value)


def changed(setting: Setting, instance: Instance, room: int, rng: random.Random) -> Setting:
    """Return a setting with one to three changes; no group exceeds ``room`` microbatches."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        dice = rng.random() if setting.name == "rounds" else 1.0
        if dice < 0.55:
            groups = _regrouped(setting.groups, rng)
            if dice < 0.1:
                groups = even_groups(max(1, setting.groups[0] + rng.choice((-2, -1, 1, 2, 3))), sum(groups))
            setting = replace(setting, groups=groups) if max(groups) <= room else setting
        elif dice < 0.59:
            setting = replace(setting, early=_moved(setting.early, instance, rng))
        else:
            setting = replace(setting, recipe=_varied(setting.recipe, instance, rng))
    return setting


def _varied(recipe: Recipe, instance: Instance, rng: random.Random) -> Recipe:
    """Return a recipe with its rule, its share, or one of the limits that it has changed."""
    most, half = instance.num_stages * instance.num_microbatches + 1, max(instance.weight) // 2
    chooses = recipe.rule != IN_TURN
    often = (25 * bool(recipe.on_rank), 4 * bool(recipe.idle), 2 * chooses, 5, 5 * chooses)
    what = rng.choices(range(5), often)[0]
    if what == 0:
        return replace(recipe, on_rank=_shifted(recipe.on_rank or (), 1, most, rng))
    if what == 1:
        return replace(recipe, idle=_shifted(recipe.idle or (), half, most * half, rng))
    if what == 2:
        quarter, patience = max(instance.forward) // 4, recipe.patience or (0,) * instance.num_ranks
        return replace(recipe, patience=_shifted(patience, quarter, 5 * quarter, rng))
    if what == 3:
        return replace(recipe, share=max(0, recipe.share + rng.choice((-50, -25, -10, 10, 25, 50))))
    return replace(recipe, rule=rng.choice((ALTERNATE, B_FIRST, F_FIRST)))


def _moved(early: tuple[int, ...], instance: Instance, rng: random.Random) -> tuple[int, ...]:
    """Let the F's of one stage, or also of those after it in its loop, run a place earlier or later."""
    S, p = instance.num_stages, instance.num_ranks
    first, by = rng.randrange(S), rng.choice((-1, 1))
    end = first + 1 if rng.random() < 0.5 else (first // p + 1) * p
    return tuple(e + by if first <= s < end else e for s, e in enumerate(early or (0,) * S))


def _regrouped(groups: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """Move microbatches from one group to another, split one, or join two."""
    result, at, which = list(groups), rng.randrange(len(groups)), rng.random()
    if which < 0.5 and len(result) > 1:
        other = rng.randrange(len(result))
        count = min(result[at], rng.choice((1, 1, 2, 3)))
        result[at] -= count
        result[other] += count
    elif which < 0.8 and result[at] > 1:
        count = rng.randrange(1, result[at])
        result[at] -= count
        result.insert(at, count)
    elif at:
        result[at - 1 : at + 1] = [result[at - 1] + result[at]]
    return tuple(count for count in result if count)


def _shifted(limits: Sequence[int], step: int, most: int, rng: random.Random) -> tuple[int, ...]:
    """Change the limits of a range of ranks by one or two steps, or lift them; the least is 0."""
    low = rng.randrange(len(limits))
    high = low + 1 if rng.random() < 0.5 else rng.randrange(low + 1, len(limits) + 1)
    by = most if rng.random() < 0.1 else step * rng.choice((-2, -1, 1, 2))
    return tuple(
        max(0, min(most, limit + by)) if low <= r < high else limit for r, limit in enumerate(limits)
    )
