"""V list schedules: list schedules for a V of two stages per rank, from the real times.

After the greedy search of arXiv 2401.10241 (section 6). All ranks proceed in rounds: in each, every rank runs
a B and an F. W's fill gaps that hold one. A W that does not fit the gap runs all the same where the rank
would otherwise be idle for longer, over the step, than any rank has been so far and than a budget allows: so
ranks with time to spare keep their messages punctual, and the rank that decides the span loses no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from zbcompile.planner.core.instance import B, Codes, F, Instance, W
from zbcompile.planner.core.scorer import Scored, Scorer
from zbcompile.planner.incumbent import Order
from zbcompile.planner.run import HOPELESS, Run

__all__ = ["Settings", "VList", "is_v", "v_list_order", "v_list_orders"]

_STEPS = 24
"""Budgets tried, an eighth of a W apart."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Parameters of one V list schedule.

    Attributes
    ----------
    idle_ns
        What a rank may be idle between its actions, even where no other has been idle as long, before a W
        runs that does not fit the gap.
    before_f, before_b
        Whether this is watched before F's, and before B's.
    """

    idle_ns: int
    before_f: bool
    before_b: bool


def is_v(instance: Instance) -> bool:
    """Return whether the stages are in a V: rank r holds stages r and 2p - 1 - r."""
    p = instance.num_ranks
    return instance.num_stages == 2 * p and instance.rank_of == (*range(p), *reversed(range(p)))


@dataclass(frozen=True, slots=True)
class VList:
    """V list schedules."""

    name: str = "v_list"
    instant: bool = False

    def applies(self, run: Run) -> bool:
        """Return whether the stages are in a V, and no send holds up its rank."""
        return not run.holds_rank and is_v(run.instance)

    def propose(self, run: Run) -> Iterator[Order]:
        """Yield the best three, unless the first is far longer than what is known."""
        best = run.pool[0].score if run.pool else None
        most = None if best is None else int(best[0] * HOPELESS)
        for value, score, codes in v_list_orders(run.instance, run.scorer, most, run.over):
            yield Order(codes, (self.name,), (value, score))


class _VListRun:
    """One V list schedule in the making."""

    def __init__(self, instance: Instance, settings: Settings) -> None:
        self.instance, self.settings = instance, settings
        p, S = instance.num_ranks, instance.num_stages
        self.p, self.m = p, instance.num_microbatches
        self.rows: Codes = [[] for _ in range(p)]
        self.free, self.held, self.idle = [0] * p, [0] * p, [0] * p
        self.waiting: list[deque[int]] = [deque() for _ in range(p)]
        self.ends: list[list[list[int]]] = [[[] for _ in range(S)] for _ in (F, B)]
        self.length = (instance.forward, instance.backward, instance.weight)

    def count(self, kind: int, s: int) -> int:
        """Return how many F's or B's of a stage have been placed."""
        return len(self.ends[kind][s])

    def arrival(self, kind: int, s: int) -> int | None:
        """Return when the message for the next F or B of a stage is there; ``None`` if it is not sent yet."""
        i = len(self.ends[kind][s])
        if i == self.m:
            return None
        latest = 0
        for before, source, lag in self.instance.rules.waits[kind][s]:
            ends = self.ends[before][source]
            if i >= len(ends):
                return None
            latest = max(latest, ends[i] + lag)
        return latest

    def run(self, kind: int, s: int) -> bool:
        """Place the next F or B of a stage, and W's before it where they fill the gap or free memory.

        Returns False, with no F or B placed, if its message or memory for it is missing.
        """
        arrival = self.arrival(kind, s)
        if arrival is None:
            return False
        r = self.instance.rank_of[s]
        peak = self.instance.memory.peak[kind][s]
        while self.held[r] + peak > self.instance.headroom[r] and self.waiting[r]:
            self.run_weight(r)
        if self.held[r] + peak > self.instance.headroom[r]:
            return False
        if self.rows[r]:
            self._fill(r, arrival, self.settings.before_f if kind == F else self.settings.before_b)
            self.idle[r] += max(0, arrival - self.free[r])
        self.free[r] = max(self.free[r], arrival) + self.length[kind][s]
        self.held[r] += self.instance.memory.change[kind][s]
        self.ends[kind][s].append(self.free[r])
        self.rows[r].append((kind, s))
        if kind == B:
            self.waiting[r].append(s)
        return True

    def _fill(self, r: int, arrival: int, watched: bool) -> None:
        """Place W's that end before the message is there, and one more if idling would exceed the budget."""
        waiting = self.waiting[r]
        while waiting and self.free[r] + self.instance.weight[waiting[0]] <= arrival:
            self.run_weight(r)
        late = self.idle[r] + arrival - self.free[r] > max(self.settings.idle_ns, max(self.idle))
        if waiting and watched and arrival > self.free[r] and late:
            self.run_weight(r)

    def run_weight(self, r: int) -> None:
        """Place the W that has waited longest on a rank."""
        s = self.waiting[r].popleft()
        self.free[r] += self.instance.weight[s]
        self.held[r] += self.instance.memory.change[W][s]
        self.rows[r].append((W, s))

    def warm_up(self) -> None:
        """Run microbatch 1 down and up again, then F's until every rank has run as many as those above it.

        While a rank waits for microbatch 1 on its way up, further microbatches come down to it, as many as
        time and headroom allow.
        """
        instance, p, m = self.instance, self.p, self.m
        for r in range(p):
            self.run(F, r)
        for r in reversed(range(p)):
            up = 2 * p - 1 - r
            most = max(instance.memory.peak[F][r], instance.memory.peak[F][up]) * 2 * (r + 1)
            while self.held[r] + most <= instance.headroom[r] and self.count(F, 0) < m:
                back = self.arrival(F, up)
                if back is None or self.free[r] + instance.forward[r] > back:
                    break
                if not all(self.run(F, above) for above in range(r + 1)):
                    break
            self.run(F, up)
        upward = False
        for r in range(1, p):
            while self._lags(r):
                before = [self.count(F, s) for s in range(2 * p)]
                for _ in range(2):
                    for below in reversed(range(r, p)):
                        self.run(F, 2 * p - 1 - below if upward else below)
                    upward = not upward
                    if not self._lags(r):
                        break
                if before == [self.count(F, s) for s in range(2 * p)]:
                    break

    def _lags(self, r: int) -> bool:
        """Return whether the rank above has run more F's, or as many of its upper stage with some left."""
        S, m = self.instance.num_stages, self.m
        down, up = self.count(F, r), self.count(F, S - 1 - r)
        above_down, above_up = self.count(F, r - 1), self.count(F, S - r)
        return down + up < above_down + above_up or up <= above_up < m

    def round(self) -> None:
        """Place a B and an F on every rank, as far as messages and headroom are there."""
        p, S = self.p, self.instance.num_stages
        upper = [r for r in range(p) if self.count(B, S - 1 - r) <= self.count(B, r) or not self._back(r)]
        lower = [r for r in range(p) if r not in upper]
        for r in upper:
            self.run(B, S - 1 - r)
        for r in reversed(lower):
            self.run(B, r)
        for r in range(p):
            down, up = r, S - 1 - r
            behind = self.count(F, up) < self.count(F, down)
            sent = r == p - 1 or self.count(F, up - 1) > self.count(F, up)
            done = self.count(F, down) == self.m
            self.run(F, up if behind and (sent or done) else down)

    def _back(self, r: int) -> bool:
        """Return whether the lower stage of a rank has its next gradient, or will have it in this round."""
        done = self.count(B, 2 * self.p - 1 - r) == self.m
        return done or r == self.p - 1 or self.arrival(B, r) is not None


def v_list_order(instance: Instance, settings: Settings) -> Codes | None:
    """Return one V list schedule, or ``None`` if memory locks it up."""
    state = _VListRun(instance, settings)
    state.warm_up()
    placed = -1
    while placed < (now := sum(map(len, state.rows))):
        placed = now
        state.round()
    for r in range(state.p):
        while state.waiting[r]:
            state.run_weight(r)
    whole = sum(map(len, state.rows)) == 3 * instance.num_stages * instance.num_microbatches
    return state.rows if whole else None


def v_list_orders(
    instance: Instance,
    scorer: Scorer,
    most: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Scored]:
    """Return the three best V list schedules, best first.

    Tried are all places where the budget is watched, with `_STEPS` budgets. Budgets go down from the idle
    time of the order made without one; the first is none at all.

    Parameters
    ----------
    instance
        The problem.
    scorer
        Its scorer.
    most
        Value in ns; nothing is returned if the first order takes longer.
    stop
        Asked before every order whether to end early.

    Returns
    -------
    list of Scored
        Empty for other placements than the V.
    """
    if not is_v(instance):
        return []
    pool: list[Scored] = []

    def take(settings: Settings) -> None:
        codes = v_list_order(instance, settings)
        score = None if codes is None else scorer.score(codes)
        if codes is not None and score is not None and all(score != entry[:2] for entry in pool):
            pool.append((*score, codes))
            pool.sort(key=lambda entry: entry[:2])
            del pool[3:]

    take(Settings(0, False, False))
    if pool and most is not None and pool[0][0] > most:
        return []
    if pool:
        idle = pool[0][0] - min(instance.work(r) for r in range(instance.num_ranks))
        step = max(1, max(instance.weight) // 8)
        budgets = [0, *(idle - k * step for k in range(_STEPS) if k * step < idle)]
        for budget, (before_f, before_b) in product(budgets, ((False, True), (True, False), (True, True))):
            if not stop():
                take(Settings(budget, before_f, before_b))
    return pool
