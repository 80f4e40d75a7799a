"""Orders of microbatches that differ in cost: the flat arrays, and the loop that times one order.

An order is a `Codes` and a permutation: the k-th F, B or BW of every stage is that of the microbatch at place
k of the permutation, and a W belongs to the earliest split one that still has none. So with the permutation
fixed every rank takes the microbatches first in, first out, as where they are alike. Kernels for microbatches
that are alike stay as they are; `evaluate_unequal` and `stays_legal_unequal` stand in for two of them.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from typing import Any

from zbcompile.planner.core.compiled import MakeVector, Vector, jit, vector
from zbcompile.planner.core.instance import Codes, Instance
from zbcompile.planner.core.kernel import (
    begin_steps,
    end_steps,
    first_gather,
    gathered,
    reduced,
    reduced_by,
    scratch_size,
)
from zbcompile.planner.core.tables import Tables, pack
from zbcompile.schedule.memory import Memory
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.rules import COMPUTE_KINDS, Rules, durations

__all__ = ["UnequalScorer", "alike_problem", "evaluate_unequal", "stays_legal_unequal", "unequal_tables"]

_FAR = 1 << 60

_named: Any = namedtuple
UnequalTables = _named(
    "UnequalTables",
    (
        *Tables._fields,
        "order",
        "lengths",
        "changes",
        "peaks",
        "forward_lags",
        "backward_lags",
        "split",
        "came",
    ),
)
"""`Tables`, and what differs. ``order`` is the permutation (place -> microbatch). By code, or edge, times m
plus microbatch are the time, the change of held bytes, the most bytes above those before, and the travel
times. ``split`` has space for places of backwards whose W is to come (S m), and two counts per stage.
``came`` has space for the places whose gradients came, whose turn in the sum it is, how many came, and how
many wait."""


def unequal_tables(problem: Problem, vector: MakeVector = vector) -> Any:
    """Flatten a problem whose microbatches differ, in the order as given.

    With ``vector=list`` for kernels in plain Python.
    """
    ones = [problem.one(i) for i in range(problem.num_microbatches)]
    times, memories = [durations(one) for one in ones], [Memory.of(one) for one in ones]
    rules, stages, m = [Rules.of(one) for one in ones], range(problem.num_stages), len(ones)
    base = Tables.of(Instance.of(problem.alike(max)), vector)
    kinds = [(k, kind, s) for k, kind in enumerate(COMPUTE_KINDS) for s in stages]

    def lags(rows: list[tuple[tuple[tuple[int, int], ...], ...]]) -> Vector:
        each = [[lag for row in of_one for _, lag in row] for of_one in rows]
        return vector([row[e] for e in range(len(each[0])) for row in each])

    return UnequalTables(
        *base,
        vector(list(range(m))),
        vector([row[kind][s] for _, kind, s in kinds for row in times]),
        vector([memory.change[k][s] for k, _, s in kinds for memory in memories]),
        vector([memory.peak[k][s] for k, _, s in kinds for memory in memories]),
        lags([one.forward_from for one in rules]),
        lags([one.backward_from for one in rules]),
        vector([0] * (problem.num_stages * (m + 2))),
        vector([0] * (problem.num_stages * (m + 3))),
    )


def alike_problem(problem: Problem) -> Problem:
    """Return a problem with microbatches that are alike: the mean of their times, the most of their bytes.

    A problem whose microbatches are alike is returned as it is.
    """
    if not problem.microbatch_costs:
        return problem
    mean = problem.alike(lambda costs: sum(costs) // len(costs))
    most = problem.alike(max)
    stages = tuple(
        replace(cost, saved_bytes=more.saved_bytes, saved_for_weight_bytes=more.saved_for_weight_bytes)
        for cost, more in zip(mean.profile.stages, most.profile.stages, strict=True)
    )
    return mean.with_(profile=replace(mean.profile, stages=stages))


@jit
def _note_split(split: Vector, S: int, m: int, s: int, place: int) -> None:
    """Note the place of a split backward of stage s."""
    split[s * m + split[S * m + s]] = place
    split[S * m + s] += 1


@jit
def _next_weight(split: Vector, S: int, m: int, s: int) -> int:
    """Return the place of the next W of stage s: that of its earliest split backward without one."""
    at = S * m + S + s
    split[at] += 1
    place: int = split[s * m + split[at] - 1]
    return place


@jit
def _last_weight(split: Vector, S: int, m: int, s: int) -> int:
    """Return the place of the W of stage s that was next before; it is next again."""
    at = S * m + S + s
    split[at] -= 1
    place: int = split[s * m + split[at]]
    return place


@jit
def _more_waits(came: Vector, S: int, m: int, s: int, place: int) -> int:
    """Note that gradients of a place came; return how many more sets of stage s wait for their turn."""
    turn, count, waits = S * m + s, S * m + S + s, S * m + 2 * S + s
    came[s * m + place] = 1
    came[count] += 1
    while came[turn] < m and came[s * m + came[turn]] == 1:
        came[turn] += 1
    before: int = came[waits]
    came[waits] = came[count] - came[turn]
    if came[turn] == 0:
        came[waits] -= 1
    more: int = came[waits] - before
    return more


@jit
def evaluate_unequal(
    t: Any, offsets: Vector, line: Vector, scratch: Vector, ends: Vector, limits: Vector
) -> int:
    """Do what `zbcompile.planner.core.kernel.evaluate_line` does, with each microbatch's own costs."""
    S, p, m = t.num_stages, t.num_ranks, t.num_microbatches
    total = offsets[p]
    late, clock, at_place, counts, trail = 0, p, 2 * p, 4 * p, 4 * p + 2 * S
    gaps = trail + total
    steps = gaps + total
    if t.has_steps:
        begin_steps(t, scratch, steps)
    for k in range(2 * S * m):
        ends[k] = -1
        limits[k] = _FAR
    for k in range(4 * p + 2 * S):
        scratch[k] = 0
    for k in range(S * m, S * m + 2 * S):
        t.split[k] = 0
    done = 0
    moved, upward = True, False
    while moved:
        moved = False
        upward = not upward
        for q in range(p):
            r = p - 1 - q if upward else q
            k = scratch[at_place + r]
            now = scratch[clock + r]
            size = offsets[r + 1] - offsets[r]
            while k < size:
                code = line[offsets[r] + k]
                kind = code // S
                s = code - kind * S
                before = now
                if kind == 2:
                    i = _next_weight(t.split, S, m, s)
                    now += t.lengths[code * m + t.order[i]]
                else:
                    side = 0 if kind == 0 else 1
                    i = scratch[counts + side * S + s]
                    who = t.order[i]
                    blocked = side == 1 and ends[s * m + i] < 0
                    if side == 0:
                        for e in range(t.forward_at[s], t.forward_at[s + 1]):
                            end = ends[t.forward_from[e] * m + i]
                            if end < 0:
                                blocked = True
                                break
                            now = max(now, end + t.forward_lags[e * m + who])
                    elif not blocked:
                        for e in range(t.backward_at[s], t.backward_at[s + 1]):
                            end = ends[(S + t.backward_from[e]) * m + i]
                            if end < 0:
                                blocked = True
                                break
                            now = max(now, end + t.backward_lags[e * m + who])
                    if blocked:
                        now = scratch[clock + r]
                        break
                    if t.has_steps and kind == 0 and i == 0 and t.gather[s] > 0:
                        now = max(now, gathered(t, scratch, steps, s))
                        scratch[steps + r] += t.gather[s]
                    if kind == 1:
                        _note_split(t.split, S, m, s, i)
                    scratch[gaps + offsets[r] + k] = now - before
                    now += t.lengths[code * m + who]
                    ends[(side * S + s) * m + i] = now
                    scratch[counts + side * S + s] = i + 1
                if kind == 2:
                    scratch[gaps + offsets[r] + k] = 0
                if t.has_steps and kind >= 2:
                    reduced(t, scratch, steps, s, now)
                scratch[trail + done] = (offsets[r] + k) * p + r
                done += 1
                k += 1
                scratch[clock + r] = now
                moved = True
            scratch[at_place + r] = k
    if done < total:
        return -1
    worst = 0
    summed = 0
    for r in range(p):
        scratch[late + r] = scratch[clock + r]
    if t.has_steps:
        end_steps(t, scratch, steps, clock, late)
    if t.is_span == 0:
        for r in range(p):
            summed += scratch[clock + r]
            worst = max(worst, scratch[clock + r])
        scratch[3 * p] = worst
        return int(100 * p * worst + summed)
    while done > 0:
        done -= 1
        at = scratch[trail + done]
        r = at % p
        code = line[at // p]
        kind = code // S
        s = code - kind * S
        if t.has_steps and kind >= 2:
            scratch[late + r] = reduced_by(t, scratch, steps, s, scratch[late + r])
        if kind == 2:
            scratch[late + r] -= t.lengths[code * m + t.order[_last_weight(t.split, S, m, s)]]
            continue
        side = 0 if kind == 0 else 1
        scratch[counts + side * S + s] -= 1
        i = scratch[counts + side * S + s]
        who = t.order[i]
        start = min(scratch[late + r], limits[(side * S + s) * m + i]) - t.lengths[code * m + who]
        scratch[late + r] = start
        if t.has_steps and kind == 0 and i == 0 and t.gather[s] > 0:
            first_gather(t, scratch, steps, s, start)
        if side == 0:
            for e in range(t.forward_at[s], t.forward_at[s + 1]):
                slot = t.forward_from[e] * m + i
                limits[slot] = min(limits[slot], start - t.forward_lags[e * m + who])
        else:
            for e in range(t.backward_at[s], t.backward_at[s + 1]):
                slot = (S + t.backward_from[e]) * m + i
                limits[slot] = min(limits[slot], start - t.backward_lags[e * m + who])
    for r in range(p):
        first = scratch[late + r]
        if t.has_steps:
            first = min(first, scratch[steps + r])
        span = scratch[clock + r] - first
        summed += span
        worst = max(worst, span)
    scratch[3 * p] = worst
    return int(100 * p * worst + summed)


@jit
def stays_legal_unequal(t: Any, offsets: Vector, line: Vector, rank: int, counts: Vector) -> bool:
    """Do what `zbcompile.planner.core.kernel.stays_legal` does, with each microbatch's own bytes."""
    S, m = t.num_stages, t.num_microbatches
    for e in range(t.own_at[rank], t.own_at[rank + 1]):
        for kind in range(4):
            counts[kind * S + t.own[e]] = 0
        t.split[S * m + t.own[e]] = 0
        t.split[S * m + S + t.own[e]] = 0
        for k in range(m):
            t.came[t.own[e] * m + k] = 0
        for k in range(3):
            t.came[S * m + k * S + t.own[e]] = 0
    held = 0
    for k in range(offsets[rank], offsets[rank + 1]):
        code = line[k]
        kind = code // S
        s = code - kind * S
        counts[code] += 1
        backwards = counts[S + s] + counts[3 * S + s]
        if kind == 2:
            if counts[code] > counts[S + s]:
                return False
            i = _next_weight(t.split, S, m, s)
        elif kind == 0:
            i = counts[s] - 1
        else:
            if backwards > counts[s]:
                return False
            i = backwards - 1
            if kind == 1:
                _note_split(t.split, S, m, s, i)
        at = code * m + t.order[i]
        change = t.changes[at]
        if kind >= 2 and t.set_bytes[s] > 0:
            change += _more_waits(t.came, S, m, s, i) * t.set_bytes[s]
        if held + max(t.peaks[at], change) > t.headroom[rank]:
            return False
        held += change
    return True


class UnequalScorer:
    """Scores orders of one problem whose microbatches differ. Each thread needs a scorer of its own.

    Parameters
    ----------
    problem
        The problem.
    vector
        Makes the buffers; with ``list`` nothing is compiled.

    Attributes
    ----------
    problem, vector
        The same.
    tables
        The problem as flat arrays; ``tables.order`` is the permutation that counts.
    instance
        The problem with the largest costs, for its stages and ranks.
    ends, limits, counts
        Buffers of the kernels.
    """

    def __init__(self, problem: Problem, vector: MakeVector = vector) -> None:
        self.problem, self.tables, self.vector = problem, unequal_tables(problem, vector), vector
        self.instance = Instance.of(problem.alike(max))
        slots = 2 * problem.num_stages * problem.num_microbatches
        self.ends, self.limits = vector([0] * slots), vector([0] * slots)
        self.counts = vector([0] * (4 * problem.num_stages))

    def set_order(self, order: tuple[int, ...]) -> None:
        """Take the microbatches in this order from now on."""
        for place, microbatch in enumerate(order):
            self.tables.order[place] = microbatch

    def fits(self, codes: Codes) -> bool:
        """Return whether an order keeps F before B before W, and every rank's headroom."""
        offsets, line = pack(self.instance, codes, self.vector)
        ranks = range(self.problem.num_ranks)
        return all(stays_legal_unequal(self.tables, offsets, line, rank, self.counts) for rank in ranks)

    def score(self, codes: Codes) -> tuple[int, int] | None:
        """Return (objective in ns, tie-breaking score), or ``None`` on deadlock or where it does not fit."""
        if not self.fits(codes):
            return None
        score, scratch = self.evaluate(*pack(self.instance, codes, self.vector))
        return None if score < 0 else (int(scratch[3 * self.problem.num_ranks]), score)

    def evaluate(self, offsets: Vector, line: Vector) -> tuple[int, Vector]:
        """Return the tie-breaking score (-1 on deadlock) and the scratch of `evaluate_unequal`."""
        scratch = self.vector([0] * scratch_size(self.tables, len(line)))
        return int(evaluate_unequal(self.tables, offsets, line, scratch, self.ends, self.limits)), scratch
