"""The last-round-trip bound: what a rank idles until its last F has come back as its last B.

Statement. Let rank r have stages y, h and q such that F(y) comes before every other F of the rank, F(h)
after every other F and before every B, and B(q) after every other B, by paths of one microbatch. Then from
the start of F(1) of y to the end of B(m) of q it takes at least D(r) = the lesser of

    work - min(V, R) + max(I0, I1)                                              some F runs after the first B
    work - m sum w_s + max(I1, I0 + max(0, back - m sum b_s))                   all F's run before the first B

where the second one counts only if all m microbatches of all stages fit at once (sum m M_s <= room), the
first one only if there is a V, and

back
    is the longest path from the end of F(h) to the end of B(q).
V
    is the most W time left on the rank after that path, less what the rank idles on it
    (`zbcompile.planner.bounds.left_weights`).
R
    is the most W time left when B(m) of q ends: w_q, and what the bytes hold back beside M_q.
I1
    is the idle time before the rank's first B, and I0 that before the first F of a stage for which every B of
    the rank waits (`zbcompile.planner.bounds.start_end_idle`).

So with any stages x and z of a rank o, which may be r itself,

    span >= path(F(x) -> F(y)) + D(r) + way from the end of B(q) to the end of B(z) + w_z
    makespan >= head of F(y) + D(r) + what must follow the end of B(q)

Proof. (1) The k-th executed F, B or W of a stage is called microbatch k. That keeps the dependencies: when
the k-th F of a stage starts, k F's of every stage that it waits for have arrived, the k-th among them. It
keeps the bytes, which count actions. (2) Let t0 be the start of F(1) of y, t1 the end of F(m) of h, and t2
the end of B(m) of q; F(1) of y is the rank's first action, F(m) of h its last F, B(m) of q its last B. At
t1 no B is half done, all F's are done, and no B(m) has started, so of every stage n_s >= 1 microbatches are
in flight. While F(m) of h ran, their M's and the P's of the W's left, u_s of a stage, were held: they fit.
(3) From t1 to t2 the rank runs the B's in flight, some W's, and idles; t2 - t1 is at least ``back`` and at
least the time of these B's. W time left at t2, less idle time from t1 to t2, is

    sum n_s (b_s + w_s) + sum u_s w_s - (t2 - t1)  <=  sum n_s w_s + sum u_s w_s - max(0, back - sum n_s b_s)

and no more than the W time left at t2, so at most min(V, R). (4) t2 - t0 is the work, plus the idle time,
less the W time left at t2. If some F runs after the first B, the windows of I0 and I1 end before t1 and
some n_s is below m: the first form. If none does, no W runs before t1 and all n_s are m, so that t1 - t0 >=
m sum f_s + I0 and t2 - t1 >= max(m sum b_s, back); and the first B starts m sum f_s + I1 after t0 or later,
with m sum b_s to follow: the second form. (5) The ways there and back are paths of microbatch 1 and of
microbatch m.

Not looked at: ranks with more than `MANY_STAGES` stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.bounds.left_weights import most_left
from zbcompile.planner.bounds.rank_idle import MANY_STAGES, RankIdle
from zbcompile.planner.bounds.start_end_idle import start_windows
from zbcompile.planner.core.instance import Instance, is_path
from zbcompile.planner.core.paths import NO_PATH, Paths

__all__ = ["last_round_trip_bounds"]

_TRIES = 20_000
"""Numbers of microbatches in flight that are tried in all, shared among the ranks."""


@dataclass(frozen=True, slots=True)
class _Trip:
    """D of one rank, and what it is made of."""

    rank: int
    first: int
    turn: int
    last: int
    value_ns: int
    terms: dict[str, object]


def last_round_trip_bounds(instance: Instance, paths: Paths, idles: Sequence[RankIdle]) -> Iterator[Bound]:
    """Yield the bound of every inner rank, for the span with the outer rank that gives the most."""
    trips = [trip for idle in idles if (trip := _trip(instance, paths, idle)) is not None]
    if instance.objective == "makespan":
        yield from (_makespan(instance, paths, trip) for trip in trips)
        return
    outers = _along_chain(instance, paths) if is_path(instance) else None
    for trip in trips:
        outer = _best_outer(instance, paths, trip) if outers is None else outers[trip.first]
        yield _span(instance, paths, trip, outer)


def _trip(instance: Instance, paths: Paths, idle: RankIdle) -> _Trip | None:
    """Return D of a rank, ``None`` where the stages are missing or nothing fits."""
    rank, y, q = idle.rank, idle.first, idle.last
    stages, m = instance.stages_of[rank], instance.num_microbatches
    h = None if y is None or q is None or len(stages) > MANY_STAGES else _turn(paths, stages)
    if y is None or q is None or h is None:
        return None
    work, backward = instance.work(rank), m * sum(instance.backward[s] for s in stages)
    back = paths.f_to_b(h, q) - instance.forward[h] + instance.backward[q]
    before_backward, *windows = start_windows(instance, paths, rank)
    before_stage = max(windows, key=lambda window: window.idle_ns)
    lower, upper = before_backward.idle_ns, before_stage.idle_ns
    terms: dict[str, object] = {
        "work_ns": work,
        "before_backward": [before_backward.length_ns, before_backward.forward_ns, lower],
        "before_stage": [before_stage.length_ns, before_stage.forward_ns, upper],
        "back_ns": back,
    }
    values = []
    left = most_left(instance, rank, back, _TRIES // instance.num_ranks)
    if left is not None:
        terms |= {**left.terms(), "trailing_weight_ns": idle.trailing_ns}
        values.append(work - min(left.value_ns, idle.trailing_ns) + max(upper, lower))
    if m * sum(instance.saved[s] for s in stages) <= instance.headroom[rank]:
        weight = m * sum(instance.weight[s] for s in stages)
        values.append(work - weight + max(lower, upper + max(0, back - backward)))
        terms["forwards_first_ns"] = values[-1]
    return _Trip(rank, y, h, q, min(values), terms) if values else None


def _turn(paths: Paths, stages: Sequence[int]) -> int | None:
    """Return the stage whose F comes after every F of the rank and before every B."""
    for h in stages:
        if all(paths.f_to_f(s, h) != NO_PATH and paths.f_to_b(h, s) != NO_PATH for s in stages):
            return h
    return None


def _makespan(instance: Instance, paths: Paths, trip: _Trip) -> Bound:
    """Return the bound of the makespan by one rank's D."""
    head = paths.head[trip.first]
    tail = paths.tail[instance.num_stages + trip.last] - instance.backward[trip.last]
    witness = {"inner_rank": trip.rank, "head_ns": head, **_stages(trip), **trip.terms, "tail_ns": tail}
    return Bound(head + trip.value_ns + tail, "last_round_trip", "makespan", witness)


def _stages(trip: _Trip) -> dict[str, object]:
    """Return the stages y, h and q for a witness."""
    return {"first_forward": trip.first, "last_forward": trip.turn, "last_backward": trip.last}


Outer = tuple[int, int, int]
"""A rank and two of its stages: that of the way there, and that of the way back."""


def _best_outer(instance: Instance, paths: Paths, trip: _Trip) -> Outer:
    """Return the outer rank with the longest ways there and back."""
    best = (NO_PATH, (0, 0, 0))
    for outer, stages in enumerate(instance.stages_of):
        there, x = max((paths.f_to_f(x, trip.first), -x) for x in stages)
        back, z = max((_back(instance, paths, trip.last, z), -z) for z in stages)
        if there != NO_PATH and back != NO_PATH and there + back > best[0]:
            best = there + back, (outer, -x, -z)
    return best[1]


def _along_chain(instance: Instance, paths: Paths) -> list[Outer]:
    """Return the same along a chain, by the first stage of the inner rank, which has its last B as well.

    There the ways are differences of sums along the chain, so that one pass over the stages finds the best.
    """
    best, outers, last = (NO_PATH, (0, 0, 0)), [], instance.num_stages - 1
    for z, outer in enumerate(instance.rank_of):
        x = min(instance.stages_of[outer])
        far = paths.b_to_b(last, z) + instance.backward[z] + instance.weight[z] - paths.f_to_f(0, x)
        if z == 0 or far > best[0]:
            best = far, (outer, x, z)
        outers.append(best[1])
    return outers


def _span(instance: Instance, paths: Paths, trip: _Trip, outer: Outer) -> Bound:
    """Return the bound of the span by one rank's D and an outer rank."""
    rank, x, z = outer
    there, back = paths.f_to_f(x, trip.first), _back(instance, paths, trip.last, z)
    witness = {
        "outer_rank": rank,
        "inner_rank": trip.rank,
        "outer_stages": [x, z],
        "way_there_ns": there,
        **_stages(trip),
        **trip.terms,
        "way_back_ns": back,
    }
    return Bound(there + trip.value_ns + back, "last_round_trip", "span", witness)


def _back(instance: Instance, paths: Paths, q: int, z: int) -> int:
    """Return the least time from the end of B(q) to the end of W(z) after B(z), `NO_PATH` without a path."""
    way = paths.b_to_b(q, z)
    return (
        NO_PATH if way == NO_PATH else way - instance.backward[q] + instance.backward[z] + instance.weight[z]
    )
