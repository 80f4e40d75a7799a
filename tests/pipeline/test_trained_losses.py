"""Losses that are modules of their own: trained, with buffers that change, right over several steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.pipeline_oracle import (
    SIZE,
    Batch,
    Calls,
    batch_of,
    compiled,
    in_order,
    mean_square,
    same_state,
)
from zbcompile.errors import CaptureError


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out * self.scale, target)


class Projected(nn.Module):
    """A head with running statistics, and a center that moves (as in self-distillation)."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)
        self.register_buffer("center", torch.zeros(SIZE))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        value = self.norm(self.head(out))
        self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
        return F.mse_loss(value - self.center, target)


def body(m: Calls, x: Tensor) -> Tensor:
    return m.third(torch.relu(m.second(torch.relu(m.first(x)))))


class OwnLossName(Calls):
    """Has a child that is called loss_fn and is not the loss."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: m.loss_fn(torch.relu(m.first(x))))
        self.loss_fn = nn.Linear(SIZE, SIZE)


@pytest.mark.parametrize("build", [lambda: Calls(body), OwnLossName], ids=["plain", "name taken"])
@pytest.mark.parametrize("kind", [Temperature, Projected])
def test_a_loss_with_parameters_is_trained(kind: type[nn.Module], build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, loss = build(), kind()
    x, y = batch_of(SIZE), batch_of(SIZE).cos()
    theirs, their_loss = copy.deepcopy((model, loss))
    order = in_order(2, 3)
    pipeline = compiled(model, Batch((x,), target=y), 2, 3, loss_fn=loss, schedule=order, verify=True)
    names = [name for name, _ in pipeline.named_parameters()]
    prefix = "loss_fn_." if isinstance(model, OwnLossName) else "loss_fn."
    assert {prefix + name for name, _ in loss.named_parameters()} <= set(names)
    mine = torch.optim.AdamW(pipeline.parameters(), lr=0.05)
    reference = torch.optim.AdamW([*theirs.parameters(), *their_loss.parameters()], lr=0.05)
    for _ in range(3):
        mine.zero_grad()
        reference.zero_grad()
        pipeline.step(x, target=y)
        for a, b in zip(x.chunk(3), y.chunk(3), strict=True):
            their_loss(theirs(a), b).backward()
        for parameter in (*theirs.parameters(), *their_loss.parameters()):
            if parameter.grad is not None:
                parameter.grad /= 3
        mine.step()
        reference.step()
        same_state(model, theirs)
        same_state(loss, their_loss)


def test_parameters_of_the_loss_are_there_before_the_capture_and_modes_after_eval() -> None:
    model, loss = Calls(body), Projected()
    x = batch_of(SIZE)
    pipeline = zbcompile.compile(model, 2, loss_fn=loss, schedule=in_order(2, 3))
    assert {id(p) for p in pipeline.parameters()} == {id(p) for m in (model, loss) for p in m.parameters()}
    pipeline.step(x, target=x)
    before = copy.deepcopy(dict(loss.named_buffers()))
    losses: list[Tensor] = []
    pipeline.eval(x, target=x, losses=losses)
    assert (len(losses), loss.training, loss.norm.training) == (3, True, True)
    assert torch.equal(loss.norm.running_mean, before["norm.running_mean"])


class InAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden = nn.Linear(SIZE, SIZE), [nn.Linear(SIZE, SIZE)]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](torch.relu(self.first(x)))


def test_trained_tensors_that_belong_to_no_module_are_refused_by_line() -> None:
    outside, x = Temperature(), batch_of(SIZE)
    cases: list[tuple[nn.Module, Any]] = [
        (Calls(body), lambda out, target: outside(out, out.detach())),
        (InAList(), mean_square),
    ]
    for model, loss in cases:
        with pytest.raises(CaptureError, match=r"no parameter of the model.*\n?.*test_trained_losses.py:"):
            compiled(model, Batch((x,)), 2, 3, loss_fn=loss)


class HeldTwice(nn.Module):
    """The model's own weight through a list: the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.held = [self.second.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.relu(self.first(x)), self.held[0])


def test_a_parameter_reached_through_a_list_keeps_its_gradient() -> None:
    model, x = HeldTwice(), batch_of(SIZE)
    reference = copy.deepcopy(model)
    pipeline = compiled(model, Batch((x,)), 2, 1, loss_fn=mean_square, verify=True)
    pipeline.step(x)
    mean_square(reference(x)).backward()
    same_state(model, reference)
