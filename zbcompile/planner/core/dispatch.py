"""Keyed dispatch: a priority per action becomes an order that fits.

Giffler and Thompson (Operations Research 8, 1960): of the rank that could complete something first, the
dispatch runs the action with the smallest key among those that could start before that. An F leaves headroom
for what may follow at once: one F of every deeper stage of its rank that still has F's, then their B's and
its own, the deepest first, each with its W. In a chain of stages memory therefore never locks up, and nothing
that fits one microbatch after the other is held back (`zbcompile.schedule.memory` says what they hold).
"""

from __future__ import annotations

from collections.abc import Sequence

from zbcompile.planner.core.compiled import Vector, jit, vector
from zbcompile.planner.core.instance import Codes, Instance
from zbcompile.planner.core.tables import Tables, unpack

__all__ = ["Dispatcher", "arrival_of", "dispatch_pays"]

_FAR = 1 << 60
_MOST_STEPS = 30_000_000


@jit
def arrival_of(t: Tables, code: int, i: int, ends: Vector) -> int:
    """Return when the messages for an F or B are there, or -1 if one of them has not been sent yet."""
    S, m = t.num_stages, t.num_microbatches
    latest = 0
    if code < S:
        for e in range(t.forward_at[code], t.forward_at[code + 1]):
            end = ends[t.forward_from[e] * m + i]
            if end < 0:
                return -1
            latest = max(latest, end + t.forward_lag[e])
        return latest
    for e in range(t.backward_at[code - S], t.backward_at[code - S + 1]):
        end = ends[(S + t.backward_from[e]) * m + i]
        if end < 0:
            return -1
        latest = max(latest, end + t.backward_lag[e])
    return latest


@jit
def _candidate(
    t: Tables,
    r: int,
    keys: Vector,
    in_flight: Vector,
    share: int,
    free: Vector,
    held: Vector,
    done: Vector,
    ends: Vector,
    found: Vector,
) -> None:
    """Find the best action of a rank: found[2 r] = its earliest completion, found[2 r + 1] = its code."""
    S, m = t.num_stages, t.num_microbatches
    soonest, chosen = _FAR, -1
    for phase in range(2):
        least = _FAR
        for e in range(t.own_at[r], t.own_at[r + 1]):
            s = t.own[e]
            for kind in range(3):
                code = kind * S + s
                i = done[code]
                ready = free[r]
                if i == m:
                    continue
                if kind == 0:
                    if done[s] - done[S + s] >= in_flight[s]:
                        continue
                    forwards, most = t.memory[code], max(t.peak[code], t.memory[code] + t.peak[S + s])
                    for d in range(e + 1, t.own_at[r + 1]):
                        if done[t.own[d]] < m:
                            forwards += t.memory[t.own[d]]
                            most = max(most, forwards + t.peak[S + t.own[d]])
                    if held[r] + most > t.headroom[r]:
                        continue
                elif i >= done[code - S] or held[r] + t.peak[code] > t.headroom[r]:
                    continue
                if kind < 2:
                    arrival = arrival_of(t, code, i, ends)
                    if arrival < 0:
                        continue
                    ready = max(ready, arrival)
                length = t.length[code]
                if kind == 2:
                    length = length * share // 100
                if phase == 0:
                    soonest = min(soonest, ready + length)
                elif (ready < soonest or ready + length == soonest) and keys[code * m + i] < least:
                    least = keys[code * m + i]
                    chosen = code
    found[2 * r] = soonest
    found[2 * r + 1] = chosen


@jit
def _run(
    t: Tables,
    keys: Vector,
    in_flight: Vector,
    share: int,
    line: Vector,
    offsets: Vector,
    free: Vector,
    held: Vector,
    done: Vector,
    ends: Vector,
    found: Vector,
) -> int:
    """Fill ``line`` rank by rank; return the number of actions placed."""
    S, p, m = t.num_stages, t.num_ranks, t.num_microbatches
    for k in range(2 * S * m):
        ends[k] = -1
    for k in range(4 * S):
        done[k] = 0
    for r in range(p):
        free[r] = 0
        held[r] = 0
        free[p + r] = offsets[r]
    for r in range(p):
        _candidate(t, r, keys, in_flight, share, free, held, done, ends, found)
    placed = 0
    while placed < 3 * S * m:
        r = 0
        for q in range(1, p):
            if found[2 * q] < found[2 * r]:
                r = q
        code = found[2 * r + 1]
        if found[2 * r] == _FAR or code < 0:
            return placed
        kind = code // S
        s = code - kind * S
        i = done[code]
        if kind < 2:
            free[r] = max(free[r], arrival_of(t, code, i, ends))
        free[r] += t.length[code]
        held[r] += t.memory[code]
        done[code] += 1
        if kind < 2:
            ends[code * m + i] = free[r]
        line[free[p + r]] = code
        free[p + r] += 1
        placed += 1
        _candidate(t, r, keys, in_flight, share, free, held, done, ends, found)
        if kind == 0:
            for a in range(t.after_forward_at[s], t.after_forward_at[s + 1]):
                _candidate(t, t.after_forward[a], keys, in_flight, share, free, held, done, ends, found)
        elif kind == 1:
            for a in range(t.after_backward_at[s], t.after_backward_at[s + 1]):
                _candidate(t, t.after_backward[a], keys, in_flight, share, free, held, done, ends, found)
    return placed


def dispatch_pays(instance: Instance) -> bool:
    """Return whether one run takes no more than about a second.

    Every action is chosen among all ranks, and then its rank looks at all of its stages.
    """
    actions = 3 * instance.num_stages * instance.num_microbatches
    return actions * (instance.num_ranks + 8 * max(map(len, instance.stages_of))) <= _MOST_STEPS


class Dispatcher:
    """Dispatch for one problem; keys and limits change from run to run.

    Attributes
    ----------
    instance
        The problem.
    offsets
        Where each rank's row begins in the lines that `run_line` returns.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance, self.tables = instance, Tables.of(instance)
        S, p, m = instance.num_stages, instance.num_ranks, instance.num_microbatches
        sizes = [3 * m * len(stages) for stages in instance.stages_of]
        self.offsets = vector([sum(sizes[:r]) for r in range(p + 1)])
        self.line = vector([0] * sum(sizes))
        self.free, self.held, self.found = (vector([0] * (2 * p)) for _ in range(3))
        self.done, self.ends = vector([0] * (4 * S)), vector([0] * (2 * S * m))

    def run(self, keys: Sequence[int], in_flight: Sequence[int], share: int = 100) -> Codes | None:
        """Return `run_line` as an order of its own."""
        line = self.run_line(keys, in_flight, share)
        return None if line is None else unpack(self.instance, self.offsets, line)

    def run_line(self, keys: Sequence[int], in_flight: Sequence[int], share: int = 100) -> Vector | None:
        """Return the codes in a row, valid until the next run.

        Parameters
        ----------
        keys
            Key per (kind, stage, microbatch), in that order, kinds F, B, W; the smaller goes first.
        in_flight
            Most microbatches in flight per stage.
        share
            Hundredths of a W that a gap must last before a W with a later key may fill it.

        Returns
        -------
        Vector or None
            ``None`` if the limits leave the dispatch stuck.
        """
        t = self.tables
        placed = _run(
            t,
            vector(keys),
            vector(in_flight),
            share,
            self.line,
            self.offsets,
            self.free,
            self.held,
            self.done,
            self.ends,
            self.found,
        )
        if int(placed) < 3 * t.num_stages * t.num_microbatches:
            return None
        return self.line
