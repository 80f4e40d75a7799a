"""Stages written by hand, without capture: y = tanh(x w), a skip from first to last, a tied weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.runtime_helpers import random_placement
from tests.support.strategies import greedy_order
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import Placement, Schedule
from zbcompile.schedule.problem import Problem

WIDTH, ROWS = 5, 2


@dataclass(frozen=True)
class HandPort:
    """One tensor of a hand-made stage; the fields are those of the runtime's `PortLike`."""

    name: str
    source: tuple[str, int]
    targets: tuple[int, ...] = ()
    has_gradient: bool = True
    shape: tuple[int, ...] = (ROWS, WIDTH)
    stride: tuple[int, ...] = (WIDTH, 1)
    grad_stride: tuple[int, ...] = ()
    is_result: bool = False
    is_loss: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


class HandStage:
    """Stage ``index`` of ``count``. The last one returns the loss sum((y + y of stage 0) * target)."""

    def __init__(self, index: int, count: int, tied: bool = False, skip: bool = True) -> None:
        self.index, self.last = index, index == count - 1
        skip = skip and count > 2
        self.skips = self.last and skip
        self.weight = "w0" if tied and self.last else f"w{index}"
        self.trainable = self.parameters = (self.weight,)
        self.buffers: tuple[str, ...] = ()
        before = (
            HandPort("x", ("batch", 0), has_gradient=False)
            if index == 0
            else HandPort(f"y{index - 1}", ("stage", index - 1))
        )
        extra = (HandPort("y0", ("stage", 0)), HandPort("target", ("batch", 1), has_gradient=False))
        self.inputs = (before, *(extra if self.skips else extra[1:])) if self.last else (before,)
        if self.last:
            self.outputs = (
                HandPort("loss", ("stage", index), (), True, (), (), is_result=True, is_loss=True),
            )
        else:
            targets = sorted({index + 1, *([count - 1] if index == 0 and skip else [])})
            self.outputs = (HandPort(f"y{index}", ("stage", index), tuple(targets)),)

    def run_forward(
        self, state: Mapping[str, Tensor], inputs: list[Tensor]
    ) -> tuple[list[Tensor], list[Any]]:
        w = state[self.weight]
        y = torch.tanh(inputs[0] @ w)
        if not self.last:
            return [y], [inputs[0], w, y, None]
        whole = y + inputs[1] if self.skips else y
        return [(whole * inputs[-1]).sum()], [inputs[0], w, y, inputs[-1]]

    def run_backward_input(
        self, saved: list[Any], output_grads: list[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Any]]:
        x, w, y, target = saved
        (grad,) = output_grads
        assert grad is not None
        if target is not None:
            grad = grad * target
        inner = grad * (1 - y * y)
        grads: list[Tensor | None] = [None if self.index == 0 else inner @ w.t()]
        if self.skips:
            grads.append(grad.clone())
        if self.last:
            grads.append(None)
        return grads, [x, inner]

    def run_backward_weight(self, saved: list[Any]) -> dict[str, Tensor]:
        x, inner = saved
        return {self.weight: x.t() @ inner}

    def run_full_backward(
        self, saved: list[Any], output_grads: list[Tensor | None]
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        grads, rest = self.run_backward_input(saved, output_grads)
        return grads, self.run_backward_weight(rest)


def hand_stages(count: int, tied: bool = False, skip: bool = True) -> tuple[HandStage, ...]:
    return tuple(HandStage(k, count, tied and count > 1, skip) for k in range(count))


def hand_state(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {f"w{k}": nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 2) for k in range(count)}


def hand_batch(num_microbatches: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2)] for _ in range(num_microbatches)
    ]


def hand_reference(
    count: int, num_microbatches: int, tied: bool = False, skip: bool = True
) -> dict[str, Tensor]:
    """Return gradients added as they come, one microbatch after the other through all stages and back."""
    state, stages = hand_state(count), hand_stages(count, tied, skip)
    sums: dict[str, Tensor] = {}
    with torch.no_grad():
        for x, target in hand_batch(num_microbatches):
            values, kept = {"x": x, "target": target}, []
            for stage in stages:
                outputs, saved = stage.run_forward(state, [values[p.name] for p in stage.inputs])
                values[stage.outputs[0].name] = outputs[0]
                kept.append(saved)
            grads = {"loss": torch.ones(())}
            for stage in reversed(stages):
                found, weights = stage.run_full_backward(kept.pop(), [grads[stage.outputs[0].name]])
                for port, grad in zip(stage.inputs, found, strict=True):
                    if grad is not None:
                        grads[port.name] = grads[port.name] + grad if port.name in grads else grad
                for name, grad in weights.items():
                    sums[name] = sums[name] + grad if name in sums else grad
    return sums


def hand_autograd(
    count: int, num_microbatches: int, tied: bool = False, skip: bool = True
) -> dict[str, Tensor]:
    """Return the same by autograd: equal up to rounding, which is the stages' own."""
    state, skip = hand_state(count), skip and count > 2
    for x, target in hand_batch(num_microbatches):
        first = y = x
        for stage in hand_stages(count, tied):
            y = torch.tanh(y @ state[stage.weight])
            first = y if stage.index == 0 else first
        ((y + first if skip else y) * target).sum().backward()
    return {n: p.grad for n, p in state.items() if p.grad is not None}


def hand_problem(placement: Placement, count: int, num_microbatches: int, skip: bool = True) -> Problem:
    edges = [Edge(s, s + 1, 40, 40) for s in range(count - 1)]
    if count > 2 and skip:
        edges.append(Edge(0, count - 1, 40, 40))
    profile = Profile((StageCost.simple(1000, 1100, 800),) * count, tuple(edges), Link(60))
    return Problem.of(profile, placement, num_microbatches)


def hand_case(seed: int, max_ranks: int = 6) -> tuple[Problem, Schedule]:
    """Return a random legal order of up to 8 microbatches on any placement, and its problem.

    Up to 12 stages on 2 to ``max_ranks`` ranks.
    """
    random = Random(seed)
    placement = random_placement(random, max_ranks, tuple(range(2, 13)))
    while placement.num_ranks < 2:
        placement = random_placement(random, max_ranks, tuple(range(2, 13)))
    problem = hand_problem(placement, placement.num_stages, random.randint(1, 8))
    return problem, greedy_order(problem, random, fuse=random.choice((0.0, 0.3, 1.0)))
