"""What a loaded pipeline holds: the model's own tensors, and no others."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from tests.support.life_workers import Chain, compiled, rows


def test_a_parameter_that_was_replaced_is_held_by_nothing() -> None:
    model, (x, y) = Chain(), rows()
    pipeline = compiled(model)
    pipeline.step(x, target=y)
    pipeline.eval(x)
    old = weakref.ref(model.middle.weight)
    model.middle.weight = nn.Parameter(model.middle.weight.detach().clone())
    pipeline.step(x, target=y)
    gc.collect()
    assert old() is None
    assert model.middle.weight.grad is not None
    assert all(tensor.is_meta for tensor in pipeline._compiled.staged.captured.state.values())  # type: ignore[union-attr]


def test_a_guard_that_was_noted_in_another_mode_still_sees_a_change() -> None:
    model, (x, y) = Chain(), rows()
    pipeline = compiled(model)
    model.middle.weight = nn.Parameter(torch.ones(8, 8))
    pipeline.eval(x)
    pipeline.step(x, target=y)
    assert torch.equal(model.middle.weight, torch.ones(8, 8))
