"""A small net with dropout, compiled with recompute; what the processes of its gloo test run."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import zbcompile
from zbcompile.autograd_oracle import autograd_step, count_draws
from zbcompile.compiler.stages import build_stages
from zbcompile.compiler.variants import offered_levels
from zbcompile.passes.profile.counted import counted_profile
from zbcompile.planner.plan import plan
from zbcompile.schedule.devices import device_named
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.solution import Solution

STAGES, COUNT, WIDTH = 4, 6, 16
DEVICE = device_named("cpu")
MSE = nn.functional.mse_loss


class Block(nn.Module):
    """Work of several kinds: two products, a norm, an activation, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(STAGES)))


def batch(rows: int = 4 * COUNT) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def _costs() -> tuple[list[int], list[int]]:
    built = _built()
    profile = counted_profile(built.stages, DEVICE)
    return [s.static_bytes for s in profile.stages], [s.saved_bytes for s in profile.stages]


def _built() -> Any:
    x, y = (part[:4] for part in batch())
    points = [str(s) for s in range(1, STAGES)]
    return build_stages(net(), STAGES, (x,), target=y, loss_fn=MSE, planned_for=DEVICE, split_points=points)


_KNOWN: list[tuple[list[int], list[int]]] = []


def caps(share: float) -> list[int]:
    """Per rank its static bytes and room for so many microbatches without recompute."""
    if not _KNOWN:
        _KNOWN.append(_costs())
    return [static + int(share * saved) for static, saved in zip(*_KNOWN[0], strict=True)]


def compiled(**options: Any) -> tuple[zbcompile.Pipeline, nn.Module]:
    """Compile the net for a linear pipeline, counted for the CPU of the table."""
    model, (x, y) = net(), batch()
    pipeline = zbcompile.compile(
        model,
        STAGES,
        example_args=(x,),
        example_target=y,
        loss_fn=MSE,
        split_points=[str(s) for s in range(1, STAGES)],
        **{"num_microbatches": COUNT, "placement": "linear", "profile": DEVICE, "time_limit": 0.2, **options},
    )
    return pipeline, model


def plain_gradients(pipeline: zbcompile.Pipeline) -> list[Tensor]:
    """Return the gradients of the untouched net after the first step of the same random streams."""
    model, (x, y) = net(), batch()
    size = len(x) // COUNT
    rows = [slice(k * size, (k + 1) * size) for k in range(COUNT)]
    targets = iter([y[row] for row in rows])
    draws = [count_draws(stage) for stage in pipeline._ready().staged.stages]
    autograd_step(
        model,
        [{"input": x[row]} for row in rows],
        lambda output: MSE(output, next(targets)),
        draws,
        seed=0,
        step=0,
    )
    return [copy.copy(p.grad) for p in model.parameters() if p.grad is not None]


def mixed_plan() -> Solution:
    """Return a plan for two ranks in which every stage runs at another level."""
    built = _built()
    profile = counted_profile(built.stages, DEVICE, others=offered_levels(built))
    chosen = [min(s, len(stage.variants)) for s, stage in enumerate(profile.stages)]
    return plan(Problem.of(profile.choose(chosen), Placement.looped(2), COUNT), time_limit_s=1, level=1)


def train_as_planned(rank: int, path: str) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Run one step of a plan in this process's part; return the levels and this rank's gradients."""
    torch.set_num_threads(1)
    pipeline, _ = compiled(schedule=path, placement="auto")
    x, y = batch()
    pipeline.step(x, target=y)
    gradients = {name: p.grad for name, p in pipeline.named_parameters() if p.grad is not None}
    levels = pipeline._ready().staged.levels
    pipeline.close()
    return levels, gradients
