"""What compile() takes over from a plan that was given: its send mode and how gradients are summed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zbcompile
from zbcompile.formats import schedule_json
from zbcompile.planner.plan import plan
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.problem import Problem

PROBLEM = Problem.of(Profile.uniform(StageCost.simple(1, 1, 1), 2), None, 4).with_(
    transport="rendezvous", accumulate="memory"
)


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "solution"])
def test_send_mode_and_accumulation_are_those_of_the_plan(tmp_path: Path, as_file: bool) -> None:
    solution = plan(PROBLEM, time_limit_s=1, level=1)
    path = tmp_path / "plan.json"
    path.write_text(schedule_json.dumps(solution))
    given = str(path) if as_file else solution
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inputs, target = torch.ones(4, 4), torch.ones(4, 4)

    def compiled(**asked: str) -> Problem:
        pipeline = zbcompile.compile(
            model,
            2,
            example_args=(inputs,),
            loss_fn=nn.functional.mse_loss,
            example_target=target,
            schedule=given,
            **asked,
        )
        return pipeline.solution.problem

    found = compiled()
    assert (found.transport, found.accumulate) == ("rendezvous", "memory")
    other = compiled(transport="async", accumulate="order")
    assert (other.transport, other.accumulate) == ("async", "order")


def test_without_a_plan_the_defaults_are_async_and_order() -> None:
    pipeline = zbcompile.compile(nn.Sequential(nn.Linear(2, 2)), 1)
    assert (pipeline._options.transport, pipeline._options.accumulate) == ("async", "order")
