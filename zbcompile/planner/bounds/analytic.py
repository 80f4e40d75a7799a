"""Lower bounds that a reader can check by hand.

Each bound is for orders without fusing under `Flat.relaxed` costs, which no order of the problem
undercuts. A bound comes with a `Bound.witness`: plain numbers whose sum it is.

Facts used throughout: microbatches are alike, so the k-th executed F, B or W of a stage may be
called microbatch k; on a rank F(i) holds M_B until B(i) ends, B(i) holds M_W until W(i) ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from zbcompile.planner.bounds.knapsack import fractional
from zbcompile.planner.bounds.memory_window import memory_window_bound
from zbcompile.planner.bounds.warmup import warmup_bound
from zbcompile.planner.core.instance import Instance, is_chain
from zbcompile.planner.core.paths import NO_PATH, Paths
from zbcompile.schedule.problem import Problem

__all__ = ["Bound", "RankIdle", "analytic_bounds", "best_bound", "rank_idle"]


@dataclass(frozen=True, slots=True)
class Bound:
    """No order is shorter than ``value_ns``. ``span`` bounds hold for the makespan as well."""

    value_ns: int
    method: str
    objective: str
    witness: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankIdle:
    """Idle time that no order avoids on one rank between its first F and its last B.

    first : the stage whose F(1) is the rank's first action, or ``None`` if that is not forced.
    last : the stage whose B(m) is the rank's last B, or ``None``.
    trailing_ns : most time of W's that can be left when that last B ends.
    """

    rank: int
    idle_ns: int
    first: int | None
    last: int | None
    trailing_ns: int
    terms: Mapping[str, object]


def rank_idle(instance: Instance, paths: Paths, rank: int) -> RankIdle:
    """Unavoidable idle time of one rank."""
    stages = instance.stages_of[rank]
    first = next((x for x in stages if all(paths.f_to_f(x, s) != NO_PATH for s in stages)), None)
    last = next((x for x in stages if all(paths.b_to_b(s, x) != NO_PATH for s in stages)), None)
    if len(stages) == 1:
        chain = memory_window_bound(instance, paths.f_to_b(stages[0], stages[0]), stages[0])
        idle, terms = chain.idle_ns, chain.terms()
    else:
        start, start_terms = _start_idle(instance, paths, rank)
        end, end_terms = _end_idle(instance, paths, rank)
        idle, terms = start + end, {**start_terms, **end_terms}
    trailing = 0
    if last is not None:
        trailing = instance.weight[last] + _pending_time(
            instance, rank, instance.headroom[rank] - instance.saved[last], last
        )
    return RankIdle(rank, idle, first, last, trailing, terms)


def _pending_time(instance: Instance, rank: int, headroom: int, own: int | None = None) -> int:
    """Most W time that ``headroom`` bytes hold back on a rank, one W of stage ``own`` left out."""
    items = [
        (instance.weight[s], instance.pending[s], instance.num_microbatches - (1 if s == own else 0))
        for s in instance.stages_of[rank]
    ]
    return fractional(items, headroom)


def _start_idle(instance: Instance, paths: Paths, rank: int) -> tuple[int, dict[str, object]]:
    """Before its first B a rank runs F's alone, and each of them adds M_B.

    Before its first F of a stage that every B of the rank waits for, it runs F's of other stages alone,
    and none of those that come after it.
    """
    stages = instance.stages_of[rank]
    windows = [(min(max(paths.f_to_b(a, s) for a in stages) for s in stages), stages)]
    for s in stages:
        if all(paths.f_to_b(s, a) != NO_PATH for a in stages):
            before = tuple(a for a in stages if paths.f_to_f(s, a) == NO_PATH)
            windows.append((max(paths.f_to_f(a, s) for a in stages), before))
    idle = -1
    terms: dict[str, object] = {}
    for length, held in windows:
        items = [(instance.forward[s], instance.saved[s], instance.num_microbatches) for s in held]
        forward = fractional(items, instance.headroom[rank])
        if max(0, length - forward) > idle:
            idle = max(0, length - forward)
            terms = {
                "start_window_ns": length,
                "start_stages": list(held),
                "start_forward_ns": forward,
                "start_idle_ns": idle,
            }
    return idle, terms


def _end_idle(instance: Instance, paths: Paths, rank: int) -> tuple[int, dict[str, object]]:
    """Between the end of B(s1, m) and the start of B(s0, m), only B's of s0 in flight and W's can run.

    s0 is the stage whose B ends the rank's backward, s1 any other whose B(m) comes after every F
    and every other B of the rank; all bytes then held are M_B's of s0 and M_W's.
    """
    stages, best = instance.stages_of[rank], 0
    terms: dict[str, object] = {"end_idle_ns": 0}
    for s0 in stages:
        for s1 in stages:
            others = [s for s in stages if s not in (s0, s1)]
            if s0 == s1 or paths.b_to_b(s1, s0) == NO_PATH:
                continue
            if any(paths.f_to_b(s, s1) == NO_PATH for s in stages):
                continue
            if any(paths.b_to_b(s, s1) == NO_PATH for s in others):
                continue
            length = paths.b_to_b(s1, s0) - instance.backward[s1]
            most, flying = _end_work(instance, rank, s0)
            if length - most > best:
                best = length - most
                terms = {
                    "end_stages": [s1, s0],
                    "end_window_ns": length,
                    "end_in_flight": flying,
                    "end_work_ns": most,
                    "end_idle_ns": best,
                }
    return best, terms


def _end_work(instance: Instance, rank: int, s0: int) -> tuple[int, int]:
    """Most time of B's of s0 (but the last) and W's, over the number in flight; (time, in flight)."""
    best = (0, 1)
    for flying in range(1, instance.num_microbatches + 1):
        headroom = instance.headroom[rank] - flying * instance.saved[s0]
        if headroom < 0:
            break
        time = (flying - 1) * (instance.backward[s0] + instance.weight[s0]) + _pending_time(
            instance, rank, headroom
        )
        best = max(best, (time, flying))
    return best


def _work_bounds(instance: Instance, paths: Paths, idles: list[RankIdle]) -> Iterator[Bound]:
    for idle in idles:
        rank, work = idle.rank, instance.work(idle.rank)
        method = "memory_windows" if len(instance.stages_of[rank]) == 1 else "start_end_idle"
        if idle.idle_ns == 0:
            method = "work"
        yield Bound(
            work + idle.idle_ns,
            method,
            "span",
            {"rank": rank, "work_ns": work, "idle_ns": idle.idle_ns, **idle.terms},
        )


def _stairs_bounds(instance: Instance, paths: Paths) -> Iterator[Bound]:
    """The warm-ups of all ranks together, for chains of one stage per rank."""
    stairs = warmup_bound(instance, paths) if is_chain(instance) else None
    if stairs is not None:
        steps = [list(step) for step in stairs.steps]
        yield Bound(stairs.value_ns, "warmup", instance.objective, {"steps_one_ns_below": steps})


def _area_bounds(instance: Instance, paths: Paths) -> Iterator[Bound]:
    """span * room >= bytes times time of everything that a rank must hold."""
    for rank, stages in enumerate(instance.stages_of):
        area = instance.num_microbatches * sum(
            (paths.f_to_b(s, s) + instance.backward[s]) * instance.saved[s]
            + instance.weight[s] * instance.pending[s]
            for s in stages
        )
        if instance.headroom[rank] > 0:
            yield Bound(
                -(-area // instance.headroom[rank]),
                "area",
                "span",
                {"rank": rank, "byte_ns": area, "room_bytes": instance.headroom[rank]},
            )


def _enclosing_pairs(instance: Instance, paths: Paths, idles: list[RankIdle]) -> Iterator[Bound]:
    """Rank u's span encloses the way down to rank d, d's busy time until its last B, and the way back."""
    for outer in idles:
        x, z = outer.first, outer.last
        for inner in idles:
            y, q = inner.first, inner.last
            if x is None or y is None or z is None or q is None or outer is inner:
                continue
            down, up = paths.f_to_f(x, y), paths.b_to_b(q, z)
            if down == NO_PATH or up == NO_PATH:
                continue
            busy = instance.work(inner.rank) + inner.idle_ns - inner.trailing_ns
            back = up - instance.backward[q] + instance.backward[z] + instance.weight[z]
            yield Bound(
                down + busy + back,
                "enclosing_pair",
                "span",
                {
                    "outer_rank": outer.rank,
                    "inner_rank": inner.rank,
                    "way_there_ns": down,
                    "work_ns": instance.work(inner.rank),
                    "idle_ns": inner.idle_ns,
                    "trailing_weight_ns": inner.trailing_ns,
                    "way_back_ns": back,
                    **inner.terms,
                },
            )


def _makespan_bounds(instance: Instance, paths: Paths, idles: list[RankIdle]) -> Iterator[Bound]:
    """Before a rank's first F comes a head; after its last B at least the B's of the stages before it."""
    for idle in idles:
        rank, work = idle.rank, instance.work(idle.rank)
        head = min(paths.head[s] for s in instance.stages_of[rank])
        common = {"rank": rank, "head_ns": head, "work_ns": work, "idle_ns": idle.idle_ns, **idle.terms}
        yield Bound(head + work + idle.idle_ns, "head_and_work", "makespan", common)
        if idle.last is not None:
            after = paths.tail[instance.num_stages + idle.last] - instance.backward[idle.last]
            yield Bound(
                head + work + idle.idle_ns - idle.trailing_ns + after,
                "head_work_and_tail",
                "makespan",
                {**common, "trailing_weight_ns": idle.trailing_ns, "tail_ns": after},
            )
    through = max(paths.tail)
    yield Bound(through, "one_microbatch", "makespan", {"path_ns": through})


def analytic_bounds(problem: Problem) -> list[Bound]:
    """Every bound of this file for the problem's objective, best first."""
    instance = Instance.of(problem).relaxed()
    paths = Paths.of(instance)
    idles = [rank_idle(instance, paths, rank) for rank in range(instance.num_ranks)]
    found = [
        *_work_bounds(instance, paths, idles),
        *_area_bounds(instance, paths),
        *_enclosing_pairs(instance, paths, idles),
    ]
    found.extend(_stairs_bounds(instance, paths))
    if problem.objective == "makespan":
        found.extend(_makespan_bounds(instance, paths, idles))
    return sorted(found, key=lambda bound: -bound.value_ns)


def best_bound(problem: Problem) -> Bound:
    """The strongest of `analytic_bounds`."""
    return analytic_bounds(problem)[0]
