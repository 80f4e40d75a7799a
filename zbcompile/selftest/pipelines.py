"""Pipelines of the self-test with orders from files, and the plain loop that they are compared with."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

import zbcompile
from zbcompile.autograd_oracle import autograd_step, count_draws
from zbcompile.selftest.models import LanguageModel, token_loss
from zbcompile.selftest.settings import Found

__all__ = ["MICROBATCHES", "compare", "compiled", "model_and_tokens", "plan_file"]

MICROBATCHES = 8
"""Of every order file of whole steps."""


def plan_file(ranks: int, microbatches: int = MICROBATCHES) -> Path:
    """Return the order for so many equal stages, one on each rank; the planner made it."""
    return Path(__file__).with_name("plans") / f"p{ranks}-m{microbatches}.schedule.json"


def model_and_tokens(
    family: str, hidden: int, length: int, device: torch.device, dropout: float = 0.0
) -> tuple[nn.Module, Tensor]:
    """Return a model of four blocks and a batch of one row per microbatch; alike in every process."""
    torch.manual_seed(0)
    model = LanguageModel(family, 4, hidden, dropout)
    tokens = torch.randint(0, 512, (MICROBATCHES, length), generator=torch.Generator().manual_seed(1))
    return model.to(device).train(), tokens.to(device)


def compiled(model: nn.Module, tokens: Tensor, ranks: int) -> zbcompile.Pipeline:
    """Compile a model for the order of a file; its costs are measured on this device."""
    return zbcompile.compile(
        model,
        ranks,
        example_args=(tokens,),
        example_target=tokens,
        loss_fn=token_loss,
        num_microbatches=MICROBATCHES,
        schedule=plan_file(ranks),
        verify=False,
    )


def compare(found: Found, name: str, pipeline: zbcompile.Pipeline, other: nn.Module, tokens: Tensor) -> None:
    """Run a step, and note how many gradients of this process have the bits of plain autograd.

    A gradient that differs is named with its relative difference; more than a rounding of its dtype fails.

    Parameters
    ----------
    found
        Where to note it.
    name
        Of the case.
    other
        A copy of the untouched model, with the same weights.
    """
    number = pipeline._step_number
    pipeline.zero_grad()
    pipeline.step(tokens, target=tokens)
    got = {n: p.grad for n, p in pipeline.named_parameters()}
    autograd_step(
        _WithLoss(other),
        [{"tokens": row[None]} for row in tokens],
        lambda loss: loss,
        [count_draws(stage) for stage in pipeline],
        seed=0,
        step=number,
    )
    wanted = dict(other.named_parameters())
    differ = {}
    for key, grad in got.items():
        expected = wanted[key].grad
        if grad is None or expected is None:
            found.fail(f"{name}: {key} has no gradient")
        elif not torch.equal(grad, expected):
            differ[key] = float((grad - expected).norm() / expected.norm())
            limit = 1e-6 if grad.dtype == torch.float32 else 2 * torch.finfo(grad.dtype).eps
            if not differ[key] <= limit:
                found.fail(f"{name}: {key} differs by {differ[key]:.1e} (at most {limit:.1e})")
    found.figures[f"{name}: gradients compared"] = len(got)
    found.figures[f"{name}: equal to the bit"] = len(got) - len(differ)
    if differ:
        found.figures[f"{name}: relative differences"] = differ


def copied(model: nn.Module) -> nn.Module:
    """Return a copy with the same weights and no gradients."""
    other = copy.deepcopy(model)
    other.zero_grad()
    return other


class _WithLoss(nn.Module):
    """The model with its loss, as the oracle calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return token_loss(self.model(tokens), tokens)
