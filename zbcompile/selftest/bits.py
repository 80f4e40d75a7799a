"""Whether gradients have the bits of plain autograd: in one process, and on two that share the device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from zbcompile.selftest.machine import device_of
from zbcompile.selftest.pipelines import compare, compiled, copied, model_and_tokens
from zbcompile.selftest.settings import Found, Settings

__all__ = ["in_one_process", "on_two_processes"]


def in_one_process(rank: int, settings: Settings) -> Found:
    """Run all four stages in this process on one device and compare every gradient with autograd."""
    found, device = Found(), device_of(settings.device)
    with _fixed_order_of_sums():
        for family, dtype, dropout in settings.cases:
            name = f"{family}, {dtype}, dropout {dropout:g}"
            try:
                model, tokens = model_and_tokens(
                    family, settings.step_hidden, settings.step_length, device, dropout
                )
                other = copied(model.to(getattr(torch, dtype)))
                with compiled(model, tokens, 4) as pipeline:
                    compare(found, name, pipeline, other, tokens)
            except Exception as error:
                found.fail(f"{name}: {type(error).__name__}: {error}")
    return found


def on_two_processes(rank: int, settings: Settings) -> Found:
    """Run two ranks on the first device over gloo, and compare this rank's gradients with autograd."""
    found, device = Found(), device_of(settings.device)
    with _fixed_order_of_sums():
        model, tokens = model_and_tokens("gpt2", settings.step_hidden, settings.step_length, device)
        other = copied(model)
        with compiled(model, tokens, 2) as pipeline:
            compare(found, f"rank {rank}", pipeline, other, tokens)
            pipeline.synchronize()
            norm = float(pipeline.clip_grad_norm_(1.0))
            whole = float(
                torch.nn.utils.get_total_norm([p.grad for p in other.parameters() if p.grad is not None])
            )
            found.figures[f"rank {rank}: norm of all gradients"] = norm
            if abs(norm - whole) > 1e-5 * whole:
                found.fail(f"rank {rank}: the norm over both ranks is {norm}, autograd's {whole}")
            pipeline.synchronize()
    return found


@contextlib.contextmanager
def _fixed_order_of_sums() -> Iterator[None]:
    """Make kernels of a GPU that add in no fixed order add in one. Before the device is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
