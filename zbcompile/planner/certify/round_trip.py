"""Deriving the last-round-trip bound again.

The statement and its proof are in `zbcompile.planner.bounds.last_round_trip`. Here every number of
microbatches in flight that the bytes allow is tried, also those that the other code leaves out; and where a
price is set on time that the B's do not fill, the most that a filling is worth comes from the other side,
as the least over all prices of a byte."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, prod

from zbcompile.planner.certify.facts import (
    Derivation,
    Facts,
    Witness,
    add_work,
    number,
    rank_of,
    refuse,
)

__all__ = ["last_round_trip"]

_Kind = tuple[int, int, int, int]

_MOST_TRIES = 20_000
"""Most numbers of microbatches in flight to try; a witness that asks for more is refused."""

_MANY_STAGES = 128
"""Stages of one rank beyond which the bound is not derived."""


def last_round_trip(facts: Facts, witness: Witness, out: Derivation) -> None:
    """Add the way to the inner rank, its work and idle time less the W's left, and the way back or on."""
    inner = rank_of(facts, witness, "inner_rank")
    row = facts.stages_of[inner]
    y, q = facts.first(inner), facts.last(inner)
    turns = [h for h in row if _turns(facts, row, h)] if len(row) <= _MANY_STAGES else []
    if y is None or q is None or not turns:
        raise refuse(f"no F or no B is bound to be the last of rank {inner}", given=inner)
    h = turns[0]
    out.numbers.update(inner_rank=inner, first_forward=y, last_forward=h, last_backward=q)
    span = facts.problem.objective == "span"
    _add_way_there(facts, witness, y, out, span=span)
    _add_trip(facts, inner, h, q, witness, out)
    _add_way_back(facts, witness, q, out, span=span)


def _turns(facts: Facts, row: Sequence[int], h: int) -> bool:
    """Return whether F of stage h comes after every F of the rank and before every B."""
    after = all(facts.way(("F", s), ("F", h)) is not None for s in row)
    return after and all(facts.way(("F", h), ("B", s)) is not None for s in row)


def _outer(facts: Facts, witness: Witness) -> tuple[int, int, int]:
    """Return the outer rank and the two of its stages that the witness names."""
    outer, pair = rank_of(facts, witness, "outer_rank"), witness.get("outer_stages")
    row = facts.stages_of[outer]
    if (
        not isinstance(pair, (list, tuple))
        or len(pair) != 2
        or not all(type(s) is int and s in row for s in pair)
    ):
        raise refuse("the witness's outer stages are not two stages of its outer rank", list(row), pair)
    return outer, pair[0], pair[1]


def _add_way_there(facts: Facts, witness: Witness, y: int, out: Derivation, *, span: bool) -> None:
    """Add what runs before F(1) of stage y."""
    if not span:
        out.numbers["head_ns"] = facts.head(y)
        out.add(f"F's before F(1) of stage {y}", facts.head(y))
        return
    outer, x, z = _outer(facts, witness)
    way = facts.way(("F", x), ("F", y))
    if way is None:
        raise refuse("no way leads from the outer rank to the inner", given=[x, y])
    out.numbers.update(outer_rank=outer, outer_stages=[x, z], way_there_ns=way)
    out.add(f"F's from stage {x} of rank {outer} to stage {y}", way)


def _add_way_back(facts: Facts, witness: Witness, q: int, out: Derivation, *, span: bool) -> None:
    """Add what follows the end of B(m) of stage q."""
    if not span:
        out.numbers["tail_ns"] = facts.after(q)
        out.add(f"B's and a W after the last B of stage {q}", facts.after(q))
        return
    outer, _, z = _outer(facts, witness)
    way = facts.way(("B", q), ("B", z))
    if way is None:
        raise refuse("no way leads from the inner rank back to the outer", given=[q, z])
    back = way - facts.b[q] + facts.b[z] + facts.w[z]
    out.numbers["way_back_ns"] = back
    out.add(f"B's back to stage {z} of rank {outer}, and its last W", back)


def _add_trip(facts: Facts, rank: int, h: int, q: int, witness: Witness, out: Derivation) -> None:
    """Add the least time from a rank's first F to its last B."""
    row, m = facts.stages_of[rank], facts.count
    way = facts.way(("F", h), ("B", q))
    assert way is not None
    back = way - facts.f[h] + facts.b[q]
    start, stage = _start_idle(facts, rank)
    out.numbers.update(before_backward=start, before_stage=stage, back_ns=back)
    out.note(f"        way back from the last F, of stage {h}, to the last B, of stage {q}: {back:,} ns")
    add_work(facts, rank, out)
    first, left = max(start[2], stage[2]), _left(facts, rank, back, witness, out)
    if left is not None:
        trailing = facts.trailing(rank)
        out.numbers["trailing_weight_ns"] = trailing
        out.note(f"        W's that may be left behind the last B: {trailing:,} ns")
        left = min(left, trailing)
    if m * sum(facts.saved[s] for s in row) <= facts.headroom[rank]:
        weight = m * sum(facts.w[s] for s in row)
        alone = max(start[2], stage[2] + max(0, back - m * sum(facts.b[s] for s in row)))
        out.numbers["forwards_first_ns"] = facts.work(rank) - weight + alone
        if left is None or alone - weight < first - left:
            out.add("idle with every F before the first B", alone)
            out.add("W's, all of which may be left then", -weight)
            return
    if left is None:
        raise refuse(f"nothing fits on rank {rank}", given=rank)
    out.add(f"idle before the first B or the first F of stage {h}", first)
    out.add("W's left behind the last B, less idle time on the way back", -left)


def _start_idle(facts: Facts, rank: int) -> tuple[list[int], list[int]]:
    """Return (way, F's that fit, idle) before the first B, and before the first F of a stage B's wait for."""
    row = facts.stages_of[rank]

    def entry(length: int, stages: Sequence[int], beside: int) -> list[int]:
        items = [(facts.f[s], facts.saved[s], facts.count) for s in stages]
        forward = facts.most_time(items, facts.headroom[rank] - beside)
        return [length, forward, max(0, length - forward)]

    ways = [max(facts.way(("F", a), ("B", s)) or 0 for a in row) for s in row]
    stages = []
    for s in row:
        if all(facts.way(("F", s), ("B", a)) is not None for a in row):
            earlier = [a for a in row if facts.way(("F", s), ("F", a)) is None]
            stages.append(
                entry(max(facts.way(("F", a), ("F", s)) or 0 for a in row), earlier, facts.saved[s])
            )
    return entry(min(ways), row, 0), max(stages, key=lambda window: window[2])


def _left(facts: Facts, rank: int, back: int, witness: Witness, out: Derivation) -> int | None:
    """Return the most W time left behind the way back, less idle time on it; ``None`` if nothing fits."""
    room = facts.headroom[rank] - sum(facts.saved[s] for s in facts.stages_of[rank])
    if room < 0 or facts.count == 1:
        return None
    if "price_eighths" in witness:
        price = number(witness, "price_eighths", 8)
        value = floor(_least_by_byte_price(facts, rank, room, Fraction(price, 8)) - Fraction(price * back, 8))
        out.numbers.update(left_ns=value, price_eighths=price)
        out.note(f"        time that B's do not fill at a price of {price}/8: W's less idle {value:,} ns")
        return value
    fillings = _fillings(facts, rank, room, back)
    if not fillings:
        return None
    most = max(filling.value for filling in fillings.values())
    shown = _in_flight(facts, rank, witness)
    found = fillings.get(_per_kind(facts, rank, shown))
    if found is None or found.value < most:
        found = next(filling for filling in fillings.values() if filling.value == most)
        shown = found.per_stage(facts, rank)
    out.numbers.update(left_ns=most, in_flight=shown, waiting_bytes=found.size, waiting_ns=found.waiting)
    out.note(
        f"        B's in flight per stage {shown}, W's that wait in {found.size:,} bytes: {found.waiting:,}"
        f" ns; all their W's less idle: {most:,} ns"
    )
    return most


@dataclass(frozen=True)
class _Filling:
    """Microbatches in flight per kind of stage, their value, and the bytes and time of W's that wait."""

    flying: dict[_Kind, int]
    value: int
    size: int
    waiting: int

    def per_stage(self, facts: Facts, rank: int) -> list[int]:
        """Return the microbatches per stage, those of alike stages on the first of them."""
        row, left = [], dict(self.flying)
        alike_after = Counter(_kind(facts, s) for s in facts.stages_of[rank])
        for s in facts.stages_of[rank]:
            kind = _kind(facts, s)
            alike_after[kind] -= 1
            row.append(min(facts.count, left[kind] - alike_after[kind]))
            left[kind] -= row[-1]
        return row


def _kind(facts: Facts, stage: int) -> _Kind:
    """Return what makes stages alike: B, W, M_B, M_W."""
    return facts.b[stage], facts.w[stage], facts.saved[stage], facts.pending[stage]


def _in_flight(facts: Facts, rank: int, witness: Witness) -> list[int]:
    """Return the microbatches in flight per stage that the witness names; empty if it names none."""
    given, row = witness.get("in_flight", []), facts.stages_of[rank]
    if not isinstance(given, (list, tuple)):
        raise refuse("the witness's numbers in flight are no list", given=given)
    usable = len(given) == len(row) and all(type(n) is int and 1 <= n <= facts.count for n in given)
    return list(given) if usable else []


def _per_kind(facts: Facts, rank: int, in_flight: Sequence[int]) -> tuple[int, ...]:
    """Return the microbatches in flight per kind of stage, () if there are none."""
    counted: Counter[_Kind] = Counter()
    for s, n in zip(facts.stages_of[rank], in_flight, strict=False):
        counted[_kind(facts, s)] += n
    return tuple(counted.values())


def _fillings(facts: Facts, rank: int, room: int, back: int) -> dict[tuple[int, ...], _Filling]:
    """Return every filling by its microbatches in flight per kind, but the one with all of them."""
    m, stages = facts.count, Counter(_kind(facts, s) for s in facts.stages_of[rank])
    ranges = []
    for (_, _, saved, _), alike_stages in stages.items():
        most = min(m * alike_stages, alike_stages + room // saved) if saved else m * alike_stages
        ranges.append(range(alike_stages, most + 1))
    if prod(map(len, ranges)) > _MOST_TRIES:
        raise refuse("the witness sets no price and leaves too many to try", f"at most {_MOST_TRIES}")
    fillings = {}
    for flying in itertools.product(*ranges):
        here = dict(zip(stages, flying, strict=True))
        size = room - sum((n - stages[kind]) * kind[2] for kind, n in here.items())
        if size < 0 or all(n == m * stages[kind] for kind, n in here.items()):
            continue
        items = [(kind[1], kind[3], m * stages[kind] - n) for kind, n in here.items()]
        waiting = facts.most_time(items, size)
        idle = max(0, back - sum(n * kind[0] for kind, n in here.items()))
        value = sum(n * kind[1] for kind, n in here.items()) + waiting - idle
        fillings[flying] = _Filling(here, value, size, waiting)
    return fillings


def _least_by_byte_price(facts: Facts, rank: int, room: int, price: Fraction) -> Fraction:
    """Return the most of W's and, at a price, of B's in flight, by weak duality and a price of a byte.

    One microbatch of each stage is in flight; every other one is in flight, waits, or neither, whichever is
    worth most. The least over the prices of a byte is where two of these are worth the same for some stage.
    """
    row = facts.stages_of[rank]
    worth = [(facts.w[s] + price * facts.b[s], facts.saved[s], facts.w[s], facts.pending[s]) for s in row]
    prices = {Fraction(0)}
    for both, saved, weight, pending in worth:
        pairs = ((both, saved), (weight, pending), (both - weight, saved - pending))
        prices.update(Fraction(time) / size for time, size in pairs if size)
    best = min(
        byte * room
        + (facts.count - 1)
        * sum(
            max(Fraction(0), both - byte * saved, weight - byte * pending)
            for both, saved, weight, pending in worth
        )
        for byte in prices
    )
    return best + sum(both for both, _, _, _ in worth)
