"""Planning again from a step: what is measured of it, and that a new order changes no bit."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.life_workers import Chain, compiled, rows, serial_order
from zbcompile.compiler.lower import LoweredPlan, lower
from zbcompile.compiler.remeasure import profile_of
from zbcompile.compiler.replan import planned_anew, weighed
from zbcompile.errors import UsageError
from zbcompile.formats.measured_json import Measured
from zbcompile.planner.plan import plan
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate

MS = 1_000_000
EDGES = tuple(Edge(s, s + 1, 1000, 1000) for s in range(3))
PLANNED = Problem.of(
    Profile((StageCost.simple(4 * MS, 4 * MS, 2 * MS),) * 4, EDGES, Link(MS // 10, 10**9)), None, 12
)
REAL = Profile(
    (StageCost.simple(3 * MS, 4 * MS, 2 * MS), *PLANNED.profile.stages[1:]),
    EDGES,
    PLANNED.profile.link,
    (((1, 2), Link(7 * MS, 10**9)),),
)


def as_it_ran(order: LoweredPlan, profile: Profile) -> Measured:
    """Return the times of an order under other costs than it was planned for."""
    timeline = simulate(order.schedule, order.problem.with_(profile=profile))
    rows_ = zip(timeline.schedule.order, timeline.start, timeline.end, strict=True)
    return Measured.of([[e for e in zip(*row, strict=True) if e[0].kind.letter not in "RA"] for row in rows_])


def test_costs_of_a_step_are_found_and_a_slow_link_among_them() -> None:
    running = lower(plan(PLANNED, time_limit_s=0.3), merge=True)
    found = profile_of(as_it_ran(running, REAL), running.schedule, PLANNED, links=True)
    assert found.stages[0].forward_ns == 3 * MS
    assert [s.forward_ns for s in found.stages[1:]] == [4 * MS] * 3
    assert found.stages[0].full_backward_ns == 6 * MS
    assert found.link_between(1, 2) == Link(7 * MS, 10**9)
    assert all(found.link_between(r, r + 1).latency_ns <= MS // 10 for r in (0, 2))
    assert found.overhead_ns == 0
    without = profile_of(as_it_ran(running, REAL), running.schedule, PLANNED, links=False)
    assert without.links == ()


def test_the_order_for_what_was_measured_is_shorter_and_compared_under_the_same_costs() -> None:
    running = lower(plan(PLANNED, time_limit_s=0.3), merge=True)
    measured = as_it_ran(running, REAL)
    found = lower(planned_anew(running, measured, links=True, time_limit_s=1.0, seed=0), merge=True)
    result = weighed(running, found, 0.02)
    assert result.bound_ns <= result.new_ns < result.old_ns
    assert result.changed
    assert result.gain > 0.02
    assert not weighed(running, found, result.gain + 0.01).changed
    assert not weighed(found, found, 0.0).changed
    assert "taken" in str(result)


def test_a_stage_that_only_ran_fused_keeps_the_ratio_of_b_and_w() -> None:
    order = serial_order(4, 12)
    running = lower(plan(PLANNED, time_limit_s=0.3), merge=True)
    fused = StageCost(4 * MS, 4 * MS, 2 * MS, 9 * MS, 2, 1)
    profile = Profile((fused,) * 4, EDGES, PLANNED.profile.link)
    timeline = simulate(order, PLANNED.with_(profile=profile))
    measured = Measured.of(
        [list(zip(*row, strict=True)) for row in zip(order.order, timeline.start, timeline.end, strict=True)]
    )
    found = profile_of(measured, order, running.problem, links=False).stages[2]
    assert (found.backward_input_ns, found.backward_weight_ns) == (6 * MS, 3 * MS)


def test_one_process_changes_its_order_between_two_steps_and_no_bit() -> None:
    model, (x, y) = Chain(), rows()
    plain = copy.deepcopy(model)
    reference = compiled(plain, 4)
    pipeline = compiled(model, 4, schedule=serial_order(4, 4))
    with pytest.raises(UsageError, match="(?s)no step of the present order.*size and shape of the example"):
        pipeline.replan()
    for step in range(3):
        for each in (reference, pipeline):
            each.step(x, target=y)
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, expected.grad)
        if step == 0:
            before, source = pipeline.schedule, pipeline.source(0)
            assert not pipeline.replan(threshold=0.99, time_limit=0.3).changed
            assert pipeline.schedule is before
            result = pipeline.replan(time_limit=0.3)
            assert result.changed, result
            assert pipeline.source(0) != source
            assert pipeline.certificate.value_ns == result.new_ns
    with pytest.raises(UsageError, match="threshold"):
        pipeline.replan(threshold=2.0)
    assert pipeline.step_number == 3
