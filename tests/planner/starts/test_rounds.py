"""Rounds: equal to a slow scheduler of the same rules, legal under any cap, as short as published."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.places import DATA
from tests.support.planner_cases import random_problem
from zbcompile.planner.bounds.analytic import best_bound
from zbcompile.planner.core.instance import B, Codes, F, Instance, W, to_schedule
from zbcompile.planner.core.scorer import Scorer
from zbcompile.planner.plan import plan
from zbcompile.planner.starts.rounds import (
    Rounds,
    Setting,
    applies,
    largest_group,
    mutate,
    rounds_orders,
    standard_settings,
)
from zbcompile.planner.starts.rounds_kernel import ALTERNATE, B_FIRST
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.least_memory import least_headroom
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate

TARGETS = {row["name"]: row for row in json.loads((DATA / "targets.json").read_text())["problems"]}


def looped_problem(rng: random.Random) -> Problem:
    """Unequal stages, further edges, some without gradient, other links, and caps that bind."""
    ranks = rng.randint(1, 4)
    stages = rng.randint(ranks + 1, 3 * ranks + 1)
    placement = Placement(tuple(s % ranks for s in range(stages)))
    problem = random_problem(rng, ranks=ranks, microbatches=rng.randint(1, 6), placement=placement)
    if stages > 2 and rng.random() < 0.5:
        profile = problem.profile
        source = rng.randrange(stages - 2)
        edge = Edge(source, rng.randrange(source + 2, stages), has_gradient=rng.random() < 0.5)
        profile = Profile(profile.stages, edges=(*profile.edges, edge), link=Link(rng.randint(0, 3)))
        problem = problem.with_(profile=profile)
        caps = [max(least_headroom(problem, r), problem.headroom(r) or 0) for r in range(ranks)]
        problem = problem.with_(caps=tuple(caps))
    return problem


def random_setting(instance: Instance, rng: random.Random) -> Setting:
    """Any setting, also such as lock up."""
    groups, left = [], instance.num_microbatches
    while left:
        groups.append(rng.randint(1, left))
        left -= groups[-1]
    most = instance.num_stages * instance.num_microbatches
    limits = tuple(rng.choice((rng.randint(1, 12), most)) for _ in instance.headroom)
    pending = tuple(rng.choice((rng.randint(0, 4), most)) for _ in instance.headroom)
    return Setting(tuple(groups), limits, rng.randrange(3), rng.choice((0, 50, 100)), pending)


class Slow:
    """The rules of the module, asked at every nanosecond."""

    def __init__(self, instance: Instance, setting: Setting) -> None:
        self.instance, self.setting = instance, setting
        group_of = [g for g, size in enumerate(setting.groups) for _ in range(size)]
        self.turns, self.keys = [], {}
        for stages in instance.stages_of:
            pairs = [(s, i) for s in stages for i in range(instance.num_microbatches)]
            self.turns.append(sorted(pairs, key=lambda pair: (group_of[pair[1]], pair[0], pair[1])))
            for s, i in pairs:
                self.keys[s, i] = (group_of[i], -s, i)
        self.ends: dict[tuple[int, int, int], int] = {}
        self.rows: Codes = [[] for _ in instance.stages_of]
        self.free = [0] * instance.num_ranks

    def done(self, kind: int, s: int) -> int:
        return self.rows[self.instance.rank_of[s]].count((kind, s))

    def arrival(self, kind: int, s: int, i: int) -> int | None:
        sources = (self.instance.forward_from if kind == F else self.instance.backward_from)[s]
        ends = [(self.ends.get((kind, other, i)), lag) for other, lag in sources]
        if any(end is None for end, _ in ends):
            return None
        return max((end + lag for end, lag in ends if end is not None), default=0)

    def held(self, rank: int) -> int:
        instance = self.instance
        change = {F: instance.saved, W: tuple(-w for w in instance.pending)}
        change[B] = tuple(w - b for b, w in zip(instance.saved, instance.pending, strict=True))
        return sum(change[kind][s] for kind, s in self.rows[rank])

    def choose(self, rank: int, now: int) -> tuple[int, int] | None:
        """Return what a free rank begins now."""
        instance, setting, row = self.instance, self.setting, self.rows[rank]
        stages, room = instance.stages_of[rank], instance.headroom[rank] - self.held(rank)
        spare = max(0, *(instance.pending[s] - instance.saved[s] for s in stages))
        kinds = [kind for kind, _ in row]
        coming, starved, ready = [], False, {}
        if (
            kinds.count(F) < len(self.turns[rank])
            and kinds.count(F) - kinds.count(B) < setting.in_flight[rank]
        ):
            s, i = self.turns[rank][kinds.count(F)]
            at = self.arrival(F, s, i)
            if at is not None and at > now:
                coming.append(at)
            elif at is not None and instance.saved[s] + spare > room:
                starved = True
            elif at is not None:
                ready[F] = s
        arrived = []
        for s in stages:
            i = self.done(B, s)
            at = self.arrival(B, s, i) if i < self.done(F, s) else None
            if at is not None and at > now:
                coming.append(at)
            elif at is not None and instance.pending[s] - instance.saved[s] > room:
                starved = True
            elif at is not None:
                arrived.append((self.keys[s, i], s))
        if arrived:
            ready[B] = min(arrived)[1]
        split = [s for kind, s in row if kind == B]
        late = split[kinds.count(W) :]
        if len(late) > setting.pending[rank]:
            return W, late[0]
        if len(ready) == 2:
            last = next((kind for kind in reversed(kinds) if kind != W), F)
            first = B if setting.rule == B_FIRST or (setting.rule == ALTERNATE and last == F) else F
            return first, ready[first]
        if ready:
            return next(iter(ready.items()))
        gap = min(coming) - now if coming else None
        if late and (starved or gap is None or gap * 100 >= setting.fill * instance.weight[late[0]]):
            return W, late[0]
        return None

    def run(self) -> Codes | None:
        """Return the order, or None if nothing runs any more."""
        instance, now = self.instance, 0
        waits = (*instance.forward_from, *instance.backward_from)
        longest = max((lag for row in waits for _, lag in row), default=0)
        times = (instance.forward, instance.backward, instance.weight)
        while sum(map(len, self.rows)) < 3 * instance.num_stages * instance.num_microbatches:
            for rank in range(instance.num_ranks):
                while self.free[rank] <= now and (action := self.choose(rank, now)) is not None:
                    kind, s = action
                    self.free[rank] = now + times[kind][s]
                    if kind != W:
                        self.ends[kind, s, self.done(kind, s)] = self.free[rank]
                    self.rows[rank].append(action)
            if now > max(self.free) + longest:
                return None
            now += 1
        return self.rows


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_rounds_equal_a_slow_scheduler(seed: int) -> None:
    rng = random.Random(seed)
    instance = Instance.of(looped_problem(rng))
    compiled, plain = Rounds(instance), Rounds(instance, list)
    for _ in range(3):
        setting = random_setting(instance, rng)
        assert compiled.order(setting) == plain.order(setting) == Slow(instance, setting).run()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_rounds_are_legal_and_say_their_value(seed: int) -> None:
    """Within the caps, free of deadlock, best first, and of the value that `simulate` finds."""
    rng = random.Random(seed)
    problem = looped_problem(rng)
    instance = Instance.of(problem)
    found = rounds_orders(instance, Scorer(instance), rng, 20)
    assert found == sorted(found, key=lambda entry: entry[:2])
    for value, _, codes in found:
        schedule = to_schedule(codes, problem)
        check(schedule, problem)
        result = simulate(schedule, problem)
        assert value == (result.span_ns if problem.objective == "span" else result.makespan_ns)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_where_memory_allows_a_group_there_is_an_order(seed: int) -> None:
    """Equal stages, one cap for all ranks or each its own: locked only if not even one microbatch fits."""
    rng = random.Random(seed)
    p, v = rng.randint(1, 5), rng.randint(2, 3)
    saved = rng.randint(1, 5)
    stage = StageCost.simple(
        rng.randint(1, 5), rng.randint(1, 5), rng.randint(0, 5), saved, rng.randint(0, saved)
    )
    caps = tuple(saved * rng.randint(v, 3 * v * p) for _ in range(p))
    placement = Placement.looped(p, v)
    problem = Problem.of(
        Profile.uniform(stage, p * v, rng.randint(0, 3)), placement, rng.randint(1, 3 * p), caps
    )
    instance = Instance.of(problem)
    assert largest_group(instance) >= 1
    assert rounds_orders(instance, Scorer(instance), rng, 0)


def test_changes_keep_settings_whole() -> None:
    rng = random.Random(0)
    instance = Instance.of(looped_problem(random.Random(4)))
    room = largest_group(instance)
    setting = standard_settings(instance)[0]
    for _ in range(500):
        setting = mutate(setting, instance, room, rng)
        assert sum(setting.groups) == instance.num_microbatches
        assert 1 <= min(setting.groups) <= max(setting.groups) <= max(room, 1)
        assert min(setting.in_flight) >= 0 <= min(setting.pending)


def published(p: int, v: int, m: int) -> Problem:
    """The published 1.5B times in v parts; one cap for all ranks: the peak of rank 0 in interleaved 1F1B."""
    stage = StageCost.simple(18_522_000 // v, 18_086_000 // v, 9_337_000 // v, 201_216, 73_728)
    cap = 201_216 * (2 * (p - 1) + (v - 1) * p + 1)
    return Problem.of(Profile.uniform(stage, p * v, 601_000), Placement.looped(p, v), m, cap, "span")


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 32), (4, 4, 16), (4, 4, 32), (8, 4, 16), (8, 4, 32)])
def test_published_times_are_solved_by_the_standard_settings(p: int, v: int, m: int) -> None:
    problem = published(p, v, m)
    instance = Instance.of(problem)
    value, _, codes = rounds_orders(instance, Scorer(instance), random.Random(0), 0)[0]
    check(to_schedule(codes, problem), problem)
    assert value == best_bound(problem).value_ns


def target(name: str, cap: str) -> Problem:
    """A problem of targets.json with the caps of that name."""
    row = TARGETS[name]
    stages = tuple(StageCost(*numbers) for numbers in row["stages_ns_bytes"])
    profile = Profile(stages, link=Link(row["link_latency_ns"]))
    placement = Placement(tuple(row["ranks"]))
    return Problem.of(profile, placement, row["microbatches"], tuple(row["caps"][cap]), "span")


@pytest.mark.parametrize(
    ("name", "cap", "best_ms"),
    [
        ("llama:2:64", "1p", 5472.0),
        ("llama:4:64", "1p", 5472.0),
        ("llama:8:64", "1p", 5484.6),
        ("llama:2:64", "interleaved 1F1B", 5686.4),
        ("llama:4:64", "interleaved 1F1B", 5538.25),
        ("llama:8:64", "interleaved 1F1B", 5505.6),
        ("big:64:looped:128", "1p", 4352.0),
        ("big:64:looped:128", "interleaved 1F1B", 4712.2),
    ],
)
def test_standard_settings_reach_the_best_known_values(name: str, cap: str, best_ms: float) -> None:
    """At most .2 % longer; at ``interleaved 1F1B`` each rank's cap is its own peak under that order."""
    instance = Instance.of(target(name, cap))
    value, _, _ = rounds_orders(instance, Scorer(instance), random.Random(0), 0)[0]
    assert value <= best_ms * 1_000_000 * 1.002


def test_plan_takes_rounds_and_proves_them() -> None:
    solution = plan(published(4, 4, 16), time_limit_s=60)
    assert solution.origin == "rounds"
    assert solution.certificate.status == "OPTIMAL"


def test_rounds_are_for_looped_placements_alone() -> None:
    stage = StageCost.simple(2, 2, 1, 2, 1)
    for placement in (Placement.linear(4), Placement.v(2), Placement((0, 0, 1, 1))):
        instance = Instance.of(Problem.of(Profile.uniform(stage, 4, 0), placement, 4))
        assert not applies(instance)
        assert rounds_orders(instance, Scorer(instance), random.Random(0), 5) == []
    uneven = Problem.of(Profile.uniform(stage, 5, 0), Placement((0, 1, 0, 1, 0)), 4)
    assert applies(Instance.of(uneven))
