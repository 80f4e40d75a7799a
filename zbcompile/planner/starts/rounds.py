"""Rounds: list schedules for looped placements, from the real times.

Microbatches go in groups, as in interleaved 1F1B (arXiv 2104.04473, section 2.2): a rank runs the F's of a
group stage by stage, and its B's in the reverse order of its stages. A rank keeps **strictly** to the order
of its F's, and waits for the next one. Of the B's that have arrived it runs the first. A W runs where the
rank would wait, and where memory lets neither an F nor a B begin; otherwise W's wait without limit. A few
settings are tried first, then random changes to the best of them; the sizes of the groups matter most.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zbcompile.planner.core.compiled import MakeVector, Vector, vector
from zbcompile.planner.core.instance import B, Codes, F, Instance
from zbcompile.planner.core.scorer import Scored, Scorer
from zbcompile.planner.core.tables import Tables, unpack
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import Run
from zbcompile.planner.starts.rounds_kernel import ALTERNATE, B_FIRST, F_FIRST, place_rounds

__all__ = ["RoundOrders", "Rounds", "Setting", "applies", "mutate", "rounds_orders", "standard_settings"]

_RULES = (ALTERNATE, B_FIRST, F_FIRST)
_SHORT = 1_000
"""Actions up to which the standard settings are tried in plain Python first: less time than numba takes."""
_KEPT = 6
"""Settings kept, best first, one of which is changed in every try."""


@dataclass(frozen=True, slots=True)
class RoundOrders:
    """Rounds: the standard settings, then random changes to the best of them."""

    name: str = "rounds"
    instant: bool = False

    def applies(self, run: Run) -> bool:
        """Return whether the placement is looped."""
        return applies(run.instance)

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield the best few, made in two thirds of the time left at most."""
        short = run.actions <= _SHORT
        if short:
            yield from self._best(run, Scorer(run.instance, list), 0)
        if not run.done and (run.effort.rounds or not short):
            yield from self._best(run, run.scorer, run.effort.rounds)

    def _best(self, run: Run, scorer: Scorer, tries: int) -> Iterator[Order]:
        """Yield the best few, found by compiled kernels or in plain Python as the scorer is."""
        enough_s = run.seconds_left / 3
        found = rounds_orders(
            run.instance,
            scorer,
            random.Random(run.seed),
            tries,
            goal=run.bound.value_ns,
            stop=lambda: run.seconds_left <= enough_s,
        )
        for _, _, codes in found:
            if run.done:
                return
            yield Order(codes, (self.name,))


@dataclass(frozen=True, slots=True)
class Setting:
    """Parameters of one order.

    Attributes
    ----------
    groups
        Numbers of microbatches of the groups.
    in_flight
        Most F's in flight per rank.
    rule
        `ALTERNATE`, `B_FIRST` or `F_FIRST`: what runs where an F and a B are both ready.
    fill
        Hundredths of a W that a gap must last before the W fills it.
    pending
        Most W's waiting per rank.
    """

    groups: tuple[int, ...]
    in_flight: tuple[int, ...]
    rule: int
    fill: int
    pending: tuple[int, ...]


def applies(instance: Instance) -> bool:
    """Return whether the placement is looped, with two or more stages on some rank: stage s on s mod p."""
    p = instance.num_ranks
    return instance.num_stages > p and all(r == s % p for s, r in enumerate(instance.rank_of))


def largest_group(instance: Instance) -> int:
    """Return the most microbatches of a first group that memory allows, 0 if it does not allow one.

    Before its first B a rank holds the F's of the whole group for all of its stages but the last, and one of
    that.
    """
    most, change, peak = instance.num_microbatches, instance.memory.change[F], instance.memory.peak[F]
    for r, stages in enumerate(instance.stages_of):
        last = stages[-1]
        headroom = instance.headroom[r] - max(peak[last], change[last] + _reserve(instance, r))
        before = sum(change[s] for s in stages[:-1])
        if headroom < 0:
            return 0
        if before:
            most = min(most, headroom // before)
    return most


def _reserve(instance: Instance, rank: int) -> int:
    """Return the bytes that an F leaves free on a rank, so that the next B fits."""
    return max(instance.memory.peak[B][s] for s in instance.stages_of[rank])


def standard_settings(instance: Instance) -> list[Setting]:
    """Return the settings that memory allows, the one that is mostly best first.

    Groups have as many microbatches as there are ranks, fewer where memory allows no more, or 1 or 3 more, or
    as many more as F's run while a message travels once around the ranks: then the next F is always there.
    With K = (v - 1) G + 1 + 2 (p - 1 - r) forwards in flight on rank r nobody waits for a B of rank p - 1.
    """
    p, m, room = instance.num_ranks, instance.num_microbatches, largest_group(instance)
    free = (instance.num_stages * m + 1,) * p
    travel = sum(max((lag for _, lag in row), default=0) for row in instance.forward_from[1 : p + 1])
    around = -(-travel * instance.num_stages // max(1, sum(instance.forward)))
    found: list[Setting] = []
    for more, slope, extra, rule, fill, pending in (
        (0, 2, 0, ALTERNATE, 0, free),
        (around, 2, 0, ALTERNATE, 0, free),
        (1, 2, 0, ALTERNATE, 0, free),
        (0, 2, 0, B_FIRST, 0, free),
        (0, 1, p, F_FIRST, 50, free),
        (3, 2, 0, ALTERNATE, 0, free),
        (0, None, 0, F_FIRST, 50, tuple(2 * r for r in range(p))),
    ):
        group = min(p, room) + more
        if not 1 <= group <= room:  # memory allows fewer
            continue
        limits = free
        if slope is not None:
            limits = tuple(
                (len(stages) - 1) * group + 1 + slope * (p - 1 - r) + extra
                for r, stages in enumerate(instance.stages_of)
            )
        setting = Setting(_even(group, m), limits, rule, fill, pending)
        if setting not in found:
            found.append(setting)
    return found


class Rounds:
    """Makes orders of one problem; its buffers are reused from order to order.

    Parameters
    ----------
    instance
        The problem.
    vector
        Makes the buffers; with ``list`` nothing is compiled.
    """

    def __init__(self, instance: Instance, vector: MakeVector = vector) -> None:
        self.instance, self.tables, self.vector = instance, Tables.of(instance, vector), vector
        S, p, m = instance.num_stages, instance.num_ranks, instance.num_microbatches
        sizes = [3 * m * len(stages) for stages in instance.stages_of]
        self.offsets = vector([sum(sizes[:r]) for r in range(p + 1)])
        self.reserve = vector([_reserve(instance, r) for r in range(p)])
        self.line, self.state, self.done = (vector([0] * n) for n in (3 * S * m, 8 * p, 3 * S))
        self.ends, self.waiting = vector([0] * (2 * S * m)), vector([0] * (S * m))

    def line_of(self, setting: Setting) -> Vector | None:
        """Return the codes of one order in a row, valid until the next; ``None`` if memory locks it up."""
        first: list[int] = []
        size: list[int] = []
        for group in setting.groups:
            first += [len(first)] * group
            size += [group] * group
        placed = place_rounds(
            self.tables,
            self.vector(first),
            self.vector(size),
            self.vector(setting.in_flight),
            setting.rule,
            setting.fill,
            self.vector(setting.pending),
            self.reserve,
            self.offsets,
            self.line,
            self.state,
            self.done,
            self.ends,
            self.waiting,
        )
        return self.line if int(placed) == len(self.line) else None

    def order(self, setting: Setting) -> Codes | None:
        """Return the same as an order of its own."""
        line = self.line_of(setting)
        return None if line is None else unpack(self.instance, self.offsets, line)


def rounds_orders(
    instance: Instance,
    scorer: Scorer,
    rng: random.Random,
    tries: int,
    *,
    goal: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> list[Scored]:
    """Return the best orders of the standard settings and of random changes to them, best first.

    Parameters
    ----------
    instance
        The problem.
    scorer
        Its scorer.
    rng
        Draws the changes.
    tries
        Number of changes.
    goal
        Value in ns at which to stop.
    stop
        Asked before every try whether to end early.

    Returns
    -------
    list of Scored
        At most `_KEPT`, of different scores; empty if the placement is not looped.
    """
    if not applies(instance):
        return []
    rounds, room = Rounds(instance, scorer.vector), largest_group(instance)
    pool: list[tuple[tuple[int, int], Setting]] = []
    standard = standard_settings(instance)
    for k in range(tries + len(standard)):
        if stop() or (pool and pool[0][0][0] <= goal):
            break
        if k < len(standard):
            setting = standard[k]
        elif pool:
            setting = mutate(rng.choice(pool)[1], instance, room, rng)
        else:
            break
        line = rounds.line_of(setting)
        score = None if line is None else scorer.score_line(rounds.offsets, line)
        if score is not None:
            pool = [entry for entry in pool if entry[0] != score]
            pool = sorted([*pool, (score, setting)], key=lambda entry: entry[0])[:_KEPT]
    orders = [(score, rounds.order(setting)) for score, setting in pool]
    return [(*score, codes) for score, codes in orders if codes is not None]


def mutate(setting: Setting, instance: Instance, room: int, rng: random.Random) -> Setting:
    """Return a setting with one to three changes; no group exceeds ``room`` microbatches."""
    most = instance.num_stages * instance.num_microbatches + 1
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        which = rng.random()
        if which < 0.55:
            groups = _regrouped(setting.groups, rng)
            if which < 0.1:
                groups = _even(max(1, setting.groups[0] + rng.choice((-2, -1, 1, 2, 3))), sum(groups))
            setting = replace(setting, groups=groups) if max(groups) <= room else setting
        elif which < 0.8:
            setting = replace(setting, in_flight=_shifted(setting.in_flight, most, rng))
        elif which < 0.87:
            setting = replace(setting, pending=_shifted(setting.pending, most, rng))
        elif which < 0.94:
            setting = replace(setting, fill=rng.choice((0, 25, 50, 75, 100)))
        else:
            setting = replace(setting, rule=rng.choice(_RULES))
    return setting


def _even(group: int, count: int) -> tuple[int, ...]:
    """Return groups of ``group`` microbatches and one of what is left."""
    return (group,) * (count // group) + ((count % group,) if count % group else ())


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


def _shifted(limits: Sequence[int], most: int, rng: random.Random) -> tuple[int, ...]:
    """Change the limits of a range of ranks by one or two, or lift them; the least is 0."""
    low = rng.randrange(len(limits))
    high = low + 1 if rng.random() < 0.5 else rng.randrange(low + 1, len(limits) + 1)
    by = most if rng.random() < 0.1 else rng.choice((-2, -1, 1, 2))
    return tuple(
        max(0, min(most, limit + by)) if low <= r < high else limit for r, limit in enumerate(limits)
    )
