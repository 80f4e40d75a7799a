"""An order, its problem and what is known of both, in the rows of one array for the annealing's kernels.

One array, because numba counts references to every array that a kernel is given in a tuple, which takes
longer than a small change to an order; and rows of one width, because a tuple of their beginnings takes numba
twice as long to compile. ``cells[LINE, k]`` is the code at place k.

A code is kind * S + stage. A group is s for the F's of stage s, S + s for its B's and BW's, 2 S + s for its
W's. The slot of an action is its group times m plus its number: its microbatch (W: its number among the W's
of its stage). Places are those of the line, rank by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from zbcompile.planner.core.compiled import Vector, matrix
from zbcompile.planner.core.instance import Codes, Instance

(LINE, NUMBER, KEPT_LINE, KEPT_NUMBER) = range(4)
"""Per place: code, and number among its group, as changed; and the same of the order at hand."""

(RANK_AT, ORDER, POSITION, CHANGED_ORDER, GAPS) = range(4, 9)
"""Per place its rank; a topological order of the places of the order at hand, and its inverse; the order of a
window that was timed anew, from the window's beginning; and how long a place's rank waits before it for a
message, in ns."""

(ENDS, KEPT_ENDS, LATE, KEPT_LATE, TAIL, KEPT_TAIL, PLACE_OF) = range(9, 16)
"""Per slot, in the changed order and in the one at hand: its end in ns; its latest start in ns, if all ranks
end when they do; the same if only the end that counts has to be met (span: of the root, makespan: of any
rank), less that end: so the longest way to it with a minus, and far above zero if there is none. And its
place in the order at hand."""

(ROW, FIRST, STOP, NEXT, CLOCK, LATEST, LOW, HIGH) = range(16, 24)
"""Per rank where its row begins (and the number of places); the window: its first place, and the first
behind it; how far the window is timed: place, and time in ns; the time in ns back to which it is timed; the
first and last place changed, -1 for none."""

(STAGE, KIND, GROUP, LENGTH, SPARE) = range(24, 29)
"""Of every code; length in ns; elements to count in."""

(OWN_AT, OWN) = range(29, 31)
"""The stages of rank r are the elements ``OWN_AT, r`` to ``OWN_AT, r + 1`` of ``OWN``."""

(BEFORE_AT, BEFORE, BEFORE_LAG, AFTER_AT, AFTER, AFTER_LAG) = range(31, 37)
"""What a group waits for, and what waits for it: groups and travel times in ns."""

(HELD, KEPT_HELD, WAITING, KEPT_WAITING) = range(37, 41)
"""Per place bytes that its rank holds before it, and how many B's of its stage wait for their W's (not for
F's); as changed, and in the order at hand."""

STATE = 41
"""Single numbers; the elements follow."""

(RANDOM, TOUCHED) = range(2)
"""The random sequence; how many ranks a try has changed. The ranks follow, seven at most."""

(WORST, KEPT_WORST, KEPT_SCORE) = range(9, 12)
"""Objective of the changed order, of the order at hand, and the latter's score."""

(BEGIN, END, TIMED_TO, LATE_FROM, LATE_TO, ROWS_DIFFER) = range(12, 18)
"""First and last position of the window; last position whose end was timed anew; first and last position
whose latest start was; whether some rank ends at another time than in the order at hand."""

(RANKS, STAGES, MICROBATCHES, PLACES, IS_SPAN) = range(18, 23)
"""p, S, m, the number of actions, and 1 if the objective is the span, 0 if it is the makespan."""

(ROOT, HAS_SETS) = range(23, 25)
"""The rank of the only stage that waits for nothing, -1 if there are several; 1 if gradients that wait hold
bytes."""

_SIZE = 26


def lay_out(instance: Instance, codes: Codes, seed: int) -> Vector:
    """Return the array for an order; `rebuild` (`zbcompile.planner.improve.retime`) fills the rest.

    ``seed`` is the first element of the random sequence.
    """
    S, p, m = instance.num_stages, instance.num_ranks, instance.num_microbatches
    line = [kind * S + s for row in codes for kind, s in row]
    before: list[list[tuple[int, int]]] = [list(row) for row in instance.forward_from]
    before += [[(S + other, lag) for other, lag in row] for row in instance.backward_from]
    before += [[] for _ in range(S)]
    after: list[list[tuple[int, int]]] = [[] for _ in before]
    for group, waits in enumerate(before):
        for other, lag in waits:
            after[other].append((group, lag))
    roots = [s for s in range(S) if not before[s]]
    root = instance.rank_of[roots[0]] if len(roots) == 1 else -1
    is_span, has_sets = int(instance.objective == "span"), int(any(instance.memory.set_bytes))
    parts: dict[int, Sequence[int]] = {
        LINE: line,
        RANK_AT: [r for r, row in enumerate(codes) for _ in row],
        ROW: [0, *accumulate(map(len, codes))],
        LOW: [-1] * p,
        HIGH: [-1] * p,
        STAGE: [*range(S)] * 4,
        KIND: [kind for kind in range(4) for _ in range(S)],
        GROUP: [*range(3 * S), *range(S, 2 * S)],
        LENGTH: (*instance.forward, *instance.backward, *instance.weight, *instance.fused),
        OWN_AT: [0, *accumulate(map(len, instance.stages_of))],
        OWN: [s for stages in instance.stages_of for s in stages],
        STATE: [seed, *[0] * (RANKS - 1), p, S, m, len(line), is_span, root, has_sets],
    }
    for begin, rows in ((BEFORE_AT, before), (AFTER_AT, after)):
        parts[begin] = [0, *accumulate(map(len, rows))]
        parts[begin + 1] = [other for row in rows for other, _ in row]
        parts[begin + 2] = [lag for row in rows for _, lag in row]
    width = (
        max(_SIZE, 3 * S * m, *map(len, parts.values())) | 1
    )  # rows a power of two apart share cache lines
    return matrix(
        [[*part, *[0] * (width - len(part))] for part in (parts.get(k, ()) for k in range(STATE + 1))]
    )
