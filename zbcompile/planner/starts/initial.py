"""Initial orders: what the literature offers, a fallback that always fits, and list schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from zbcompile.planner.bounds.warmup import warmup_forwards
from zbcompile.planner.core.instance import BW, B, Codes, F, Fusing, Instance, W, is_chain, shaped
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run
from zbcompile.planner.starts import classic
from zbcompile.planner.starts.list_schedule import Recipe, list_schedule, mixed_limits, standard_limits
from zbcompile.schedule.one_microbatch import OneMicrobatch

__all__ = ["Classic", "ListSchedules", "OneAtATime", "one_at_a_time"]

_LONG = 30_000
_THETAS = (100, 75, 50, 125, 25, 150, 0, 200)


def one_at_a_time(instance: Instance, *, fusing: bool = True) -> Codes:
    """Return an order that runs one microbatch after the other: it fits wherever anything fits.

    All F's come first where that fits. A stage runs fused, if it may, where B and W hold more or take longer
    than BW.
    """
    one = OneMicrobatch.under(instance.memory, instance.rules, instance.rank_of, fusing=fusing)
    order = one.fit(instance.headroom).order or one.forwards_first()
    rows: Codes = [[] for _ in instance.stages_of]
    for backward, s in order:
        wide = fusing and (
            instance.memory.uses[s].split_holds_more
            or instance.fused[s] < instance.backward[s] + instance.weight[s]
        )
        split = [(B, s), (W, s)]
        rows[instance.rank_of[s]] += ([(BW, s)] if wide else split) if backward else [(F, s)]
    return [row * instance.num_microbatches for row in rows]


@dataclass(frozen=True, slots=True)
class Classic:
    """The orders of the literature; on very long problems the first that fits is enough.

    They are listed best first.
    """

    name: str = "classic"
    instant: bool = True

    def applies(self, run: Run) -> bool:
        """Return whether there is a published order for the placement."""
        return any(True for _ in classic.orders_for(run.problem))

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield them until one is proved the best, or there is one and the time is over."""
        for name, codes in classic.orders_for(run.problem):
            yield from _also_all_split(run, codes, f"{self.name} {name}")
            if run.done or (run.actions > _LONG and run.value is not None):
                return


@dataclass(frozen=True, slots=True)
class OneAtATime:
    """The fallback that fits wherever anything does: one microbatch after the other."""

    name: str = "one_at_a_time"
    instant: bool = True

    def applies(self, run: Run) -> bool:
        """Return whether there is no order yet."""
        return run.value is None

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield the order."""
        fusing = run.options.fusing is not Fusing.NEVER
        yield from _also_all_split(run, one_at_a_time(run.instance, fusing=fusing), self.name)


def _also_all_split(run: Run, codes: Codes, name: str) -> Iterator[Order]:
    """Yield an order, and where sends hold up their rank, so that splits decide much, all of it split."""
    yield Order(codes, (name,))
    if run.holds_rank and run.options.fusing is Fusing.AUTO:
        split = shaped(codes, Fusing.NEVER)
        if split != codes:
            yield Order(split, (f"{name}, all split",))


@dataclass(frozen=True, slots=True)
class ListSchedules:
    """List schedules with the standard recipes, then with random changes to the best of them."""

    name: str = "list_schedule"
    instant: bool = False

    def applies(self, run: Run) -> bool:
        """Return whether every rank has one stage."""
        return run.alone

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield as many as the effort allows."""
        instance = run.instance
        paths = Paths.of(instance)
        target = run.bound.value_ns
        kept: tuple[int, Recipe] | None = None
        recipes = _recipes(instance, paths, target)
        rng = random.Random(run.seed)
        for _ in range(run.effort.list_schedules):
            if run.done:
                return
            recipe = next(recipes, None)
            if recipe is None:
                if kept is None:
                    return
                recipe = _mutate(kept[1], instance, rng)
            codes = list_schedule(instance, recipe)
            value = None if codes is None else run.incumbent.measure(codes)
            if codes is None or value is None:
                continue
            yield Order(codes, (self.name,))
            if kept is None or value <= kept[0]:
                kept = (value, recipe)


def _recipes(instance: Instance, paths: Paths, target: int) -> Iterator[Recipe]:
    """Yield the standard recipes."""
    trips = [paths.f_to_b(stages[0], stages[0]) for stages in instance.stages_of]
    budget = tuple(target - instance.work(r) for r in range(instance.num_ranks))
    standard = standard_limits(instance, trips)
    first = [*_warmup_limits(instance, paths, target), *standard]
    for theta in _THETAS:
        for few in chain(first, mixed_limits(standard[0], standard[1])):
            yield Recipe(few, theta, budget)


def _mutate(recipe: Recipe, instance: Instance, rng: random.Random) -> Recipe:
    """Change one to three limits by one or two, and perhaps theta and an idle budget."""
    limits, theta, budget = list(recipe.limits), recipe.theta, list(recipe.budget)
    for _ in range(rng.randint(1, 3)):
        rank = rng.randrange(len(limits))
        limits[rank] = max(1, limits[rank] + rng.choice((-2, -1, 1, 2)))
    if rng.random() < 0.3:
        theta = max(0, theta + rng.choice((-25, -10, -5, 5, 10, 25)))
    if rng.random() < 0.3:
        rank = rng.randrange(len(budget))
        budget[rank] = max(0, budget[rank] + rng.choice((-2, -1, 1, 2)) * instance.weight[0] // 2)
    return Recipe(tuple(limits), theta, tuple(budget))


def _warmup_limits(instance: Instance, paths: Paths, target: int) -> list[tuple[int, ...]]:
    """Return F's before the first B on every rank, as the warm-up bound allows them.

    For the target, and for values up to 2 % above it.
    """
    found: list[tuple[int, ...]] = []
    if is_chain(instance):
        for permille in (0, 2, 5, 10, 20):
            counts = warmup_forwards(instance, paths, target + target * permille // 1000)
            if counts is not None and counts not in found:
                found.append(counts)
    return found
