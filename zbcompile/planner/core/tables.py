"""A problem as flat arrays for the kernels: NumPy arrays with numba, lists without it.

numba is an optional extra (``pip install zbcompile[fast]``). The kernels use whole numbers, table
look-ups and IEEE multiplications alone, so both ways give the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from zbcompile.planner.core.instance import Codes, Instance

__all__ = ["HAVE_NUMBA", "Tables", "jit", "pack", "unpack", "vector"]

try:
    import numba
    import numpy

    HAVE_NUMBA = not getattr(numba.config, "DISABLE_JIT", False)
except ImportError:
    HAVE_NUMBA = False

Vector = Any
"""An int64 array or a list of ints."""


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with numba where it is installed; else leave the function as it is."""
    if HAVE_NUMBA:
        compiled: Callable[..., Any] = numba.njit(cache=True, nogil=True)(function)
        return compiled
    return function


def vector(values: Sequence[int] | Sequence[float]) -> Vector:
    """An array of the numbers given, as the kernels want it."""
    if HAVE_NUMBA:
        kind = numpy.float64 if values and isinstance(values[0], float) else numpy.int64
        return numpy.array(values, dtype=kind)
    return list(values)


class Tables(NamedTuple):
    """The arrays of one problem.

    A code is kind * S + stage. length, memory : time and change of held bytes per code.
    own_at, own : stages of rank r are ``own[own_at[r]:own_at[r + 1]]``. forward_at, forward_from,
    forward_lag : what F of a stage waits for; the same for backward. after_* : the ranks that wait.
    """

    num_stages: int
    num_ranks: int
    num_microbatches: int
    is_span: int
    rank_of: Vector
    length: Vector
    memory: Vector
    headroom: Vector
    own_at: Vector
    own: Vector
    forward_at: Vector
    forward_from: Vector
    forward_lag: Vector
    backward_at: Vector
    backward_from: Vector
    backward_lag: Vector
    after_forward_at: Vector
    after_forward: Vector
    after_backward_at: Vector
    after_backward: Vector

    @staticmethod
    def of(instance: Instance) -> Tables:
        """Flatten once per problem."""
        forward_at, forward = _ragged([[pair[0] for pair in row] for row in instance.forward_from])
        backward_at, backward = _ragged([[pair[0] for pair in row] for row in instance.backward_from])
        own_at, own = _ragged(instance.stages_of)
        after_f_at, after_f = _ragged(_targets(instance, instance.forward_from))
        after_b_at, after_b = _ragged(_targets(instance, instance.backward_from))
        grow = [w - b for b, w in zip(instance.saved, instance.pending, strict=True)]
        return Tables(
            instance.num_stages,
            instance.num_ranks,
            instance.num_microbatches,
            int(instance.objective == "span"),
            vector(instance.rank_of),
            vector((*instance.forward, *instance.backward, *instance.weight, *instance.fused)),
            vector((*instance.saved, *grow, *(-w for w in instance.pending), *(-b for b in instance.saved))),
            vector(instance.headroom),
            own_at,
            own,
            forward_at,
            forward,
            vector([pair[1] for row in instance.forward_from for pair in row]),
            backward_at,
            backward,
            vector([pair[1] for row in instance.backward_from for pair in row]),
            after_f_at,
            after_f,
            after_b_at,
            after_b,
        )


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[Vector, Vector]:
    return vector([0, *accumulate(map(len, rows))]), vector([x for row in rows for x in row])


def _targets(instance: Instance, waits: Sequence[Sequence[tuple[int, int]]]) -> list[list[int]]:
    """Per stage: the ranks of the stages that wait for it."""
    targets: list[list[int]] = [[] for _ in waits]
    for stage, row in enumerate(waits):
        for source, _ in row:
            targets[source].append(instance.rank_of[stage])
    return targets


def pack(instance: Instance, codes: Codes) -> tuple[Vector, Vector]:
    """(offset of each rank, all codes in a row)."""
    count = instance.num_stages
    return _ragged([[kind * count + s for kind, s in row] for row in codes])


def unpack(instance: Instance, offsets: Vector, line: Vector) -> Codes:
    """The inverse of `pack`."""
    count, numbers = instance.num_stages, line if isinstance(line, list) else line.tolist()
    rows = [numbers[int(offsets[r]) : int(offsets[r + 1])] for r in range(instance.num_ranks)]
    return [[divmod(code, count) for code in row] for row in rows]


EXPONENTIAL = [-math.log((k + 0.5) / 4096) for k in range(4096)]
"""Quantiles of the exponential distribution, so that kernels need no logarithm."""
