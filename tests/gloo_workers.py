"""What the processes of the gloo tests run. Importable, as the processes are started from nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zbcompile.costs import Edge, Profile, StageCost
from zbcompile.driver import Options, lower, rated
from zbcompile.ir import Action, Kind, Placement, Schedule
from zbcompile.problem import Problem
from zbcompile.runtime.distributed import DistributedRunner
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.sleeping import Sleeping, sleeping_stages
from zbcompile.runtime.verbs import Setup, Step

NUM_RANKS, NUM_MICROBATCHES, NUM_STEPS = 4, 4, 3


def one_f_one_b(num_microbatches: int = NUM_MICROBATCHES) -> Schedule:
    order = []
    for stage in range(NUM_RANKS):
        warm = min(NUM_RANKS - stage, num_microbatches)
        row = [Action(Kind.FORWARD, stage, i) for i in range(warm)]
        for i in range(num_microbatches):
            row.append(Action(Kind.FULL_BACKWARD, stage, i))
            if warm + i < num_microbatches:
                row.append(Action(Kind.FORWARD, stage, warm + i))
        order.append(row)
    return Schedule.of(Placement.linear(NUM_RANKS), num_microbatches, order)


def sleeping_profile(num_stages: int = NUM_RANKS) -> Profile:
    cost = StageCost.simple(3_000_000, 3_000_000, 2_000_000)
    return Profile((cost,) * num_stages, tuple(Edge(s, s + 1, 4096, 4096) for s in range(num_stages - 1)))


def plan_texts(schedule: Schedule, profile: Profile) -> tuple[Problem, Schedule, tuple[str, ...]]:
    options = Options(schedule.num_stages, schedule.num_ranks, schedule.num_microbatches)
    plan = lower(rated(schedule, profile, options))
    return plan.problem, plan.schedule, plan.texts


class Faulty(Sleeping):
    """A sleeping stage that fails in the forward of microbatch 2 of the second step."""

    def __init__(self, index: int, profile: Profile, fault: str) -> None:
        super().__init__(index, profile, torch.device("cpu"))
        self.fault, self.calls = fault, 0

    def run_forward(self, state: Any, inputs: list[Any]) -> tuple[list[Tensor], list[Any]]:
        self.calls += 1
        if self.calls == NUM_MICROBATCHES + 3:
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "raising":
                raise ValueError("the loss went to the moon")
            if self.fault == "stalled":
                time.sleep(60)
            if self.fault == "shape":
                return [torch.zeros(7, 3, dtype=torch.uint8) for _ in self.outputs], []
        return super().run_forward(state, inputs)


def train(rank: int, fault: str, faulty_rank: int, limit_s: float, folder: str) -> str:
    """Three steps; the number of optimizer steps taken goes to a file. One rank fails in the second."""
    schedule, profile = one_f_one_b(), sleeping_profile()
    bad = rank == faulty_rank
    problem, schedule, texts = plan_texts(schedule, profile)
    group = PipelineGroup(None, 30.0)
    counted = Path(folder) / f"steps-{rank}"
    counted.write_text("0")
    group.agree({"plan": str(schedule) + ("!" if bad and fault == "different" else "")})
    stages: tuple[Any, ...] = sleeping_stages(profile, torch.device("cpu"))
    if bad:
        stages = (*stages[:rank], Faulty(rank, profile, fault), *stages[rank + 1 :])
    setup = Setup(stages, schedule.placement, schedule.num_microbatches)
    runner = DistributedRunner(group, setup, texts[rank], torch.device("cpu"), limit_s)
    for step in range(NUM_STEPS):
        runner.run(Step([[] for _ in range(NUM_MICROBATCHES)], step), {})
        counted.write_text(str(step + 1))
    runner.synchronize()
    runner.close()
    return "finished"
