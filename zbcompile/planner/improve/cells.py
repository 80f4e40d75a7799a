"""An order, its problem and what is known of both, in one flat array for the annealing's kernels.

One array with named beginnings, because numba counts references to every array that a kernel is given in a
tuple: that takes longer than a small change to an order. ``cells[at.line + k]`` is the code at place k.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from zbcompile.planner.core.compiled import Vector, vector
from zbcompile.planner.core.instance import Codes, Instance

__all__ = ["KEPT_SCORE", "KEPT_WORST", "LATE_FROM", "LATE_TO", "ROWS_DIFFER", "TIMED_TO", "TOUCHED", "WORST"]
__all__ += ["Layout", "lay_out"]

# Elements of `Layout.state`; the first is the random sequence.
TOUCHED = 1
"""How many ranks a try has changed; the ranks follow."""

WORST, KEPT_WORST = 8, 9
"""Objective of the changed order, and of the order at hand."""

KEPT_SCORE = 10
"""Score of the order at hand."""

TIMED_TO = 11
"""Last position whose end was timed anew."""

LATE_FROM, LATE_TO = 12, 13
"""First and last position whose latest start was found anew."""

ROWS_DIFFER = 14
"""Whether some rank ends at another time than in the order at hand."""


class Layout(NamedTuple):
    """Sizes, and where each part of the array begins.

    A code is kind * S + stage. A group is s for the F's of stage s, S + s for its B's and BW's, -1 for W's.
    The slot of an F, B or BW is its group times m plus its microbatch. Places are those of the line, rank by
    rank.

    Attributes
    ----------
    num_ranks, num_stages, num_microbatches, num_places
        p, S, m and the number of actions.
    is_span
        1 if the objective is the span, 0 if it is the makespan.
    root
        The rank of the only stage that waits for nothing, -1 if there are several.
    others_work
        Least work of all ranks but the root (makespan: but the busiest) in ns.
    line, number
        Per place: code, and number among its group (W: among the W's of its stage), as changed.
    kept_line, kept_number
        The same of the order at hand.
    rank_at
        Rank of every place.
    order, position
        A topological order of the places of the order at hand, and its inverse.
    changed_order
        The same for a window that was timed anew, from the window's beginning.
    gaps
        Per place how long its rank waited before it for a message, in ns.
    ends, kept_ends
        Per slot its end in ns: in the changed order, and in the one at hand.
    late, kept_late
        Per slot its latest start in ns, if all ranks end when they do.
    tail
        Per slot the longest way in ns from its start to the end that counts (span: of the root, makespan: of
        any rank), in the order at hand; far below zero if there is none.
    place_of
        Per slot its place in the order at hand.
    row
        Per rank where its row begins, and the number of places.
    first, stop
        Per rank the window: its first place, and the first place behind it.
    next, clock
        Per rank how far the window is timed: place, and time in ns.
    kept_clock
        Per rank the same time at the end of the window in the order at hand.
    latest, kept_latest
        Per rank the time in ns back to which it is timed, and the same in the order at hand.
    low, high
        Per rank the first and last place changed; -1 for none.
    state
        The random sequence, and single numbers (`TOUCHED`, ...).
    spare
        3 S elements to count in.
    stage, kind, group, length
        Of every code; length in ns.
    own_at, own
        The stages of rank r are ``own[own_at[r]:own_at[r + 1]]``.
    before_at, before, before_lag, after_at, after, after_lag
        What a group waits for, and what waits for it: groups and travel times in ns.
    """

    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_places: int
    is_span: int
    root: int
    others_work: int
    line: int
    number: int
    kept_line: int
    kept_number: int
    rank_at: int
    order: int
    position: int
    changed_order: int
    gaps: int
    ends: int
    kept_ends: int
    late: int
    kept_late: int
    tail: int
    place_of: int
    row: int
    first: int
    stop: int
    next: int
    clock: int
    kept_clock: int
    latest: int
    kept_latest: int
    low: int
    high: int
    state: int
    spare: int
    stage: int
    kind: int
    group: int
    length: int
    own_at: int
    own: int
    before_at: int
    before: int
    before_lag: int
    after_at: int
    after: int
    after_lag: int


def lay_out(instance: Instance, codes: Codes, seed: int) -> tuple[Vector, Layout]:
    """Return the array and its layout for an order; `rebuild` (`retime`) fills the rest.

    ``seed`` is the first element of the random sequence.
    """
    S, p, m = instance.num_stages, instance.num_ranks, instance.num_microbatches
    line = [kind * S + s for row in codes for kind, s in row]
    size, slots = len(line), 2 * S * m
    before: list[list[tuple[int, int]]] = [list(row) for row in instance.forward_from]
    before += [[(S + other, lag) for other, lag in row] for row in instance.backward_from]
    after: list[list[tuple[int, int]]] = [[] for _ in before]
    for group, waits in enumerate(before):
        for other, lag in waits:
            after[other].append((group, lag))
    roots = [s for s in range(S) if not before[s]]
    root = instance.rank_of[roots[0]] if len(roots) == 1 else -1
    relaxed = instance.relaxed()
    work = [relaxed.work(r) for r in range(p)]
    is_span = int(instance.objective == "span")
    parts: dict[str, Sequence[int]] = {"line": line}
    parts |= dict.fromkeys(("number", "kept_line", "kept_number"), [0] * size)
    parts["rank_at"] = [r for r, row in enumerate(codes) for _ in row]
    parts |= dict.fromkeys(("order", "position", "changed_order", "gaps"), [0] * size)
    parts |= dict.fromkeys(("ends", "kept_ends", "late", "kept_late", "tail", "place_of"), [0] * slots)
    parts["row"] = [0, *accumulate(map(len, codes))]
    parts |= dict.fromkeys(("first", "stop", "next", "clock", "kept_clock", "latest", "kept_latest"), [0] * p)
    parts |= dict.fromkeys(("low", "high"), [-1] * p)
    parts["state"] = [seed, *[0] * 15]
    parts["spare"] = [0] * (3 * S)
    parts["stage"] = [*range(S)] * 4
    parts["kind"] = [kind for kind in range(4) for _ in range(S)]
    parts["group"] = [*range(2 * S), *[-1] * S, *range(S, 2 * S)]
    parts["length"] = (*instance.forward, *instance.backward, *instance.weight, *instance.fused)
    parts["own_at"] = [0, *accumulate(map(len, instance.stages_of))]
    parts["own"] = [s for stages in instance.stages_of for s in stages]
    for name, rows in (("before", before), ("after", after)):
        parts[name + "_at"] = [0, *accumulate(map(len, rows))]
        parts[name] = [other for row in rows for other, _ in row]
        parts[name + "_lag"] = [lag for row in rows for _, lag in row]
    begins = dict(zip(parts, [0, *accumulate(map(len, parts.values()))], strict=False))
    others = sum(work) - (max(work) if not is_span else work[root])
    layout = Layout(p, S, m, size, is_span, root, others, **begins)
    return vector([number for part in parts.values() for number in part]), layout
