"""First orders: what the literature offers, a fallback that always fits, and list schedules."""

from __future__ import annotations

import random

from zbcompile.planner.bounds.warmup import climb
from zbcompile.planner.core.instance import BW, B, Codes, F, Flat, W, is_chain
from zbcompile.planner.core.paths import Paths
from zbcompile.planner.incumbent import Best
from zbcompile.planner.starts import classic
from zbcompile.planner.starts.list_schedule import Recipe, list_schedule, mixed_limits, standard_limits

__all__ = ["one_at_a_time", "try_classic", "try_list_schedules"]

_LONG = 30_000
_THETAS = (100, 75, 50, 125, 25, 150, 0, 200)


def one_at_a_time(flat: Flat) -> Codes:
    """One microbatch after the other: fits wherever anything fits. Fused where M_W > M_B."""
    rows: Codes = []
    for rank, stages in enumerate(flat.stages_of):
        row = [(F, s) for s in stages]
        for s in reversed(stages):
            wide = flat.pending[s] > flat.saved[s] or flat.fused[s] < flat.backward[s] + flat.weight[s]
            row.extend([(BW, s)] if wide else [(B, s), (W, s)])
        rows.append(row * flat.num_microbatches)
        del rank
    return rows


def try_classic(best: Best) -> None:
    """Offer the orders of the literature that fit; the fallback only where none does.

    On very long problems the first that fits is enough: they are listed best first.
    """
    flat = best.flat
    long = 3 * flat.num_stages * flat.num_microbatches > _LONG
    for name, codes in classic.orders_for(best.problem):
        if best.offer(codes, f"classic {name}") and (long or best.proved):
            return
    if best.codes is None:
        best.offer(one_at_a_time(flat), "one microbatch at a time")


def try_list_schedules(best: Best, tries: int, seed: int) -> None:
    """List schedules with the standard settings, then with random changes to the best of them."""
    flat = best.flat
    if any(len(stages) != 1 for stages in flat.stages_of):
        return
    paths = Paths.of(flat)
    trips = [paths.f_to_b(stages[0], stages[0]) for stages in flat.stages_of]
    target = best.bound.value_ns
    budget = tuple(target - flat.work(r) for r in range(flat.num_ranks))
    kept: tuple[int, Recipe] | None = None
    used = 0
    limits = standard_limits(flat, trips)
    limits = [*stairs_limits(flat, paths, target), *limits, *mixed_limits(limits[0], limits[1])]
    recipes = [Recipe(few, theta, budget) for theta in _THETAS for few in limits]
    rng = random.Random(seed)
    while used < tries and not best.done:
        if used < len(recipes):
            recipe = recipes[used]
        elif kept is None:
            return
        else:
            recipe = _mutate(kept[1], flat, rng)
        used += 1
        codes = list_schedule(flat, recipe)
        value = None if codes is None else best.measure(codes)
        if codes is None or value is None:
            continue
        best.offer(codes, "list schedule")
        if kept is None or value <= kept[0]:
            kept = (value, recipe)


def _mutate(recipe: Recipe, flat: Flat, rng: random.Random) -> Recipe:
    """One to three limits by one or two, or a new theta, or another idle budget."""
    limits, theta, budget = list(recipe.limits), recipe.theta, list(recipe.budget)
    for _ in range(rng.randint(1, 3)):
        rank = rng.randrange(len(limits))
        limits[rank] = max(1, limits[rank] + rng.choice((-2, -1, 1, 2)))
    if rng.random() < 0.3:
        theta = max(0, theta + rng.choice((-25, -10, -5, 5, 10, 25)))
    if rng.random() < 0.3:
        rank = rng.randrange(len(budget))
        budget[rank] = max(0, budget[rank] + rng.choice((-2, -1, 1, 2)) * flat.weight[0] // 2)
    return Recipe(tuple(limits), theta, tuple(budget))


def stairs_limits(flat: Flat, paths: Paths, target: int) -> list[tuple[int, ...]]:
    """F's before the first B on every rank, as the stairs allow them for the target and a little more."""
    found: list[tuple[int, ...]] = []
    if is_chain(flat):
        for permille in (0, 2, 5, 10, 20):
            counts = climb(flat, paths, target + target * permille // 1000)
            if counts is not None and counts not in found:
                found.append(counts)
    return found
