"""Keyed dispatch where sends hold their rank: whole orders that fit, hardly any that hang."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.prove.cases import make_problem
from zbcompile.planner.core.instance import BW, B, Instance, W, numbered, to_schedule
from zbcompile.planner.core.score import fits
from zbcompile.planner.core.times import Clock
from zbcompile.planner.parts import search
from zbcompile.planner.portfolio import PORTFOLIO
from zbcompile.planner.run import Run
from zbcompile.planner.starts.held_dispatch import Priorities, held_dispatch
from zbcompile.planner.starts.initial import one_at_a_time
from zbcompile.planner.starts.offset_key_orders import first_keys
from zbcompile.schedule.check import faults
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate


def any_priorities(rng: random.Random, instance: Instance) -> Priorities:
    """Random offset keys and limits, and any choice of what is fused."""
    m, offsets = instance.num_microbatches, rng.choice(list(first_keys(instance)))
    for _ in range(4):
        offsets = offsets.changed(rng)
    fused = tuple((rng.randrange(m + 1), rng.randrange(m + 1)) for _ in range(instance.num_stages))
    return Priorities(offsets, fused)


@pytest.mark.parametrize("transport", ["rendezvous", "batched"])
def test_orders_are_whole_and_fit_and_few_hang(transport: str) -> None:
    count: Counter[str] = Counter()
    for seed in range(60):
        problem = make_problem(seed).with_(transport=transport)
        instance, clock = Instance.of(problem), Clock.of(problem)
        codes = held_dispatch(clock, any_priorities(random.Random(seed), instance))
        if codes is None:
            count["stuck"] += 1
            continue
        backwards = Counter(op for row in numbered(codes) for op in row)
        assert sum(backwards.values()) == len(backwards)
        kinds = Counter(kind for row in codes for kind, _ in row)
        assert kinds[B] == kinds[W]
        assert kinds[B] + kinds[BW] == instance.num_stages * instance.num_microbatches
        assert fits(instance, codes)
        found = faults(to_schedule(codes, problem), problem)
        assert all("deadlock" in str(fault) for fault in found)
        count["hangs" if found else "runs"] += 1
    assert count["runs"] >= 30, count


@pytest.mark.parametrize("placement", [Placement.v(2), Placement.looped(2)])
def test_first_orders_under_exchanges_are_far_shorter_than_one_at_a_time(placement: Placement) -> None:
    """All that is planned for sends that hold up nobody may hang here; these do not."""
    stage = StageCost.simple(15, 14, 9, 20, 9)
    problem = Problem.of(Profile.uniform(stage, 4, 1), placement, 4, 160, "span", "batched")
    found = []
    for _ in range(2):
        run = Run(problem, time_limit_s=60)
        search(run, [part for part in PORTFOLIO if part.name == "held_dispatch"])
        found.append(run.incumbent.codes)
    one = simulate(to_schedule(one_at_a_time(run.instance), problem), problem)
    assert run.value is not None
    assert run.value < 0.75 * one.span_ns
    assert run.incumbent.lineage == ("held_dispatch",)
    assert found[0] == found[1]
