"""What compile() takes from a plan that was given: objective, send mode, how gradients are summed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zbcompile
from zbcompile.formats import schedule_json
from zbcompile.planner.plan import plan
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.problem import Problem

PROBLEM = Problem.of(Profile.uniform(StageCost.simple(1, 1, 1), 2), None, 4).with_(
    objective="makespan", transport="rendezvous", accumulate="memory", kept_gradients=True
)
ASKED = ("objective", "transport", "accumulate", "kept_gradients")


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "solution"])
def test_what_is_not_asked_for_is_as_in_the_plan(tmp_path: Path, as_file: bool) -> None:
    solution = plan(PROBLEM, time_limit_s=1, level=1)
    path = tmp_path / "plan.json"
    path.write_text(schedule_json.dumps(solution))
    given = str(path) if as_file else solution
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inputs, target = torch.ones(4, 4), torch.ones(4, 4)

    def compiled(**asked: Any) -> list[object]:
        pipeline = zbcompile.compile(
            model,
            2,
            example_args=(inputs,),
            loss_fn=nn.functional.mse_loss,
            example_target=target,
            schedule=given,
            **asked,
        )
        return [getattr(pipeline.solution.problem, name) for name in ASKED]

    assert compiled() == ["makespan", "rendezvous", "memory", True]
    other = dict(zip(ASKED, ["span", "async", "order", False], strict=True))
    assert compiled(**other) == list(other.values())


def test_without_a_plan_the_defaults_are_span_async_and_order() -> None:
    pipeline = zbcompile.compile(nn.Sequential(nn.Linear(2, 2)), 1)
    assert [getattr(pipeline._options, name) for name in ASKED] == ["span", "async", "order", False]
