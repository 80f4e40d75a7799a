"""A plan for another send mode, where that is a good start."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zbcompile.planner.core.instance import BW, B, F, Instance, W
from zbcompile.planner.core.latest_starts import latest_starts
from zbcompile.planner.incumbent import Order
from zbcompile.planner.parts import Part, planned
from zbcompile.planner.run import Run
from zbcompile.planner.starts.held_dispatch import Keys, Priorities, held_dispatch
from zbcompile.schedule.problem import Problem

__all__ = ["OtherMode"]

_MOST_STEPS = 50_000
"""Most actions times ranks that are dispatched: a quarter of a second each time."""

_BASES = 2
"""Orders whose times become keys."""

_LATE = (0, 2, -3, 30)
"""How many W's later than in the order W's are due."""


@dataclass(frozen=True, slots=True)
class OtherMode:
    """A plan for the mode that `zbcompile.schedule.semantics.SendMode.starts_as` names.

    Its orders are taken as they are, which may hang here or take longer, and dispatched anew as this mode
    holds ranks.

    Attributes
    ----------
    parts
        Returns what plans for that mode.
    """

    parts: Callable[[], tuple[Part, ...]]
    name: str = "other_mode"
    instant: bool = False

    def applies(self, run: Run) -> bool:
        """Return whether there is such a mode, and some rank has several stages."""
        problem = run.problem
        return problem.sends.starts_as is not None and problem.num_stages != problem.num_ranks

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield what is known or in the pool after a third of the time left, then orders dispatched anew."""
        other = run.problem.sends.starts_as
        assert other is not None
        problem = run.problem.with_(transport=other.name)
        inner = run.inner(problem, run.seconds_left / 3)
        orders = list(planned(inner, self.parts()))
        for order in (*orders, *(() if inner.holds_rank else inner.pool)):
            yield order.then(self.name, order.codes)
        if run.actions * run.instance.num_ranks > _MOST_STEPS:
            return
        for k, order in enumerate(orders[:_BASES]):
            yield from _dispatched(run, problem, order, random.Random(run.seed + k), self.name)


def _dispatched(run: Run, problem: Problem, order: Order, rng: random.Random, name: str) -> Iterator[Order]:
    """Yield orders that are shorter than those before: the order's times are keys, evolved by small changes.

    Parameters
    ----------
    run
        The run under a mode that holds ranks.
    problem
        The problem under the mode of the order.
    order
        The order.
    rng
        Decides the changes.
    name
        The part's name.
    """
    instance, clock = run.instance, run.incumbent.clock
    m, count = instance.num_microbatches, instance.num_stages
    longest = max(*instance.forward, *instance.backward, *instance.weight)
    keys = _keys(Instance.of(problem), order)
    first = [
        Priorities(
            _shifted(keys, {(W, s): late * longest for s in range(count)}), (few,) * count, (fused,) * count
        )
        for late in _LATE
        for few in sorted({max(1, m // 2), m})
        for fused in ((0, 0), (0, m))
    ]
    pool: list[tuple[tuple[int, int], Priorities]] = []
    for k in range(len(first) + run.effort.dispatches // 8):
        if run.over() or (k >= len(first) and not pool):
            return
        if k < len(first):
            chosen = first[k]
        else:
            chosen = _changed(pool[rng.randrange(min(4, len(pool)))][1], longest, m, rng)
        codes = held_dispatch(clock, chosen)
        score = None if codes is None else clock.score(codes)
        if codes is None or score is None or any(score == known for known, _ in pool):
            continue
        if not pool or score < pool[0][0]:
            yield order.then(f"{name} dispatch", codes)
        pool = sorted([*pool, (score, chosen)], key=lambda entry: entry[0])[:12]


def _keys(instance: Instance, order: Order) -> Keys:
    """Return the latest starts of an order by kind, stage and microbatch; a W that it fuses is due last."""
    starts = {
        (B if kind == BW else kind, s, i): start
        for (kind, s, i), start in latest_starts(instance, order.codes).items()
    }
    last, counted = max(starts.values()), range(instance.num_microbatches)
    return tuple(
        tuple(tuple(starts.get((kind, s, i), last) for i in counted) for s in range(instance.num_stages))
        for kind in (F, B, W)
    )


def _shifted(keys: Keys, shifts: dict[tuple[int, int], int]) -> Keys:
    """Return the keys with those of some (kind, stage) moved by some ns."""
    return tuple(
        tuple(tuple(key + shifts.get((kind, s), 0) for key in row) for s, row in enumerate(rows))
        for kind, rows in enumerate(keys)
    )


def _changed(priorities: Priorities, longest: int, m: int, rng: random.Random) -> Priorities:
    """Return the priorities with one to three changes.

    The keys of one kind move, for one stage or some neighbouring ones; one stage's microbatches in flight
    change by one; or what is fused changes, for one stage or for all.
    """
    count = len(priorities.in_flight)
    for _ in range(rng.randint(1, 3)):
        dice, s = rng.random(), rng.randrange(count)
        if dice < 0.55:
            kind, step = rng.choice((F, B, W)), rng.choice((-3, -2, -1, 1, 2, 3)) * longest // 2
            end = s + 1 if dice < 0.35 else rng.randint(s + 1, count)
            keys = _shifted(priorities.keys, {(kind, other): step for other in range(s, end)})
            priorities = replace(priorities, keys=keys)
        elif dice < 0.75:
            in_flight = list(priorities.in_flight)
            in_flight[s] = max(1, min(m, in_flight[s] + rng.choice((-1, 1))))
            priorities = replace(priorities, in_flight=tuple(in_flight))
        else:
            low, high = sorted((rng.choice((0, 1, 2, m // 2, m)), rng.choice((0, m // 2, m - 2, m - 1, m))))
            every = rng.random() < 0.3
            fused = [(low, high) if every or k == s else old for k, old in enumerate(priorities.fused)]
            priorities = replace(priorities, fused=tuple(fused))
    return priorities
