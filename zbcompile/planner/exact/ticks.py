"""A problem in whole ticks, so that every action and every message takes at least one.

Of two actions that start together, one of them without length, starts do not say which comes first, and
memory depends on it. So where Z of a step's actions and messages have no length, all times and lags count
K = Z + 1 fold and each of the Z takes 1. An order of value v then has a value from K v to K v + Z: start
every action at K times its start, plus one for each of the Z before it in the order. So K v + Z is asked for
where v is, and what is found divides by K.

Where ranks end as early as they can, a span is a difference of such times: it is from K v - Z to K v + 2 Z,
and K is 3 Z + 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from zbcompile.planner.core.instance import Instance
from zbcompile.planner.core.paths import NO_PATH, Paths
from zbcompile.planner.core.times import Clock
from zbcompile.schedule.semantics import ASYNC, SendMode

__all__ = ["Ticks", "Way", "exact_unit"]


class Way(NamedTuple):
    """What the messages of one kind between two stages on different ranks have in common.

    Attributes
    ----------
    side
        0: what F makes, 1: what B or BW makes.
    source, target
        The stages that send and receive.
    channel
        The ranks that send and receive.
    lag
        Travel time in ticks.
    busy
        Ticks for which one message keeps its channel.
    """

    side: int
    source: int
    target: int
    channel: tuple[int, int]
    lag: int
    busy: int


def exact_unit(instance: Instance, ways: tuple[Way, ...] = ()) -> int:
    """Return the largest time in ns that divides all times and lags."""
    times = (*instance.forward, *instance.backward, *instance.weight, *instance.fused)
    times += instance.steps.times()
    return math.gcd(*times, *instance.rules.lags, *(way.busy for way in ways)) or 1


@dataclass(frozen=True, slots=True)
class Ticks:
    """A problem in ticks, and what its values say about ns.

    Attributes
    ----------
    instance
        The problem with its times in ticks.
    ways
        Its messages, where sends hold their rank; their lags are at least a tick.
    mode
        The send mode.
    unit
        The largest time in ns that divides all times.
    factor
        Ticks per unit (K): 1 where everything has a length.
    below, spare
        How many ticks a value may lie under and over K times that in units.
    """

    instance: Instance
    ways: tuple[Way, ...]
    mode: SendMode
    unit: int
    factor: int
    below: int
    spare: int

    @staticmethod
    def of(instance: Instance, clock: Clock | None = None, *, early: bool = False) -> Ticks:
        """Count a problem's times in ticks.

        Parameters
        ----------
        instance
            The problem.
        clock
            The clock of its send mode, if sends hold their rank.
        early
            Whether ranks end as early as they can.
        """
        ways = () if clock is None else _ways(clock)
        times = (*instance.forward, *instance.backward, *instance.weight, *instance.fused)
        without = instance.num_microbatches * (times.count(0) + sum(way.lag == 0 for way in ways))
        below, spare = (without, 2 * without) if early else (0, without)
        unit, factor = exact_unit(instance, ways), below + spare + 1

        def lengths(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(value // unit * factor or 1 for value in values)

        ticking = replace(
            instance,
            forward=lengths(instance.forward),
            backward=lengths(instance.backward),
            weight=lengths(instance.weight),
            fused=lengths(instance.fused),
            rules=instance.rules.with_lags(lambda wait: wait.lag_ns // unit * factor),
            steps=instance.steps.in_ticks(unit, factor),
        )
        sent = tuple(
            way._replace(lag=way.lag // unit * factor or 1, busy=way.busy // unit * factor) for way in ways
        )
        mode = ASYNC if clock is None else clock.problem.sends
        return Ticks(ticking, sent, mode, unit, factor, below, spare)

    @property
    def one_source(self) -> bool:
        """Whether everything waits for the first F of stage 0, which may then be said to start at 0."""
        paths = Paths.of(self.instance)
        return all(paths.f_to_f(0, s) != NO_PATH for s in range(self.instance.num_stages))

    def least(self, value_ns: int) -> int:
        """Return the least value in ticks of an order of at least ``value_ns``."""
        return max(0, -(-value_ns // self.unit) * self.factor - self.below)

    def most(self, value_ns: int) -> int:
        """Return the most ticks that the best starts of an order of at most ``value_ns`` take."""
        return value_ns // self.unit * self.factor + self.spare

    def bound_ns(self, ticks: int) -> int:
        """Return a lower bound in ns from one in ticks."""
        return -(-(ticks - self.spare) // self.factor) * self.unit


def _ways(clock: Clock) -> tuple[Way, ...]:
    """Return a problem's messages, in ns."""
    rank_of = clock.instance.rank_of
    return tuple(
        Way(side, source, target, (rank_of[source], there), lag, busy)
        for side, rows in enumerate(clock.out)
        for source, row in enumerate(rows)
        for target, there, lag, busy in row
    )
