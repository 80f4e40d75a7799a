"""Deriving a bound again from the problem's own numbers, one line of arithmetic per term.

Nothing here calls the code that found the bound: windows are computed anew and plainly, from the paths and
knapsacks of `zbcompile.planner.certify.facts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import cast

from zbcompile.planner.certify.facts import Derivation, Facts, Witness, add_work, alike, rank_of, refuse
from zbcompile.planner.certify.round_trip import last_round_trip

__all__ = ["derivations", "window_fillings"]

_MANY_STAGES = 128
"""Stages of one rank beyond which no idle time counts."""


def _add_idle(facts: Facts, rank: int, witness: Witness, out: Derivation) -> None:
    """Add the idle time that memory and the round trip force on a rank."""
    before = out.total
    if len(facts.stages_of[rank]) == 1:
        _add_windows(facts, rank, witness, out)
    elif len(facts.stages_of[rank]) <= _MANY_STAGES:
        _add_start_idle(facts, rank, out)
        _add_end_idle(facts, rank, witness, out)
    out.numbers["idle_ns"] = out.total - before


def _add_windows(facts: Facts, rank: int, witness: Witness, out: Derivation) -> None:
    """Add the idle time of every memory window that the witness names."""
    (s,), m, headroom = facts.stages_of[rank], facts.count, facts.headroom[rank]
    trip = facts.way(("F", s), ("B", s))
    assert trip is not None
    fits = m if facts.saved[s] == 0 else min(m, headroom // facts.saved[s])
    out.numbers.update(round_trip_ns=trip, microbatches_that_fit=fits)
    rows: list[list[object]] = []
    out.numbers["windows"] = rows
    windows = witness.get("windows", ())
    if not isinstance(windows, (list, tuple)):
        raise refuse("the witness's windows are no list", given=windows)
    if windows and fits < 1:
        raise refuse("a window on a rank that no microbatch fits on", given=windows)
    if windows:
        out.note(f"        way round from F to B of stage {s}: {trip:,} ns; {fits} microbatches fit")
    before = 1 - fits
    for row in windows:
        i = row[0] if isinstance(row, (list, tuple)) and row else None
        if type(i) is not int or not 1 <= i <= m:
            raise refuse("a window names no microbatch", f"1 to {m}", row)
        if i - before < fits:
            raise refuse("two windows overlap", f"{fits} microbatches apart", [before, i])
        before = i
        forwards = min(fits, m - i + 1)
        fillings = list(window_fillings(facts, rank, s, i, fits))
        most = max(time for _, _, time in fillings)
        fullest = [(flying, waiting) for flying, waiting, time in fillings if time == most]
        flying, waiting = next((pair for pair in fullest if alike(pair, row[2:4])), fullest[0])
        idle = max(0, trip - forwards * facts.f[s] - most)
        rows.append([i, forwards, flying, waiting, idle])
        out.add(
            f"window of microbatch {i}: {trip} - {forwards} F - {flying - 1} other B and W - {waiting} W",
            idle,
        )


def window_fillings(facts: Facts, rank: int, s: int, i: int, fits: int) -> Iterator[tuple[int, int, int]]:
    """Yield what window i can hold: (microbatches in flight, W's already waiting, time of other B's and W's).

    The W's that wait are as many as fit. Fewer of them take less time, or none where W has no length.
    """
    for flying in range(1, min(fits, i) + 1):
        left = facts.headroom[rank] - flying * facts.saved[s]
        waiting = i - flying
        if facts.pending[s]:
            waiting = min(waiting, left // facts.pending[s])
        yield flying, waiting, (flying - 1) * (facts.b[s] + facts.w[s]) + waiting * facts.w[s]


def _add_start_idle(facts: Facts, rank: int, out: Derivation) -> None:
    """Add the idle time before a rank's first B."""
    row = facts.stages_of[rank]
    ways = [[facts.way(("F", a), ("B", s)) or 0 for a in row] for s in row]
    windows = [("B", min(max(to) for to in ways), tuple(row), 0)]
    for s in row:
        if all(facts.way(("F", s), ("B", a)) is not None for a in row):
            others = tuple(a for a in row if facts.way(("F", s), ("F", a)) is None)
            length = max(facts.way(("F", a), ("F", s)) or 0 for a in row)
            windows.append((f"F of stage {s}", length, others, facts.saved[s]))
    idles = []
    for event, length, held, beside in windows:
        items = [(facts.f[s], facts.saved[s], facts.count) for s in held]
        forward = facts.most_time(items, facts.headroom[rank] - beside)
        idles.append((max(0, length - forward), event, length, forward, held))
    idle, event, length, forward, held = max(idles, key=lambda entry: entry[0])
    out.numbers.update(
        start_window_ns=length, start_stages=held, start_forward_ns=forward, start_idle_ns=idle
    )
    out.add(f"idle before the first {event} of rank {rank}: way {length} - F's that fit {forward}", idle)


def _add_end_idle(facts: Facts, rank: int, witness: Witness, out: Derivation) -> None:
    """Add the idle time between the last B of two stages that the witness names."""
    out.numbers["end_idle_ns"] = 0
    pair = witness.get("end_stages")
    if pair is None:
        return
    row = facts.stages_of[rank]
    if (
        not isinstance(pair, (list, tuple))
        or len(pair) != 2
        or not all(type(s) is int and s in row for s in pair)
        or pair[0] == pair[1]
    ):
        raise refuse("the witness's end stages are not two stages of the rank", list(row), pair)
    upper, lower = cast(int, pair[0]), cast(int, pair[1])
    way = facts.way(("B", upper), ("B", lower))
    others = [s for s in row if s not in (upper, lower)]
    if (
        way is None
        or any(facts.way(("F", s), ("B", upper)) is None for s in row)
        or any(facts.way(("B", s), ("B", upper)) is None for s in others)
    ):
        raise refuse(f"B of stage {upper} does not come after the rank's other work", given=list(pair))
    times = [0]
    for flying in range(1, facts.count + 1):
        headroom = facts.headroom[rank] - flying * facts.saved[lower]
        if headroom < 0:
            break
        time = (flying - 1) * (facts.b[lower] + facts.w[lower]) + facts.waiting_time(rank, headroom)
        times.append(time)
    most, length = max(times), way - facts.b[upper]
    fullest = [flying for flying, time in enumerate(times) if time == most and flying] or [1]
    given = witness.get("end_in_flight")
    out.numbers.update(
        end_stages=[upper, lower],
        end_window_ns=length,
        end_in_flight=given if type(given) is int and given in fullest else fullest[-1],
        end_work_ns=most,
        end_idle_ns=max(0, length - most),
    )
    out.add(
        f"idle between the last B of stages {upper} and {lower}: {length} - work that fits {most}",
        max(0, length - most),
    )


def _rank_work(facts: Facts, witness: Witness, out: Derivation) -> None:
    """Add the work and the idle time of one rank."""
    rank = rank_of(facts, witness)
    out.numbers["rank"] = rank
    add_work(facts, rank, out)
    _add_idle(facts, rank, witness, out)


def _area(facts: Facts, witness: Witness, out: Derivation) -> None:
    """Add the bytes times time that one rank must hold, over its headroom."""
    rank = rank_of(facts, witness)
    if facts.headroom[rank] <= 0:
        raise refuse("a rank without headroom has no area")
    area = 0
    for s in facts.stages_of[rank]:
        trip = facts.way(("F", s), ("B", s))
        assert trip is not None
        held = (trip + facts.b[s]) * facts.saved[s] + facts.w[s] * facts.pending[s]
        out.note(
            f"        stage {s}: ({trip} + {facts.b[s]}) ns x {facts.saved[s]} bytes"
            f" + {facts.w[s]} ns x {facts.pending[s]} bytes"
        )
        area += facts.count * held
    out.numbers.update(rank=rank, byte_ns=area, headroom_bytes=facts.headroom[rank])
    out.add(
        f"{area:,} byte ns of {facts.count} microbatches over {facts.headroom[rank]:,} bytes of rank {rank}",
        -(-area // facts.headroom[rank]),
    )


def _enclosing(facts: Facts, witness: Witness, out: Derivation) -> None:
    """Add the path from one rank to another, that one's work, and the path back."""
    outer, inner = rank_of(facts, witness, "outer_rank"), rank_of(facts, witness, "inner_rank")
    x, y, z, q = facts.first(outer), facts.first(inner), facts.last(outer), facts.last(inner)
    if x is None or y is None or z is None or q is None or outer == inner:
        raise refuse("these ranks do not enclose each other", given=[outer, inner])
    down, up = facts.way(("F", x), ("F", y)), facts.way(("B", q), ("B", z))
    if down is None or up is None:
        raise refuse("no way leads from the outer rank to the inner and back", given=[outer, inner])
    trailing, back = facts.trailing(inner), up - facts.b[q] + facts.b[z] + facts.w[z]
    out.numbers.update(outer_rank=outer, inner_rank=inner, way_there_ns=down)
    out.numbers.update(trailing_weight_ns=trailing, way_back_ns=back)
    out.add(f"F's from rank {outer} to rank {inner}", down)
    add_work(facts, inner, out)
    _add_idle(facts, inner, witness, out)
    out.add(f"W's that rank {inner} may leave behind its last B", -trailing)
    out.add(f"B's back to rank {outer} and its last W", back)


def _head_and_work(facts: Facts, witness: Witness, out: Derivation) -> None:
    """Add the F's before a rank's first F, then its work and idle time."""
    rank = rank_of(facts, witness)
    head = min(facts.head(s) for s in facts.stages_of[rank])
    out.numbers["head_ns"] = head
    out.add(f"F's before the first F of rank {rank}", head)
    _rank_work(facts, witness, out)


def _head_work_and_tail(facts: Facts, witness: Witness, out: Derivation) -> None:
    """Add the same, less the W's that can be left, and what follows the rank's last B."""
    rank = rank_of(facts, witness)
    _head_and_work(facts, witness, out)
    trailing, last = facts.trailing(rank), facts.last(rank)
    assert last is not None
    out.numbers.update(trailing_weight_ns=trailing, tail_ns=facts.after(last))
    out.add(f"W's that rank {rank} may leave behind its last B", -trailing)
    out.add(f"B's and a W after the last B of stage {last}", facts.after(last))


def _one_microbatch(facts: Facts, witness: Witness, out: Derivation) -> None:
    """Add the longest path of one microbatch."""
    best = max(
        length + facts.b[s] + facts.w[s]
        for a in range(len(facts.f))
        for (kind, s), length in facts.far(("F", a)).items()
        if kind == "B"
    )
    out.numbers["path_ns"] = best
    out.add("longest way of one microbatch through the model", best)


def _warmup(facts: Facts, witness: Witness, out: Derivation) -> None:
    """Add the least value with which every rank reaches its first B in time."""
    count = len(facts.f)
    edges = facts.problem.profile.edges
    chain = [(s, s + 1) for s in range(count - 1)]
    plain = [(e.source, e.target) for e in edges] == chain and all(e.has_gradient for e in edges)
    if facts.problem.placement.rank_of != tuple(range(count)) or not plain:
        raise refuse("the warm-up bound is for a chain with one stage per rank")
    low, high = 0, 1
    while _first_backwards(facts, high)[-1][-1] < 0:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _first_backwards(facts, middle)[-1][-1] >= 0 else (middle + 1, high)
    steps = _first_backwards(facts, low - 1) if low else []
    out.numbers["steps_one_ns_below"] = [[*step[:4], step[3] + step[4]] for step in steps]
    for d, least, forwards, idle, spare in steps:
        out.note(
            f"        rank {d}, with one ns less: B(1) at {least} or later, {forwards} F before it,"
            f" idle {idle} of {idle + spare}"
        )
    out.add("the least value with which every rank reaches its first B in the idle time it has", low)


def _first_backwards(facts: Facts, value: int) -> list[tuple[int, int, int, int, int]]:
    """Return, from the last rank up, (rank, least time to B(1), F's before it, idle, idle time to spare).

    Ends with the first rank whose time to spare is negative, or with rank 0.
    """
    steps: list[tuple[int, int, int, int, int]] = []
    least, edges = 0, facts.problem.profile.edges
    for d in range(len(facts.f) - 1, -1, -1):
        least += facts.f[d]
        if d < len(facts.f) - 1:
            there, back = facts.problem.lag_ns(edges[d]), facts.problem.lag_ns(edges[d], backward=True)
            least += there + facts.b[d + 1] + back
        head = facts.head(d) if facts.problem.objective == "makespan" else 0
        allowed = value - head - facts.work(d)
        fits = min(facts.count, facts.headroom[d] // facts.saved[d]) if facts.saved[d] else facts.count
        forwards = min(fits, least // facts.f[d]) if facts.f[d] else fits
        idle = least - forwards * facts.f[d]
        if idle > allowed >= 0 and forwards < fits:
            forwards, idle = forwards + 1, 0
            least = forwards * facts.f[d]
        steps.append((d, least, forwards, idle, allowed - idle))
        if idle > allowed:
            break
    return steps


_SPAN: dict[str, Callable[[Facts, Witness, Derivation], None]] = {
    "work": _rank_work,
    "memory_windows": _rank_work,
    "start_end_idle": _rank_work,
    "area": _area,
    "warmup": _warmup,
    "enclosing_pair": _enclosing,
    "last_round_trip": last_round_trip,
}
_MAKESPAN: dict[str, Callable[[Facts, Witness, Derivation], None]] = {
    "head_and_work": _head_and_work,
    "head_work_and_tail": _head_work_and_tail,
    "one_microbatch": _one_microbatch,
}


def derivations(objective: str) -> Mapping[str, Callable[[Facts, Witness, Derivation], None]]:
    """Return the methods that prove a bound of this objective. What bounds the span bounds the makespan."""
    return _SPAN if objective == "span" else {**_SPAN, **_MAKESPAN}
