"""Stretching: an order for few microbatches becomes one for many by repeating its periodic middle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zbcompile.planner.core.dispatch import Dispatcher, Recipe
from zbcompile.planner.core.instance import BW, B, Codes, F, Instance, Op, W
from zbcompile.planner.core.score import latest_starts
from zbcompile.planner.core.scorer import Scored, Scorer

__all__ = ["stretch"]


def stretch(
    instance: Instance,
    codes: Codes,
    count: int,
    scorer: Scorer,
    stop: Callable[[], bool] = lambda: False,
) -> list[Codes]:
    """Return at most four orders for many microbatches made from an order for ``count``, best first.

    Microbatches c .. c + q - 1 of the middle are repeated: their start times, moved on by the time that q
    microbatches take, are the keys of the new ones. Every q up to twice the number of ranks that divides the
    difference is tried; ``stop`` is asked before each whether to end early.
    """
    short = replace(instance, num_microbatches=count)
    starts = latest_starts(short, codes)
    extra = instance.num_microbatches - count
    dispatcher = None if any(kind == BW for kind, _, _ in starts) else Dispatcher(instance)
    found: list[Scored] = []
    for q in range(1, min(2 * instance.num_ranks, count // 2) + 1):
        for c in {count // 3, (count - q) // 2, count // 2 - q // 2 - 1}:
            if extra % q or not 0 < c < count - q or stop():
                continue
            times = _times(short, starts, c, q, extra)
            made: list[Codes | None] = [_sorted_by(instance, times)]
            if dispatcher is not None:
                made.append(_dispatched(instance, dispatcher, times))
            scored = ((scorer.score(decoded), decoded) for decoded in made if decoded is not None)
            found += [(*score, decoded) for score, decoded in scored if score is not None]
    found.sort(key=lambda entry: entry[:2])
    return [decoded for _, _, decoded in found[:4]]


def _times(short: Instance, starts: dict[Op, int], c: int, q: int, extra: int) -> dict[Op, int]:
    """Return start times of the longer order.

    As if every block took as long as the first one takes on average. A microbatch that is added is split or
    fused as the one that it repeats.
    """
    gaps = [
        at - starts[k, s, i - q] for (k, s, i), at in starts.items() if i == c + q and (k, s, c) in starts
    ]
    period = sum(gaps) // len(gaps)
    times = {}
    for (kind, s, i), at in starts.items():
        if i >= c + q:
            times[kind, s, i + extra] = at + extra // q * period
            continue
        times[kind, s, i] = at
        if i >= c:
            for block in range(1, extra // q + 1):
                times[kind, s, i + block * q] = at + block * period
    return times


def _sorted_by(instance: Instance, times: dict[Op, int]) -> Codes:
    """Return the order of the actions by their times."""
    rows: list[list[Op]] = [[] for _ in range(instance.num_ranks)]
    for op in times:
        rows[instance.rank_of[op[1]]].append(op)
    for row in rows:
        row.sort(key=lambda op: (times[op], B if op[0] == BW else op[0], op[2], op[1]))
    return [[(kind, s) for kind, s, _ in row] for row in rows]


def _dispatched(instance: Instance, dispatcher: Dispatcher, times: dict[Op, int]) -> Codes | None:
    """Return the order that keyed dispatch makes of the times, or ``None``."""
    m = instance.num_microbatches
    keys = [times[kind, s, i] for kind in (F, B, W) for s in range(instance.num_stages) for i in range(m)]
    return dispatcher.run(keys, Recipe())
