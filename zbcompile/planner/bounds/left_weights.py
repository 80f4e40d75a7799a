"""The W's that a rank can have left after its last round trip, less the idle time of that trip.

A rank has run its last F. Of stage s, n_s microbatches are between F and B, 1 <= n_s <= m, and u_s between
B and W, n_s + u_s <= m. They fit into the rank's bytes: sum n_s M_s + sum u_s P_s <= room. The way back
from this F to the rank's last B takes ``back`` ns at least, and the B's in flight fill sum n_s b_s of it.
The value of a filling is

    sum n_s w_s + sum u_s w_s - max(0, back - sum n_s b_s)

`most_left` returns the most of it over all fillings, those with n_s = m for every s left out.

Stages with the same B, W and bytes are one kind. Where few enough whole n are to be tried, each is, with
the most W time that its bytes left over hold. (With P <= M a filling is no worse for having one B less in
flight and one W more waiting, as long as the B's fill the way back: such n are not tried.) Else a price
between 0 and 1 is set on the time that the B's do not fill: max(0, x) >= price * x, so for any price

    sum n_s (w_s + price * b_s) + sum u_s w_s - price * back

is no less than the value, and its most over fractions of n and u is a fractional knapsack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from zbcompile.planner.bounds.knapsack import Item, by_density, filled
from zbcompile.planner.core.instance import Instance

__all__ = ["EIGHTHS", "Left", "most_left"]

EIGHTHS = 8
"""Prices are tried in steps of an eighth."""


@dataclass(frozen=True, slots=True)
class Left:
    """The best filling.

    Attributes
    ----------
    value_ns
        Its value: no filling has a higher one.
    in_flight
        n_s per stage of the rank, if whole n were tried.
    waiting_bytes
        Bytes that these leave to the W's that wait.
    waiting_ns
        Time of those W's, sum u_s w_s.
    price_eighths
        The price, if one was set instead.
    """

    value_ns: int
    in_flight: tuple[int, ...] = ()
    waiting_bytes: int = 0
    waiting_ns: int = 0
    price_eighths: int | None = None

    def terms(self) -> dict[str, object]:
        """Return the evidence for a certificate."""
        if self.price_eighths is not None:
            return {"left_ns": self.value_ns, "price_eighths": self.price_eighths}
        return {
            "left_ns": self.value_ns,
            "in_flight": list(self.in_flight),
            "waiting_bytes": self.waiting_bytes,
            "waiting_ns": self.waiting_ns,
        }


@dataclass(frozen=True, slots=True)
class _Kind:
    """Stages of a rank that are alike: their costs, their number, and their microbatches but one a stage."""

    backward: int
    weight: int
    saved: int
    pending: int
    stages: int
    others: int

    def most_more(self, room: int) -> int:
        """Return how many of the others fit in flight into some bytes."""
        return min(self.others, room // self.saved) if self.saved else self.others


def most_left(instance: Instance, rank: int, back: int, most_tries: int) -> Left | None:
    """Return the best filling of a rank; ``None`` if there is none but n_s = m for every stage.

    Parameters
    ----------
    instance
        The problem, with the costs of `Instance.relaxed`.
    rank
        The rank.
    back
        Least time in ns from the end of the rank's last F to the end of its last B.
    most_tries
        Most n to try.
    """
    kinds, m = _kinds(instance, rank), instance.num_microbatches
    room = instance.headroom[rank] - sum(instance.saved[s] for s in instance.stages_of[rank])
    if room < 0 or m == 1:
        return None
    if prod(kind.most_more(room) + 1 for kind in kinds) > most_tries:
        return _priced(kinds, room, back)
    order = by_density([(kind.weight, kind.pending, 0) for kind in kinds])
    whole = len({(kind.weight, kind.pending) for kind in kinds if kind.pending}) == 1
    best: tuple[int, tuple[int, ...], int, int] | None = None
    for more in _tries(kinds, room, back - sum(kind.stages * kind.backward for kind in kinds)):
        if all(n == kind.others for n, kind in zip(more, kinds, strict=True)):
            continue
        bytes_left = room - sum(n * kind.saved for n, kind in zip(more, kinds, strict=True))
        items = [(kinds[k].weight, kinds[k].pending, kinds[k].others - more[k]) for k in order]
        waiting = filled(items, bytes_left, whole=whole)
        flying = [(n + kind.stages, kind) for n, kind in zip(more, kinds, strict=True)]
        idle = max(0, back - sum(n * kind.backward for n, kind in flying))
        value = sum(n * kind.weight for n, kind in flying) + waiting - idle
        if best is None or value > best[0]:
            best = value, more, bytes_left, waiting
    if best is None:
        return None
    return Left(best[0], _per_stage(instance, rank, kinds, best[1]), *best[2:])


def _kinds(instance: Instance, rank: int) -> list[_Kind]:
    """Return the kinds of stages of a rank."""
    counted = Counter(_costs(instance, s) for s in instance.stages_of[rank])
    m = instance.num_microbatches
    return [_Kind(*costs, count, count * (m - 1)) for costs, count in counted.items()]


def _costs(instance: Instance, stage: int) -> tuple[int, int, int, int]:
    """Return what makes stages alike."""
    return instance.backward[stage], instance.weight[stage], instance.saved[stage], instance.pending[stage]


def _tries(kinds: Sequence[_Kind], room: int, unfilled: int) -> Iterator[tuple[int, ...]]:
    """Yield per kind the B's in flight beyond one a stage, without those that fill the way back twice.

    Parameters
    ----------
    kinds
        Kinds of stages.
    room
        Bytes left for them.
    unfilled
        Time of the way back that one B a stage does not fill.
    """
    if not kinds:
        yield ()
        return
    kind, others = kinds[0], kinds[1:]
    for more in range(kind.most_more(room) + 1):
        left = unfilled - more * kind.backward
        for rest in _tries(others, room - more * kind.saved, left):
            yield (more, *rest)
        if left <= 0 or kind.backward == 0:
            return


def _per_stage(instance: Instance, rank: int, kinds: Sequence[_Kind], more: Sequence[int]) -> tuple[int, ...]:
    """Return the B's in flight per stage: those of a kind on its first stages."""
    left = {
        (kind.backward, kind.weight, kind.saved, kind.pending): n for kind, n in zip(kinds, more, strict=True)
    }
    in_flight = []
    for s in instance.stages_of[rank]:
        here = min(left[_costs(instance, s)], instance.num_microbatches - 1)
        left[_costs(instance, s)] -= here
        in_flight.append(1 + here)
    return tuple(in_flight)


def _priced(kinds: Sequence[_Kind], room: int, back: int) -> Left:
    """Return the least over all prices of what a filling is worth at most, times in eighths of ns."""
    values = []
    for price in range(EIGHTHS + 1):
        total = -price * back
        items: list[Item] = []
        for kind in kinds:
            backward, weight = price * kind.backward, EIGHTHS * kind.weight
            total += kind.stages * (backward + weight)
            more = kind.saved - kind.pending
            if backward * kind.pending <= weight * more:
                items += [(weight, kind.pending, kind.others), (backward, more, kind.others)]
            else:
                items.append((backward + weight, kind.saved, kind.others))
        items = [items[k] for k in by_density(items)]
        values.append(((total + filled(items, room, whole=False)) // EIGHTHS, price))
    value, price = min(values)
    return Left(value, price_eighths=price)
