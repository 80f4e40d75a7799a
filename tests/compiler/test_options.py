"""What compile() is asked for: contradictions and impossible values are refused by name, before a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zbcompile
from zbcompile.errors import UsageError
from zbcompile.options import CompileOptions, Shard
from zbcompile.planner.plan import plan
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement, Schedule
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import Problem


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def looped() -> Schedule:
    profile = Profile.uniform(StageCost.simple(1, 1, 1), 4)
    return plan(Problem.of(profile, Placement.looped(2), 4), time_limit_s=1).schedule


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"placement": "v"}, ("another placement", "v, as asked for", "looped: [0, 1, 0, 1]")),
        ({"placement": Placement.v(2)}, ("another placement",)),
        ({"num_ranks": 4}, ("another num_ranks", "2 in the schedule")),
        ({"num_microbatches": 8}, ("another num_microbatches", "4 in the schedule")),
        ({"num_stages": 2}, ("another num_stages", "4 in the schedule")),
    ],
)
def test_what_contradicts_the_schedule_is_refused(asked: dict[str, Any], words: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"num_stages": 4, "schedule": looped(), **asked}
    with pytest.raises(UsageError) as error:
        zbcompile.compile(model(), **options)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("asked", [{"placement": "looped"}, {"placement": (0, 1, 0, 1)}, {"num_ranks": 2}])
def test_what_agrees_with_the_schedule_is_taken(asked: dict[str, Any]) -> None:
    zbcompile.compile(model(), 4, schedule=looped(), **asked)


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"num_stages": 0}, "num_stages"),
        ({"num_ranks": True}, "num_ranks"),
        ({"objective": "speed"}, "span or makespan"),
        ({"transport": "telepathy"}, "async or rendezvous or batched"),
        ({"placement": "zigzag"}, "auto or linear or looped or v"),
        ({"memory_limit": -1}, "memory_limit"),
        ({"memory_limit": [1 << 30, 2.5]}, "memory_limit"),
    ],
)
def test_values_that_cannot_be_meant(asked: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError) as error:
        zbcompile.compile(model(), **{"num_stages": 2, **asked})
    assert word in str(error.value)


def test_a_plan_that_counts_on_variants_is_refused_by_name() -> None:
    lean = StageCost(3000, 4000, 3000, 7000, 1, 1, name="recompute")
    stage = StageCost(3000, 3000, 3000, 6000, 8, 1, static_bytes=0, variants=(lean,))
    profile = Profile((stage, stage))
    x, y = torch.ones(8, 4), torch.ones(8, 4)
    with pytest.raises(UsageError) as error:
        zbcompile.compile(
            model(), 2, example_args=(x,), example_target=y, loss_fn=nn.functional.mse_loss,
            num_microbatches=4, profile=profile, memory_limit=6, time_limit=1,
        )  # fmt: skip
    assert "as its variant 1 (recompute), which compile() does not build" in str(error.value)


def test_all_options_but_the_named_ones_are_agreed_on() -> None:
    """Two option records that differ in one field differ in what ranks compare, whichever field it is."""
    base = CompileOptions(model=model(), num_stages=4, num_ranks=2)
    problem = Problem.of(Profile.uniform(StageCost.simple(1, 1, 1), 4), Placement.looped(2), 4)
    other: dict[str, Any] = {
        "num_stages": 3,
        "num_microbatches": 7,
        "memory_limit": 5,
        "placement": "v",
        "objective": "makespan",
        "transport": "batched",
        "profile": Profile.uniform(StageCost.simple(1, 1, 1), 4),
        "schedule": looped(),
        "solution": plan(problem, time_limit_s=1),
        "num_ranks": 3,
        "seed": 1,
        "recompute": "full",
        "backend": "inductor",
        "verify": True,
        "time_limit_s": 1.0,
        "one_communicator": True,
        "scale_grads": False,
        "whole": ("x",),
        "constant": ("x",),
        "batch_dim": 1,
        "result_dim": 1,
        "other_shapes": "refuse",
        "fixed_branches": True,
        "stall_limit_s": 1.0,
        "free_model": True,
        "gradient_dtype": torch.float32,
        "accumulate": "memory",
        "kept_gradients": True,
        "post_validation": True,
        "microbatch_costs": (MicrobatchCost((2_000_000,), (1_000_000,)),) * 4,
        "skip": ("simplify",),
        "cuts": "plan",
        "rank_speeds": (1_000_000, 500_000),
        "levels": ("full",) * 4,
        "shards": (("*.weight", Shard(0)),),
    }
    needs: dict[str, dict[str, Any]] = {"shards": {"mesh": object()}}
    compared_elsewhere = {
        "model",
        "loss_fn",
        "group",
        "plan_group",
        "mesh",
        "data_group",
        "split_points",
        "cache",
    }
    assert set(CompileOptions.__dataclass_fields__) == set(other) | compared_elsewhere
    for name, value in other.items():
        changed = replace(base, **{name: value}, **needs.get(name, {}))
        assert changed.agreed_parts() != base.agreed_parts(), name
