"""Microbatches that differ in cost: the planned order runs, with the bits of a plain loop in that order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zbcompile
from tests.support import cost_workers
from tests.support.cost_workers import COSTS, PROFILE, batch, compiled, model_of, plain
from zbcompile import Microbatches
from zbcompile.errors import CheckError, UsageError
from zbcompile.formats import profile_json, schedule_json
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.planner.plan import plan as planned_for
from zbcompile.runtime.launch import spawn
from zbcompile.schedule.held_gradients import held_sets
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.sum_order import numbered_by_turn, sum_order


def test_gradients_have_the_bits_of_a_plain_loop_in_the_planned_order() -> None:
    model = model_of()
    pipeline = compiled(model)
    order = pipeline.microbatch_order
    assert sorted(order) == list(range(6))
    assert order != tuple(range(6))
    plan = pipeline._compiled.plan
    assert held_sets(numbered_by_turn(plan.schedule, plan.problem)) == (0, 0)
    x, y = batch()
    losses: list[torch.Tensor] = []
    pipeline.step(x, target=y, losses=losses)
    stages = list(pipeline._compiled.staged.stages)
    in_order, as_given = plain(stages, order, 1), plain(stages, (), 1)
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(torch.equal(grads[name], in_order[name]) for name in grads)
    assert not all(torch.equal(grads[name], as_given[name]) for name in grads)
    assert len(losses) == 6


@pytest.mark.timeout(120)
def test_two_processes_have_the_same_bits() -> None:
    there = spawn(cost_workers.run, 2, (), timeout_s=100)
    here, order = compiled(model_of(), time_limit=0.3), there[0]["order"]
    expected = plain(list(here._compiled.staged.stages), order, 2)
    assert {name for record in there for name in record["grads"]} == set(expected)
    for record in there:
        assert record["order"] == order
        assert len(record["losses"]) == 12
        for name, grad in record["grads"].items():
            assert torch.equal(grad, expected[name]), name


def test_alike_microbatches_keep_their_order() -> None:
    assert compiled(model_of(), microbatch_costs=None, num_microbatches=6).microbatch_order == tuple(range(6))


def test_a_buffer_that_must_see_them_as_given_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    with pytest.raises(CheckError, match=r"running_mean in every forward") as caught:
        compiled(model)
    assert "leave microbatch_costs out" in str(caught.value)


def test_microbatches_of_different_shape_are_refused_by_name() -> None:
    pieces = [torch.randn(rows, 8) for rows in (2, 2, 3)]
    with pytest.raises(UsageError, match="do not all have one shape"):
        zbcompile.compile(
            model_of(), 2, example_args=(Microbatches(pieces),), example_target=Microbatches(pieces),
            loss_fn=F.mse_loss, microbatch_costs=[1, 1, 2], profile=PROFILE,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ([1, 2], "one cost per microbatch"),
        (["a"] * 6, "no number"),
        ([(1, 2, 3)] * 6, "pair of factors"),
        ([[1]] * 6, "pair of factors"),
    ],
)
def test_costs_that_cannot_be_meant_are_refused(costs: list[object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        compiled(model_of(), microbatch_costs=costs, num_microbatches=6)


def test_costs_come_with_a_profile_file_and_with_a_plan(tmp_path: Path) -> None:
    costs = tuple(MicrobatchCost.of(*(c if isinstance(c, tuple) else (c,))) for c in COSTS)
    file = tmp_path / "profile.json"
    file.write_text(profile_json.dumps(ProfileFile(PROFILE, microbatch_costs=costs)))
    found = compiled(model_of(), microbatch_costs=None, profile=str(file), time_limit=0.3)
    assert found._compiled.plan.problem.microbatch_costs == costs
    planned = planned_for(Problem.of(PROFILE, num_microbatches=6, microbatch_costs=costs), level=1)
    plan_file = tmp_path / "plan.json"
    plan_file.write_text(schedule_json.dumps(planned))
    for given in (planned, str(plan_file)):
        found = compiled(model_of(), microbatch_costs=None, schedule=given)
        assert found.microbatch_order == sum_order(planned.schedule, planned.problem)
        assert found._compiled.plan.problem.microbatch_costs == costs


def test_another_number_of_microbatches_runs_as_if_they_were_alike(tmp_path: Path) -> None:
    pipeline = compiled(model_of(), cache=str(tmp_path), time_limit=0.3)
    x, y = batch()
    pipeline.step(x[:8], target=y[:8])
    again = compiled(model_of(), cache=str(tmp_path), time_limit=0.3)
    assert again.microbatch_order == pipeline.microbatch_order


def test_a_measured_step_is_planned_anew_with_the_factors() -> None:
    pipeline = compiled(model_of(), time_limit=0.3)
    x, y = batch()
    pipeline.step(x, target=y)
    pipeline.replan(threshold=0.0, time_limit=0.3)
    assert len(pipeline._compiled.plan.problem.microbatch_costs) == 6
    pipeline.step(x, target=y)


def test_cuts_that_are_planned_are_refused_beside_costs() -> None:
    with pytest.raises(UsageError, match="cuts are planned for microbatches that are alike"):
        compiled(model_of(), cuts="plan", profile=None)
