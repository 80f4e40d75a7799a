"""Small models as stages, references by plain autograd, and orders to run: shared by the runtime's tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from random import Random

import torch
from torch import Tensor, nn

from tests.support.strategies import greedy_order
from zbcompile.compiler.lower import lower
from zbcompile.compiler.stages import build_stages
from zbcompile.passes.profile.measure import edges_of
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.planner.imported import rated
from zbcompile.runtime.gradients import divided, hand_over, parameters_of
from zbcompile.runtime.local_runner import LocalRunner
from zbcompile.runtime.spec import PipelineSpec, Step
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.ir import Placement, Schedule
from zbcompile.schedule.problem import Problem

WIDTH = 4


class Chain(nn.Module):
    """Twelve small blocks; the first one's output is added again near the end; two blocks share a weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        if tied:
            self.blocks[10].weight = self.blocks[1].weight

    def forward(self, x: Tensor) -> Tensor:
        first = x = torch.tanh(self.blocks[0](x))
        for block in self.blocks[1:11]:
            x = torch.tanh(block(x))
        return self.blocks[11](x + first)


def make_chain(tied: bool = False) -> Chain:
    """Return a chain with the same weights every time."""
    torch.manual_seed(0)
    return Chain(tied)


def batch(num_microbatches: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, two rows per microbatch; the same every time."""
    generator = torch.Generator().manual_seed(1)
    shape = (2 * num_microbatches, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@functools.cache
def chain_front(num_stages: int) -> StagedModel:
    """Return the chain in stages."""
    x, y = batch(1)
    model = make_chain()
    return build_stages(model, num_stages, (x,), target=y, loss_fn=nn.functional.mse_loss)


@functools.cache
def chain_reference(num_microbatches: int) -> dict[str, Tensor]:
    """Return the gradients of a loop over the microbatches, divided by their number."""
    return reference(make_chain(), num_microbatches)


def reference(model: nn.Module, num_microbatches: int) -> dict[str, Tensor]:
    """Return the same for any model that takes x and the MSE loss."""
    x, y = batch(num_microbatches)
    for rows in range(0, len(x), 2):
        nn.functional.mse_loss(model(x[rows : rows + 2]), y[rows : rows + 2]).backward()
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grads[name] = parameter.grad.div_(num_microbatches)
    return grads


def problem_for(front: StagedModel, placement: Placement, num_microbatches: int) -> Problem:
    """Return a problem with simple costs, the model's true edges, and a link with latency."""
    stage = StageCost.simple(1000, 1200, 700)
    profile = Profile((stage,) * placement.num_stages, edges_of(front.stages), Link(50))
    return Problem.of(profile, placement, num_microbatches)


def random_placement(random: Random, max_ranks: int, stage_counts: tuple[int, ...]) -> Placement:
    """Return a linear, looped or V placement or any map, on at most ``max_ranks`` ranks."""
    stages = random.choice(stage_counts)
    ranks = random.randint(1, min(max_ranks, stages))
    kind = random.choice(("linear", "looped", "v", "map"))
    if kind == "linear" and stages <= max_ranks:
        return Placement.linear(stages)
    if kind in ("looped", "v") and stages % ranks == 0 and stages > ranks:
        return Placement.named(kind, ranks, stages // ranks)
    rank_of = [*range(ranks), *(random.randrange(ranks) for _ in range(stages - ranks))]
    random.shuffle(rank_of)
    return Placement(tuple(rank_of))


def random_case(seed: int, max_ranks: int, counts: tuple[int, ...]) -> tuple[StagedModel, Problem, Schedule]:
    """Return a random legal order with random fusing, its problem, and the stages that it runs."""
    random = Random(seed)
    placement = random_placement(random, max_ranks, counts)
    front = chain_front(placement.num_stages)
    problem = problem_for(front, placement, random.randint(1, 8))
    return front, problem, greedy_order(problem, random, fuse=random.choice((0.0, 0.3, 1.0)))


def programs_for(schedule: Schedule, problem: Problem) -> tuple[str, ...]:
    """Insert communication, check, and return the program of every rank."""
    return lower(rated(schedule, problem), merge=False).programs()


def run_here(
    front: StagedModel,
    schedule: Schedule,
    texts: tuple[str, ...],
    watch: Callable[[LocalRunner], None] | None = None,
) -> dict[str, Tensor]:
    """Run one step in this process; return the gradients as they land in ``param.grad``."""
    spec = PipelineSpec(front.stages, schedule.placement, schedule.num_microbatches)
    runner = LocalRunner(spec, texts, {}, torch.device("cpu"))
    if watch is not None:
        watch(runner)
    x, y = batch(schedule.num_microbatches)
    state = {n: fresh(v) for n, v in front.captured.state.items()}
    parts = [[x[k : k + 2], y[k : k + 2]] for k in range(0, len(x), 2)]
    sums = runner.run(Step(parts), state)
    hand_over(divided(sums, parameters_of(state), schedule.num_microbatches))
    return {name: p.grad for name, p in parameters_of(state).items() if p.grad is not None}


def fresh(value: Tensor) -> Tensor:
    """Return the same value as a leaf without a gradient."""
    data = value.detach().clone()
    return nn.Parameter(data) if isinstance(value, nn.Parameter) else data
