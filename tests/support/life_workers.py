"""What the processes of the tests about life after compile() run, and the plain loops beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MSE = nn.functional.mse_loss
NUM_MICROBATCHES = 4


class Chain(nn.Module):
    """Four layers; ``tied``: the first and the last share their weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Linear(8, 8)
        self.middle, self.more = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        if tied:
            self.last.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.table(x))))
        return self.last(torch.tanh(self.more(x)))


def rows() -> tuple[Tensor, Tensor]:
    """Return a batch and its target."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def optimizer_per_parameter(parameters: Iterable[nn.Parameter]) -> None:
    """Let every parameter be trained in a hook of its own, which frees the gradient."""
    for parameter in parameters:
        optimizer = torch.optim.AdamW([parameter], lr=0.1)

        def hook(held: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)


def plain_backward(model: nn.Module, loss_scale: float = 1.0) -> None:
    """Do what a step does, by autograd."""
    x, y = rows()
    for a, b in zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True):
        (MSE(model(a), b) * loss_scale).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(NUM_MICROBATCHES)


def plain_steps(model: nn.Module, steps: int) -> None:
    """Train without a pipeline."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        plain_backward(model)
        optimizer.step()
