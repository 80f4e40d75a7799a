"""A model whose microbatches differ in cost: in one process, on ranks of their own, and as a plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zbcompile
from zbcompile.autograd_oracle import autograd_step, count_draws
from zbcompile.schedule.costs import Profile, StageCost

COSTS = (1, 2, 0.5, 1.5, 0.3, (1, 2))
PROFILE = Profile.uniform(StageCost.simple(1000, 1000, 900, 100, 60), 2, 10)


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)]
    return nn.Sequential(*layers)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, 8, generator=generator) for _ in range(2))
    return x, y


def compiled(model: nn.Module, **options: Any) -> zbcompile.Pipeline:
    x, y = batch()
    given: dict[str, Any] = {"microbatch_costs": COSTS, "profile": PROFILE, "time_limit": 1.0}
    return zbcompile.compile(
        model, 2, example_args=(x,), example_target=y, loss_fn=F.mse_loss, stall_limit=20.0, **given | options
    )


class WithLoss(nn.Module):
    """The model and its loss, for the plain loop."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), y)


def plain(stages: Sequence[Any], order: Sequence[int], steps: int) -> dict[str, Tensor]:
    """Return the gradients of a plain loop that takes the microbatches in an order, added up over steps."""
    model = model_of()
    x, y = batch()
    parts = [{"x": a, "y": b} for a, b in zip(x.chunk(6), y.chunk(6), strict=True)]
    draws, total = [count_draws(stage) for stage in stages], dict[str, Tensor]()
    for step in range(steps):
        model.zero_grad()
        autograd_step(WithLoss(model), parts, lambda loss: loss, draws, seed=0, step=step, order=order)
        for name, p in model.named_parameters():
            assert p.grad is not None
            total[name] = total[name] + p.grad if name in total else p.grad.clone()
    return total


def run(rank: int) -> dict[str, Any]:
    pipeline = compiled(model_of())
    x, y = batch()
    with pipeline:
        losses: list[Tensor] = []
        for _ in range(2):
            pipeline.step(x, target=y, losses=losses, share_losses=True)
        grads = {n: p.grad.clone() for n, p in pipeline.named_parameters() if p.grad is not None}
        return {"order": pipeline.microbatch_order, "grads": grads, "losses": losses}
