"""A pipeline against plain autograd: the same model, a loop over the same microbatches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zbcompile
from tests.support.strategies import greedy_order
from zbcompile import Pipeline
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement, Schedule
from zbcompile.schedule.problem import Problem

SIZE = 6
"""Features of the small models."""
INEXACT = 1e-6
"""Largest difference, relative to the largest value of a tensor, where the order of a sum differs."""


@dataclass
class Batch:
    """One whole batch: what `Pipeline.step` gets."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None

    def cut(self, count: int, whole: tuple[str, ...] = ()) -> list[Batch]:
        """Microbatches: every tensor as long as the first is cut, except kwargs named whole."""
        tensors = [
            t for t in pytree.tree_leaves((self.args, self.kwargs, self.target)) if isinstance(t, Tensor)
        ]
        size = next(t.shape[0] for t in tensors if t.dim())

        def piece(i: int) -> Callable[[Any], Any]:
            step = size // count
            return lambda t: (
                t[i * step : (i + 1) * step]
                if isinstance(t, Tensor) and t.dim() and t.shape[0] == size
                else t
            )

        return [
            Batch(
                pytree.tree_map(piece(i), self.args),
                {k: v if k in whole else pytree.tree_map(piece(i), v) for k, v in self.kwargs.items()},
                pytree.tree_map(piece(i), self.target),
            )
            for i in range(count)
        ]


def own_loss(value: Any) -> Tensor:
    """The loss that a model returned."""
    if isinstance(value, Tensor):
        return value
    return value["loss"] if isinstance(value, dict) else value[0]


def autograd(
    model: nn.Module,
    parts: Iterable[Batch],
    loss_fn: Any,
    *,
    scale: int | None = None,
    loss_scale: float = 1.0,
) -> tuple[list[Any], list[Tensor]]:
    """Forward and backward of every microbatch; adds to ``.grad`` what a pipeline step would.

    Returns (outputs, losses).
    """
    held = {name: p.grad for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    outputs, losses = [], []
    for part in parts:
        value = model(*part.args, **part.kwargs)
        loss = own_loss(value) if loss_fn is None else loss_fn(value, part.target)
        if loss.requires_grad:
            loss.backward(gradient=torch.full_like(loss, loss_scale))
        outputs.append(value)
        losses.append(loss.detach())
    for name, p in model.named_parameters():
        if p.grad is not None and scale:
            p.grad.div_(scale)
        if held[name] is not None:
            p.grad = held[name] if p.grad is None else held[name] + p.grad
    return outputs, losses


def joined(outputs: Sequence[Any]) -> Any:
    """The results of the microbatches as one result: tensors along dimension 0, those without one stacked.

    A whole batch in one call is no reference for a pipeline: a matrix library may round the rows of a
    batch otherwise than the same rows alone, and which shapes it treats so depends on the processor.
    """

    def join(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        values = [leaf.detach() for leaf in leaves]
        return torch.cat(values) if values[0].dim() else torch.stack(values)

    return pytree.tree_map(join, *outputs)


def same(name: str, found: Tensor | None, wanted: Tensor | None, exact: bool) -> None:
    """Bitwise equal (NaN included), or within INEXACT of the largest value."""
    assert (found is None) == (wanted is None), f"{name}: {'missing' if found is None else 'not None'}"
    if found is None or wanted is None:
        return
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
    if exact or not (wanted.is_floating_point() or wanted.is_complex()):
        assert torch.equal(found, wanted), (
            f"{name}: not bitwise equal, largest difference {_apart(found, wanted)}"
        )
    else:
        limit = INEXACT * float(wanted.detach().abs().max()) if wanted.numel() else 0.0
        assert _apart(found, wanted) <= limit, f"{name}: {_apart(found, wanted)} apart"


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach() - wanted.detach()).abs().max()) if wanted.numel() else 0.0


def same_state(model: nn.Module, reference: nn.Module, exact: bool = True) -> None:
    """Gradients, parameters and buffers of two models."""
    mine = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        same(f"{name}.grad", mine[name].grad, parameter.grad, exact)
        same(name, mine[name], parameter, exact)
    buffers = dict(model.named_buffers())
    for name, buffer in reference.named_buffers():
        same(name, buffers[name], buffer, exact)


def some_order(
    num_stages: int, microbatches: int, placement: Placement | None = None, seed: int = 0
) -> Schedule:
    """A random legal order: F, B and W in any mixture, some backwards fused."""
    placement = placement or Placement.linear(num_stages)
    profile = Profile(tuple(StageCost.simple(1, 1, 1, 1, 1) for _ in range(num_stages)))
    return greedy_order(Problem(profile, placement, microbatches), Random(seed))


def in_order(num_stages: int, microbatches: int) -> Schedule:
    """1F1B with split backwards: every stage takes the microbatches in their order."""
    rows = []
    for stage in range(num_stages):
        warm = min(num_stages - stage, microbatches)
        words = [f"{stage}F{i}" for i in range(warm)]
        for i in range(microbatches):
            words += [f"{stage}B{i}", f"{stage}W{i}"]
            words += [f"{stage}F{warm + i}"] if warm + i < microbatches else []
        rows.append(f"rank {stage}: {' '.join(words)}")
    head = f"placement {' '.join(map(str, range(num_stages)))}\nmicrobatches {microbatches}"
    return Schedule.parse("\n".join((head, *rows)))


def compiled(
    model: nn.Module,
    batch: Batch,
    stages: int,
    microbatches: int,
    *,
    seed: int = 0,
    search: bool = False,
    **options: Any,
) -> Pipeline:
    """A pipeline with a random legal order, or a searched one; no self-check, as the test is one."""
    options.setdefault("verify", False)
    if not search and "schedule" not in options:
        options["schedule"] = some_order(stages, microbatches, options.pop("placement", None), seed)
    return zbcompile.compile(
        model,
        stages,
        example_args=batch.args,
        example_kwargs=batch.kwargs,
        example_target=batch.target,
        num_microbatches=microbatches,
        time_limit=1.0,
        **options,
    )


def assert_right(
    model: nn.Module,
    *args: Any,
    stages: int = 2,
    microbatches: int = 3,
    loss: Any = None,
    target: Any = None,
    steps: int = 1,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    exact: bool = True,
    loss_scale: float = 1.0,
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> Pipeline:
    """Compile, run steps, compare losses, outputs, gradients, parameters and buffers with autograd."""
    model.zero_grad()
    batch = Batch(args, kwargs or {}, target)
    reference = copy.deepcopy(model)
    pipeline = compiled(model, batch, stages, microbatches, loss_fn=loss, **options)
    same_state(model, reference)
    pipeline.loss_scale = loss_scale
    mine, theirs = (optimizer(m.parameters()) if optimizer else None for m in (model, reference))
    scale = microbatches if options.get("scale_grads", True) else None
    for _ in range(steps):
        model.zero_grad()
        reference.zero_grad()
        losses: list[Tensor] = []
        output = pipeline.step(*args, target=target, losses=losses, return_outputs=True, **batch.kwargs)
        parts = batch.cut(microbatches, options.get("whole", ()))
        outputs, wanted = autograd(reference, parts, loss, scale=scale, loss_scale=loss_scale)
        assert len(losses) == microbatches
        for i, (a, b) in enumerate(zip(losses, wanted, strict=True)):
            same(f"loss {i}", a, b, exact)
        leaves = (pytree.tree_leaves(value) for value in (output, joined(outputs)))
        for k, (a, b) in enumerate(zip(*leaves, strict=True)):
            if isinstance(b, Tensor) and (a.dim() or loss is not None):  # a model's own loss is joined to one
                same(f"output {k}", a, b, exact)
        same_state(model, reference, exact)
        if mine and theirs:
            mine.step()
            theirs.step()
    return pipeline


def mean_square(output: Any, target: Any = None) -> Tensor:
    """A loss for any output: the mean square of each of its real tensors, summed."""
    values = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    return sum((v.float().pow(2).mean() for v in values), torch.zeros(()))


class Calls(nn.Module):
    """A model given as a function of itself: weights a and b, two Linears, a LayerNorm."""

    def __init__(self, body: Callable[..., Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = body
        self.a = nn.Parameter(torch.randn(SIZE, SIZE, dtype=dtype) / 2)
        self.b = nn.Parameter(torch.randn(SIZE, dtype=dtype))
        self.first = nn.Linear(SIZE, SIZE, dtype=dtype)
        self.second = nn.Linear(SIZE, SIZE, dtype=dtype)
        self.third = nn.Linear(SIZE, SIZE, dtype=dtype)
        self.norm = nn.LayerNorm(SIZE, dtype=dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def batch_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(11)
    return torch.randn(6, *shape, dtype=dtype)
