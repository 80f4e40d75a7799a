"""Ranks that end as early as their order allows, in the exact model.

For each rank's end a chain of waits, each as short as it can be, leads back to time 0. What a time may wait
for: the model's own constraints (`OrderModel.causes`), and that its rank is busy with another action or with
what that one sends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ortools.sat.python import cp_model

from zbcompile.planner.core.instance import B, F, W
from zbcompile.planner.exact.order_model import Cause, OrderModel

__all__ = ["end_early"]


def end_early(orders: OrderModel) -> None:
    """Let every rank end as early as its order allows."""
    chains = _Chains(orders)
    for rank in range(orders.instance.num_ranks):
        chains.add_end(rank)
    chains.lead_back()


class _Chains:
    """Chains of waits.

    Attributes
    ----------
    tight
        Per time in a chain, by the index of its variable, whether a chain leads through it.
    waiting
        Times in a chain for which it has not been said yet what they wait for.
    """

    def __init__(self, orders: OrderModel) -> None:
        self.orders, self.model = orders, orders.model
        self.causes: dict[int, list[Cause]] = {}
        for cause in (*orders.causes, *_turns(orders)):
            self.causes.setdefault(cause.time.index, []).append(cause)
        self.tight: dict[int, cp_model.IntVar] = {}
        self.waiting: list[cp_model.IntVar] = []

    def through(self, time: cp_model.IntVar) -> cp_model.IntVar:
        """Return whether a chain leads through a time."""
        if time.index not in self.tight:
            self.tight[time.index] = self.model.new_bool_var("tight")
            self.waiting.append(time)
        return self.tight[time.index]

    def add_end(self, rank: int) -> None:
        """Begin a chain at the last end of a rank."""
        model, orders, last = self.model, self.orders, list[cp_model.IntVar]()
        ends, final = orders.ends(rank), orders.instance.num_microbatches - 1
        for s, end in zip(orders.instance.stages_of[rank], ends, strict=True):
            last.append(model.new_bool_var("last"))
            for other in ends:
                model.add(end >= other).only_enforce_if(last[-1])
            model.add_implication(last[-1], self.through(orders.start[W, s, final]))
        model.add_bool_or(last)

    def lead_back(self) -> None:
        """Lead every chain back to time 0."""
        model = self.model
        while self.waiting:
            time = self.waiting.pop()
            reasons = [model.new_bool_var("at once")]
            model.add(time == 0).only_enforce_if(reasons[0])
            for cause in self.causes.get(time.index, ()):
                reasons.append(model.new_bool_var("cause"))
                model.add(time == cause.since).only_enforce_if(reasons[-1])
                model.add_bool_and([self.through(cause.of), *cause.when]).only_enforce_if(reasons[-1])
            model.add_bool_or([~self.tight[time.index], *reasons])


def _turns(orders: OrderModel) -> Iterator[Cause]:
    """Yield what actions may wait for because their rank is busy with another one, or its messages."""
    for rank in range(orders.instance.num_ranks):
        for before, after in itertools.permutations(orders.rank_ops(rank, F, B, W), 2):
            time, there = orders.start[after], orders.there(before, after)
            yield Cause(time, orders.end(before), orders.start[before], there)
            for arrival, begin in orders.arrivals.get(before, ()):
                yield Cause(time, arrival, begin, there)
