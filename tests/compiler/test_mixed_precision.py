"""Gradients wider than their parameters, and the scale of a loss, in one process."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from tests.support.life_workers import (
    FACTORS,
    MSE,
    NUM_MICROBATCHES,
    POISONED,
    Chain,
    compiled,
    main_parameter_steps,
    poison,
    rows,
    scaled_steps,
)
from zbcompile.errors import ShapeError, UsageError

HALF = torch.bfloat16


def float32_sums(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients of a model in bfloat16, every microbatch's rounded, their sum and mean not."""
    sums: dict[str, Tensor] = {}
    x, y = (t.to(HALF) for t in rows())
    for a, b in zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True):
        model.zero_grad()
        MSE(model(a), b).backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            sums[name] = sums.get(name, 0) + parameter.grad.float()
    return {name: total / NUM_MICROBATCHES for name, total in sums.items()}


def half_pipeline(model: nn.Module, num_stages: int = 2, **options: object):  # type: ignore[no-untyped-def]
    return compiled(model, num_stages, dtype=HALF, gradient_dtype=torch.float32, **options)


def test_gradients_of_bfloat16_parameters_are_summed_and_handed_over_in_float32() -> None:
    model = Chain().to(HALF)
    expected = float32_sums(copy.deepcopy(model))
    pipeline = half_pipeline(model)
    x, y = (t.to(HALF) for t in rows())
    pipeline.step(x, target=y)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == HALF
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, expected[name]), name
    pipeline.step(x, target=y)
    assert torch.equal(model.middle.weight.grad, 2 * expected["middle.weight"])
    with pytest.raises(RuntimeError, match="dtype"):  # why the docs train main parameters
        torch.optim.AdamW(model.parameters()).step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    plain = compiled(Chain().to(HALF), 2, dtype=HALF)
    wider = [
        a.static_bytes - b.static_bytes
        for a, b in zip(pipeline.profile.stages, plain.profile.stages, strict=True)
    ]
    assert sum(wider) == 2 * sum(p.numel() for p in model.parameters())
    sets = [
        (a.gradient_bytes, 2 * b.gradient_bytes)
        for a, b in zip(pipeline.profile.stages, plain.profile.stages, strict=True)
    ]
    assert all(wide == twice > 0 for wide, twice in sets)


def test_a_gradient_of_another_dtype_in_the_way_is_refused_by_name() -> None:
    model = Chain().to(HALF)
    model.more.bias.grad = torch.zeros(8, dtype=HALF)
    x, y = (t.to(HALF) for t in rows())
    with pytest.raises(ShapeError, match=r"(?s)\(more.bias\).*torch.float32.*torch.bfloat16.*None before"):
        half_pipeline(model).step(x, target=y)
    with pytest.raises(UsageError, match="gradient_dtype"):
        compiled(Chain(), gradient_dtype=torch.float16)


def test_main_parameters_train_in_float32_what_runs_in_bfloat16() -> None:
    model = Chain().to(HALF)
    plain = copy.deepcopy(model)
    main_parameter_steps(half_pipeline(model), 3)
    main = {name: p.detach().float().requires_grad_() for name, p in plain.named_parameters()}
    optimizer = torch.optim.AdamW(main.values(), lr=0.1)
    for _ in range(3):
        for name, total in float32_sums(plain).items():
            main[name].grad = total
        nn.utils.clip_grad_norm_(main.values(), 0.5)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(main[name])
    for (name, ours), expected in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours, expected[1]), name


def test_a_scaler_does_what_torchs_does_skipped_step_included() -> None:
    model = Chain()
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.float16):
        pipeline = compiled(model, 2)
        scales = scaled_steps(pipeline)
    reference = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
    optimizer, expected = torch.optim.AdamW(plain.parameters(), lr=0.1), []
    for number, factor in enumerate(FACTORS):
        optimizer.zero_grad()
        x, y = rows()
        for a, b in zip((x * factor).chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True):
            with torch.autocast("cpu", torch.float16):
                loss = MSE(plain(a), b)
            reference.scale(loss).backward()
        for parameter in plain.parameters():
            parameter.grad.div_(NUM_MICROBATCHES)  # type: ignore[union-attr]
        if number == POISONED:
            poison(plain.named_parameters())
        reference.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step(optimizer)
        reference.update()
        expected.append(reference.get_scale())
    assert scales == expected
    changes = [b / a for a, b in itertools.pairwise([2.0**14, *scales])]
    assert changes.count(0.5) == 2, "two steps must be skipped"
    assert 2.0 in changes
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_scale_that_was_saved_is_used_at_once() -> None:
    pipeline = compiled(Chain(), 2)
    scaler = pipeline.scaler(init_scale=8.0)
    assert pipeline.loss_scale == 8.0
    saved = scaler.state_dict()
    again = pipeline.scaler(init_scale=2.0)
    assert pipeline.loss_scale == 2.0
    again.load_state_dict(saved)
    assert pipeline.loss_scale == 8.0
    pipeline.scaler(enabled=False)
    assert pipeline.loss_scale == 1.0
