"""Orders of microbatches that differ in cost: the flat arrays, and whether a row is legal.

An order is a `Codes` and a permutation: the k-th F, B or BW of every stage is that of the microbatch at place
k of the permutation, and a W belongs to the earliest split one that still has none. So with the permutation
fixed every rank takes the microbatches first in, first out, as where they are alike. One clock times both
(`zbcompile.planner.core.kernel`); `stays_legal_unequal` stands in for `stays_legal`.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from typing import Any

from zbcompile.planner.core.compiled import MakeVector, Vector, jit, vector
from zbcompile.planner.core.instance import Codes, Instance
from zbcompile.planner.core.kernel import evaluate_unequal, next_weight, note_split
from zbcompile.planner.core.tables import Tables, pack
from zbcompile.schedule.memory import Memory
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.rules import COMPUTE_KINDS, Rules, durations

__all__ = ["UnequalScorer", "alike_problem", "stays_legal_unequal", "unequal_tables"]

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
def stays_legal_unequal(t: Any, offsets: Vector, line: Vector, rank: int) -> bool:
    """Do what `zbcompile.planner.core.kernel.stays_legal` does, with each microbatch's own bytes."""
    S, m, counts = t.num_stages, t.num_microbatches, t.counts
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
            i = next_weight(t.split, S, m, s)
        elif kind == 0:
            i = counts[s] - 1
        else:
            if backwards > counts[s]:
                return False
            i = backwards - 1
            if kind == 1:
                note_split(t.split, S, m, s, i)
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
        Makes the tables; with ``list`` nothing is compiled.

    Attributes
    ----------
    problem, vector
        The same.
    tables
        The problem as flat arrays; ``tables.order`` is the permutation that counts.
    instance
        The problem with the largest costs, for its stages and ranks.
    """

    def __init__(self, problem: Problem, vector: MakeVector = vector) -> None:
        self.problem, self.tables, self.vector = problem, unequal_tables(problem, vector), vector
        self.instance = Instance.of(problem.alike(max))

    def set_order(self, order: tuple[int, ...]) -> None:
        """Take the microbatches in this order from now on."""
        for place, microbatch in enumerate(order):
            self.tables.order[place] = microbatch

    def fits(self, codes: Codes) -> bool:
        """Return whether an order keeps F before B before W, and every rank's headroom."""
        offsets, line = pack(self.instance, codes, self.vector)
        ranks = range(self.problem.num_ranks)
        return all(stays_legal_unequal(self.tables, offsets, line, rank) for rank in ranks)

    def score(self, codes: Codes) -> tuple[int, int] | None:
        """Return (objective in ns, tie-breaking score), or ``None`` on deadlock or where it does not fit."""
        if not self.fits(codes):
            return None
        score = int(evaluate_unequal(self.tables, *pack(self.instance, codes, self.vector)))
        return None if score < 0 else (int(self.tables.scratch[3 * self.problem.num_ranks]), score)
