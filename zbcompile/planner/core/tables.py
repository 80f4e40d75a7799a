"""A problem as flat arrays for the kernels: NumPy arrays where numba compiles them, lists elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from zbcompile.planner.core.compiled import MakeVector, Vector, vector
from zbcompile.planner.core.instance import Codes, Instance

__all__ = ["EXPONENTIAL", "Tables", "pack", "unpack"]


class Tables(NamedTuple):
    """The arrays of one problem. A code is kind * S + stage.

    Attributes
    ----------
    num_stages, num_ranks, num_microbatches
        S, p and m.
    is_span
        1 if the objective is the span, 0 if it is the makespan.
    rank_of
        Rank of every stage.
    length, memory, peak
        Time in ns, change of held bytes, and most bytes held above those before it, of every code
        (`zbcompile.schedule.memory`).
    set_bytes
        Bytes of one set of gradients that waits for its turn in the sum, per stage.
    headroom
        Bytes per rank.
    own_at, own
        The stages of rank r are ``own[own_at[r]:own_at[r + 1]]``.
    forward_at, forward_from, forward_lag
        What F of stage s waits for: stages and travel times from ``forward_at[s]`` to ``forward_at[s + 1]``.
    backward_at, backward_from, backward_lag
        The same for B.
    has_steps
        1 if stages cost anything once a step, else 0.
    gather, reduce, update
        `zbcompile.planner.core.step_costs.StepCosts`.
    after_forward_at, after_forward, after_backward_at, after_backward
        The ranks of the stages that wait for F, or for B, of stage s.
    scratch, ends, limits, counts
        Working space of the kernels (`zbcompile.planner.core.kernel`), for orders of up to 3 S m actions; so
        each thread needs tables of its own. ``ends`` and ``limits`` have the ends of F's and B's, and the
        latest starts that those who wait for them allow.
    """

    num_stages: int
    num_ranks: int
    num_microbatches: int
    is_span: int
    rank_of: Vector
    length: Vector
    memory: Vector
    peak: Vector
    set_bytes: Vector
    headroom: Vector
    own_at: Vector
    own: Vector
    forward_at: Vector
    forward_from: Vector
    forward_lag: Vector
    backward_at: Vector
    backward_from: Vector
    backward_lag: Vector
    has_steps: int
    gather: Vector
    reduce: Vector
    update: Vector
    after_forward_at: Vector
    after_forward: Vector
    after_backward_at: Vector
    after_backward: Vector
    scratch: Vector
    ends: Vector
    limits: Vector
    counts: Vector

    @staticmethod
    def of(instance: Instance, vector: MakeVector = vector) -> Tables:
        """Flatten a problem; with ``vector=list`` for kernels in plain Python."""
        forward_at, forward = _ragged([[pair[0] for pair in row] for row in instance.forward_from], vector)
        backward_at, backward = _ragged([[pair[0] for pair in row] for row in instance.backward_from], vector)
        own_at, own = _ragged(instance.stages_of, vector)
        after_f_at, after_f = _ragged(_targets(instance, instance.forward_from), vector)
        after_b_at, after_b = _ragged(_targets(instance, instance.backward_from), vector)
        S, p, slots = instance.num_stages, instance.num_ranks, instance.num_stages * instance.num_microbatches
        marks = slots if any(instance.memory.set_bytes) else 0
        return Tables(
            instance.num_stages,
            instance.num_ranks,
            instance.num_microbatches,
            int(instance.objective == "span"),
            vector(instance.rank_of),
            vector((*instance.forward, *instance.backward, *instance.weight, *instance.fused)),
            vector([size for row in instance.memory.change for size in row]),
            vector([size for row in instance.memory.peak for size in row]),
            vector(instance.memory.set_bytes),
            vector(instance.headroom),
            own_at,
            own,
            forward_at,
            forward,
            vector([pair[1] for row in instance.forward_from for pair in row]),
            backward_at,
            backward,
            vector([pair[1] for row in instance.backward_from for pair in row]),
            int(instance.steps.any),
            vector(instance.steps.gather),
            vector(instance.steps.reduce),
            vector(instance.steps.update),
            after_f_at,
            after_f,
            after_b_at,
            after_b,
            vector([0] * (6 * slots + 6 * p + 3 * S)),
            vector([0] * (2 * slots)),
            vector([0] * (2 * slots)),
            vector([0] * (5 * S + marks)),
        )


def _ragged(rows: Sequence[Sequence[int]], vector: MakeVector) -> tuple[Vector, Vector]:
    """Return rows of different lengths as (begin of each row, all elements)."""
    return vector([0, *accumulate(map(len, rows))]), vector([x for row in rows for x in row])


def _targets(instance: Instance, waits: Sequence[Sequence[tuple[int, int]]]) -> list[list[int]]:
    """Return per stage the ranks of the stages that wait for it."""
    targets: list[list[int]] = [[] for _ in waits]
    for stage, row in enumerate(waits):
        for source, _ in row:
            targets[source].append(instance.rank_of[stage])
    return targets


def pack(instance: Instance, codes: Codes, vector: MakeVector = vector) -> tuple[Vector, Vector]:
    """Return an order as (begin of each rank, all codes in a row)."""
    count = instance.num_stages
    return _ragged([[kind * count + s for kind, s in row] for row in codes], vector)


def unpack(instance: Instance, offsets: Vector, line: Vector) -> Codes:
    """Return the order that `pack` made flat."""
    count, numbers = instance.num_stages, line if isinstance(line, list) else line.tolist()
    rows = [numbers[int(offsets[r]) : int(offsets[r + 1])] for r in range(instance.num_ranks)]
    return [[divmod(code, count) for code in row] for row in rows]


EXPONENTIAL = [-math.log((k + 0.5) / 4096) for k in range(4096)]
"""Quantiles of the exponential distribution, so that kernels need no logarithm."""
