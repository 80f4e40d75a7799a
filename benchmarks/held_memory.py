"""Bytes that ranks really hold during steps, beside what the plan says, for random plans under caps.

    python benchmarks/held_memory.py [--plans 50] [--first 0] [--ranks 2]

Every plan is of a random model, placement and number of microbatches. Two of three are planned under random
caps, with a fused backward that is cheaper than B and W. Every third is a random legal order, some backwards
fused, microbatches in any order, under the caps that it needs exactly: there, gradients of many microbatches
wait for their turn in the sum, or are added as they come.

Each rank is a process over gloo. Before each action it asks the C allocator what is in use
(`benchmarks.allocator`), in a step and in two more, which keep their gradients where the plan counts that.
``held`` is what is in use beyond what was before the steps, ``plan`` what the plan says of that moment:
activations, the sum of gradients and those that wait, without parameters and the optimizer's state. No plan
counts what an action needs only while it runs, nor messages; those here are small. ``added`` is the most that
an action's own results added until they were summed.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import zbcompile
from benchmarks.allocator import bytes_in_use
from tests.support.strategies import greedy_order
from zbcompile.compiler.stages import build_stages
from zbcompile.passes.profile.counted import counted_profile
from zbcompile.runtime.launch import spawn
from zbcompile.runtime.verbs import Rank
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.held_gradients import held_sets
from zbcompile.schedule.ir import Placement, Schedule
from zbcompile.schedule.least_memory import least_headroom
from zbcompile.schedule.memory import memory_during, memory_peaks
from zbcompile.schedule.problem import Problem

__all__ = ["SLACK", "Case", "compiled", "random_case"]

NARROW, KIB = 16, 1 << 10
SLACK = 256 * KIB
"""Bytes that no plan counts and that stay in use between two actions: messages and small objects."""


@dataclass(frozen=True)
class Case:
    """A random plan.

    Attributes
    ----------
    widths
        Width of every stage: two linear layers with a Tanh between them.
    problem
        With counted bytes and random times and caps.
    rows
        Of a microbatch.
    schedule
        The order to run; None: the planner's.
    """

    widths: tuple[int, ...]
    problem: Problem
    rows: int
    schedule: Schedule | None


def model_of(widths: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(NARROW, w), nn.Tanh(), nn.Linear(w, NARROW)) for w in widths)
    )


@cache
def counted(widths: tuple[int, ...], rows: int) -> Profile:
    """Return the counted profile of a model's stages, for microbatches of so many rows."""
    x = torch.zeros(rows, NARROW)
    names = [str(k) for k in range(1, len(widths))]
    staged = build_stages(
        model_of(widths),
        len(widths),
        (x,),
        target=x,
        loss_fn=nn.functional.mse_loss,
        split_points=names,
        verify=False,
    )
    return counted_profile(staged.stages, "CPU")


def random_case(number: int, ranks: int, width: int = 8192) -> Case:
    """Return a plan's problem; ``width`` is the least of a stage's layers, four times that the most.

    Five plans after each other are of one model.
    """
    rng = random.Random(number // 5)
    placement = rng.choice((Placement.linear(ranks), Placement.v(ranks), Placement.looped(ranks)))
    widths = tuple(width * rng.randint(1, 4) for _ in range(placement.num_stages))
    rows = rng.choice((16, 32))
    profile = counted(widths, rows)
    rng = random.Random(number)
    count = rng.randint(4, 10)
    stages = []
    for cost in profile.stages:
        f, b, w = (rng.randint(18_000, 22_000) for _ in range(3))
        full = b + w - rng.randint(2_000, 5_000)
        times = {"forward_ns": f, "backward_input_ns": b, "backward_weight_ns": w, "full_backward_ns": full}
        stages.append(replace(cost, **times))
    profile = replace(profile, stages=tuple(stages))
    problem = Problem.of(
        profile,
        placement,
        count,
        objective=rng.choice(("span", "makespan")),
        accumulate=rng.choice(("order", "order", "memory")),
        kept_gradients=rng.random() < 0.5,
    )
    if number % 3 == 2:
        schedule = greedy_order(problem, rng, rng.random())
        peaks = memory_peaks(schedule, problem)
        return Case(widths, problem.with_(caps=tuple(peaks)), rows, schedule)
    caps = []
    for rank in range(ranks):
        most = sum(
            profile.stages[s].saved_bytes * min(count, 2 * len(widths))
            + rng.choice((0, 1, 4)) * profile.stages[s].gradient_bytes
            for s in placement.stages_of(rank)
        )
        least = least_headroom(problem, rank)
        caps.append(problem.static_bytes(rank) + rng.randint(least, max(least, most)))
    return Case(widths, problem.with_(caps=tuple(caps)), rows, None)


def compiled(case: Case, **options: Any) -> tuple[zbcompile.Pipeline, torch.Tensor]:
    """Return the pipeline of a case, and a batch for it."""
    problem = case.problem
    x = torch.linspace(-1, 1, case.rows * problem.num_microbatches * NARROW).reshape(-1, NARROW)
    pipeline = zbcompile.compile(
        model_of(case.widths),
        len(case.widths),
        example_args=(x,),
        example_target=x,
        loss_fn=nn.functional.mse_loss,
        num_microbatches=problem.num_microbatches,
        split_points=[str(k) for k in range(1, len(case.widths))],
        profile=problem.profile,
        placement=problem.placement,
        num_ranks=problem.num_ranks,
        schedule=case.schedule,
        memory_limit=list(problem.caps),
        objective=problem.objective,
        accumulate=problem.accumulate,
        kept_gradients=problem.kept_gradients,
        verify=False,
        time_limit=0.4,
        **options,
    )
    return pipeline, x


@dataclass(frozen=True)
class Row:
    """What a rank held with one plan: bytes at the moment nearest to the plan, or furthest above it."""

    held: int
    plan: int
    added: int
    waiting: int
    accumulate: str
    kept: bool


def measured(rank: int, first: int, plans: int, ranks: int) -> list[Row]:
    """Run some plans as one of their ranks."""
    warnings.simplefilter("ignore", UserWarning)  # mpi4py and the like; nothing here may warn of memory
    warnings.filterwarnings("error", message="gradients of an earlier step")
    return [_measured(rank, random_case(number, ranks)) for number in range(first, first + plans)]


def _measured(rank: int, case: Case) -> Row:
    pipeline, x = compiled(case)
    problem, schedule = pipeline.solution.problem, pipeline.schedule
    stages = problem.placement.stages_of(rank)
    sum_bytes = sum(problem.profile.stages[s].gradient_bytes for s in stages)
    counted = problem.static_bytes(rank) - sum_bytes * (2 if problem.kept_gradients else 1)
    plan = [
        most - counted
        for action, most in zip(schedule.order[rank], memory_during(schedule, problem, rank), strict=True)
        if action.kind.is_compute
    ]
    nearest, added = (-(1 << 60), 0, 0), 0
    with pipeline:
        pipeline.step(x, target=x)
        for p in pipeline.parameters():
            p.grad = None
        before = bytes_in_use()
        for _ in range(3):
            held, own = _watched(lambda: pipeline.step(x, target=x))
            assert len(held) == len(plan)
            rows = ((now - before - said, now - before, said) for now, said in zip(held, plan, strict=True))
            nearest, added = max(nearest, *rows), max(added, own)
            if not problem.kept_gradients:
                for p in pipeline.parameters():
                    p.grad = None
        pipeline.synchronize()
    sets = held_sets(schedule) if problem.accumulate == "order" else ()
    waiting = max((sets[s] for s in stages if sets), default=0)
    return Row(nearest[1], nearest[2], added, waiting, problem.accumulate, problem.kept_gradients)


def _watched(step: Callable[[], Any]) -> tuple[list[int], int]:
    """Return the bytes in use before each action of a step, and the most that an action's results added."""
    usual, held, added = Rank._run, list[int](), list[int]()

    def run(self: Rank, *arguments: Any) -> Any:
        held.append(bytes_in_use())
        result = usual(self, *arguments)
        added.append(bytes_in_use() - held[-1])
        return result

    Rank._run = run  # type: ignore[method-assign]
    try:
        step()
    finally:
        Rank._run = usual  # type: ignore[method-assign]
    return held, max(added)


def rows_of(first: int, plans: int, ranks: int) -> Iterator[tuple[int, int, Row]]:
    """Yield number, rank and row of every plan."""
    found = spawn(measured, ranks, (first, plans, ranks), timeout_s=300 + 60 * plans)
    for k in range(plans):
        for rank, rows in enumerate(found):
            yield first + k, rank, rows[k]


def main() -> int:
    """Print a table; return 1 if a rank held more than its plan says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    print(f"torch {torch.__version__}; KiB, at the moment that comes nearest to the plan")
    print("plan rank  sums   kept  waiting       held       plan   over it      added")
    over = waited = 0
    for number, rank, row in rows_of(asked.first, asked.plans, asked.ranks):
        excess = row.held - row.plan
        over, waited = over + (excess > SLACK), waited + (row.waiting > 0)
        print(
            f"{number:>4} {rank:>4}  {row.accumulate:<6} {row.kept!s:<5} {row.waiting:>7} "
            f"{row.held / KIB:>10.1f} {row.plan / KIB:>10.1f} {excess / KIB:>9.1f} {row.added / KIB:>10.1f}"
        )
    print(
        f"{over} of {asked.plans * asked.ranks} ranks held more than {SLACK // KIB} KiB above their plan; "
        f"on {waited} gradients waited"
    )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
