"""On GPUs: all stages on one device in one process; with two devices, one process per rank over NCCL.

Collected only if CUDA is there.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zbcompile
from zbcompile.runtime.launch import spawn
from zbcompile.schedule.costs import Profile, StageCost

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

COUNT = 4


def model_and_batch(device: torch.device) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())])
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    return model.to(device), x.to(device), y.to(device)


def compiled(model: nn.Module, stages: int) -> zbcompile.Pipeline:
    profile = Profile((StageCost.simple(1000, 1000, 1000),) * stages)
    return zbcompile.compile(
        model, stages, loss_fn=nn.functional.mse_loss, num_microbatches=COUNT, profile=profile, time_limit=1.0
    )


def reference(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    for k in range(0, len(x), 2):
        nn.functional.mse_loss(model(x[k : k + 2]), y[k : k + 2]).backward()
    return {n: p.grad / COUNT for n, p in model.named_parameters() if p.grad is not None}


def test_all_stages_on_one_gpu_give_the_bits_of_autograd() -> None:
    model, x, y = model_and_batch(torch.device("cuda", 0))
    other = copy.deepcopy(model)
    pipeline = compiled(model, 4)
    pipeline.step(x, target=y)
    for name, grad in reference(other, x, y).items():
        assert torch.equal(dict(model.named_parameters())[name].grad, grad), name  # type: ignore[arg-type]
    measured = pipeline.timeline()
    assert all(end >= start for row in measured.ranks for _, start, end in row)


def over_nccl(rank: int) -> dict[str, Any]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    model, x, y = model_and_batch(device)
    with compiled(model, 2) as pipeline:
        for _ in range(2):
            pipeline.zero_grad()
            pipeline.step(x, target=y)
        pipeline.synchronize()
        return {n: p.grad.cpu() for n, p in pipeline.named_parameters() if p.grad is not None}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_over_nccl_give_the_bits_of_autograd() -> None:
    found = spawn(over_nccl, 2, (), timeout_s=300)
    model, x, y = model_and_batch(torch.device("cuda", 0))
    for name, grad in reference(model, x, y).items():
        got = next(record[name] for record in found if name in record)
        assert torch.equal(got, grad.cpu()), name
