"""What F, B and W of a stage cost: their time beside plain autograd, and the bytes that they hold."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

import zbcompile
from zbcompile.selftest.machine import bytes_in_use, device_of, free_cached, timed_ns
from zbcompile.selftest.models import BLOCKS
from zbcompile.selftest.pipelines import plan_file
from zbcompile.selftest.settings import Found, Settings

__all__ = ["bytes_held", "times"]

_PLAIN = "plain autograd"
_SLACK_BYTES = 512 << 10
"""Bytes that allocators round up, and that small objects take."""


def times(rank: int, settings: Settings) -> Found:
    """Time F, B and W of a stage of blocks beside plain forward and backward, eager and compiled."""
    found, device = Found(), device_of(settings.device)
    for family in settings.families:
        blocks, x, gradient = _blocks(family, settings, device)
        ways: dict[str, Callable[[], None]] = {_PLAIN: _plain(blocks, x, gradient)}
        for backend in settings.backends:
            try:
                if backend == "inductor":
                    ways["torch.compile"] = _plain(torch.compile(copy.deepcopy(blocks)), x, gradient)
                stage = _stage(blocks, x, backend)
                ways[f"{backend}: F + B + W"] = _split(stage, x, gradient)
                ways[f"{backend}: F + BW"] = _fused(stage, x, gradient)
            except Exception as error:
                found.fail(f"{family}, {backend}: {type(error).__name__}: {error}")
        _time(found, family, ways, settings.rounds, device)
        del blocks, ways
        free_cached(device)
    return found


def _time(
    found: Found, family: str, ways: dict[str, Callable[[], None]], rounds: int, device: torch.device
) -> None:
    """Run the ways in turns; note the median of each, and of its ratio to the plain one of its round."""
    taken: dict[str, list[int]] = {name: [] for name in ways}
    for name, way in list(ways.items()):
        try:
            for _ in range(2):  # the first runs compile kernels and fill the allocator
                way()
        except Exception as error:
            found.fail(f"{family}, {name}: {type(error).__name__}: {error}")
            del ways[name], taken[name]
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(timed_ns(device, way))
    plain = taken.get(_PLAIN)
    for name, values in taken.items():
        found.figures[f"{family}, {name}: ns"] = int(statistics.median(values))
        if plain and name != _PLAIN:
            ratios = (mine / theirs for mine, theirs in zip(values, plain, strict=True))
            found.figures[f"{family}, {name}: ratio to {_PLAIN}"] = round(statistics.median(ratios), 4)


def bytes_held(rank: int, settings: Settings) -> Found:
    """Compare the bytes that the allocator counts after F and after B with those predicted."""
    found, device = Found(), device_of(settings.device)
    for family in settings.families:
        blocks, x, gradient = _blocks(family, settings, device)
        stage = _stage(blocks, x, "eager")
        for _ in range(2):  # the first one makes what libraries keep
            after_f, after_b = _held(stage, x, gradient, device)
        costs = stage.compiled
        for phase, held, predicted in (
            ("F", after_f, int(costs.saved_bytes)),  # type: ignore[attr-defined]
            ("B", after_b, int(costs.saved_for_weight_bytes)),  # type: ignore[attr-defined]
        ):
            found.figures[f"{family}, after {phase}: bytes held"] = held
            found.figures[f"{family}, after {phase}: bytes predicted"] = predicted
            if abs(held - predicted) > _SLACK_BYTES:
                found.fail(f"{family}: after {phase} {held} bytes are held, {predicted} were predicted")
        del blocks, stage, x, gradient
        free_cached(device)
    return found


def _held(stage: zbcompile.Stage, x: Tensor, gradient: Tensor, device: torch.device) -> tuple[int, int]:
    """Return the bytes in use after F and after B beyond those before; inputs and results are dropped."""
    before = bytes_in_use(device)
    saved = stage.run_forward(x.clone())[1]
    after_f = bytes_in_use(device) - before
    saved = stage.run_backward_input(saved, gradient)[1]
    after_b = bytes_in_use(device) - before
    stage.run_backward_weight(saved)
    return after_f, after_b


def _blocks(family: str, settings: Settings, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the blocks of the timed stage, an input of theirs, and a gradient of their output."""
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    with torch.device(device):
        blocks = nn.Sequential(*(BLOCKS[family](settings.hidden) for _ in range(settings.blocks)))
        x = torch.randn(settings.rows, settings.length, settings.hidden)
    return blocks.to(dtype), x.to(dtype), torch.ones_like(x, dtype=dtype)


def _stage(blocks: nn.Module, x: Tensor, backend: str) -> zbcompile.Stage:
    """Return the blocks as the middle one of three stages: both its input and its output have gradients."""
    edge = nn.LayerNorm(x.shape[-1], device=x.device, dtype=x.dtype)
    model = nn.Sequential(edge, copy.deepcopy(blocks), copy.deepcopy(edge))
    pipeline = zbcompile.compile(
        model,
        3,
        example_args=(x,),
        example_target=x,
        loss_fn=nn.functional.mse_loss,
        num_microbatches=1,
        schedule=plan_file(3, 1),
        split_points=["1", "2"],
        backend=backend,
        recompute="none",
        verify=False,
    )
    return pipeline[1]


def _plain(blocks: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> Callable[[], None]:
    parameters = list(blocks.parameters())  # type: ignore[attr-defined]

    def run() -> None:
        given = x.detach().requires_grad_()
        torch.autograd.grad(blocks(given), [given, *parameters], gradient)

    return run


def _split(stage: zbcompile.Stage, x: Tensor, gradient: Tensor) -> Callable[[], None]:
    def run() -> None:
        _, saved = stage.run_forward(x)
        _, saved = stage.run_backward_input(saved, gradient)
        stage.run_backward_weight(saved)

    return run


def _fused(stage: zbcompile.Stage, x: Tensor, gradient: Tensor) -> Callable[[], None]:
    def run() -> None:
        _, saved = stage.run_forward(x)
        stage.run_full_backward(saved, gradient)

    return run
