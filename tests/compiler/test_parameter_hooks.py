"""Hooks that run after a gradient is handed over: once a step, whenever they were registered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.life_workers import Chain, compiled, optimizer_per_parameter, plain_steps, rows


def test_hooks_of_before_and_after_compile_run_once_a_step_on_whole_gradients() -> None:
    model = Chain(tied=True)
    seen: dict[str, list[Tensor]] = {}

    def note(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert not torch.is_grad_enabled()
            assert parameter.grad is not None
            seen.setdefault(name, []).append(parameter.grad.clone())

        return hook

    model.table.weight.register_post_accumulate_grad_hook(note("tied"))
    pipeline = compiled(model)
    assert not seen, "compile() runs no hook"
    handle = model.middle.weight.register_post_accumulate_grad_hook(note("later"))
    x, y = rows()
    for step in range(2):
        pipeline.step(x, target=y)
        assert len(seen["tied"]) == len(seen["later"]) == step + 1
        assert torch.equal(seen["tied"][-1], model.table.weight.grad)
        assert torch.equal(seen["later"][-1], model.middle.weight.grad)
    handle.remove()
    pipeline.step(x, target=y)
    assert (len(seen["tied"]), len(seen["later"])) == (3, 2)


def test_an_optimizer_in_the_hook_trains_like_one_after_the_step() -> None:
    model = Chain()
    plain = copy.deepcopy(model)
    optimizer_per_parameter(model.parameters())
    pipeline = compiled(model)
    x, y = rows()
    for _ in range(3):
        pipeline.step(x, target=y)
        assert all(p.grad is None for p in model.parameters())
    plain_steps(plain, 3)
    for (name, ours), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, expected), name


def test_a_hook_that_fails_leaves_whole_gradients() -> None:
    model = Chain(tied=True)
    pipeline = compiled(model)

    def fail(parameter: Any) -> None:
        raise ValueError("no more memory")

    model.table.weight.register_post_accumulate_grad_hook(fail)
    x, y = rows()
    with pytest.raises(ValueError, match="no more memory"):
        pipeline.step(x, target=y)
    assert all(p.grad is not None for p in model.parameters())
    assert pipeline.step_number == 1
