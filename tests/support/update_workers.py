"""Training by `Pipeline.optimizer_step`, and the plain loop beside it: what the tests of it run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import zbcompile
from tests.support.life_workers import MSE, NUM_MICROBATCHES, Chain, compiled, poison, rows
from zbcompile.compiler.update import Update
from zbcompile.errors import ZBCompileError
from zbcompile.passes.split.stage_graphs import StageGraphs

FACTORS = (1.0, 1.0, 6.0, 1.0, 3.0, 1.0, 1.0)
"""What the targets are multiplied by: gradients of the large ones are clipped."""
POISONED = 3
"""The step in which one gradient is not finite."""
MAX_NORM = 1.1
RATE = 0.05

State = dict[str, Tensor]
Named = Iterable[tuple[str, nn.Parameter]]


def groups(named: Named) -> list[Optimizer]:
    """Return AdamW with the matrices in a group of their own."""
    own = [p for _, p in named]
    matrices = {"params": [p for p in own if p.ndim > 1], "lr": RATE / 2}
    return [torch.optim.AdamW([matrices, {"params": [p for p in own if p.ndim < 2]}], lr=RATE, foreach=True)]


def one_each(named: Named) -> list[Optimizer]:
    """Return an optimizer for every parameter, each of another kind."""
    optim = torch.optim
    makers: dict[str, Callable[[list[Tensor]], Optimizer]] = {
        "table.weight": lambda own: optim.SGD(own, RATE, momentum=0.9, nesterov=True, foreach=True),
        "table.bias": lambda own: optim.Adam(own, RATE, amsgrad=True),
        "middle.weight": lambda own: optim.Muon(own, RATE),
        "middle.bias": lambda own: optim.NAdam(own, RATE),
        "more.weight": lambda own: optim.Adafactor(own, RATE),
        "more.bias": lambda own: optim.Rprop(own, RATE),
        "last.weight": lambda own: optim.AdamW(own, RATE, fused=True),
        "last.bias": lambda own: optim.ASGD(own, RATE, t0=2),
    }
    return [makers[name]([parameter]) for name, parameter in named]


def one_each_of_others(named: Named) -> list[Optimizer]:
    """Do the same with further kinds."""
    optim = torch.optim
    makers: dict[str, Callable[[list[Tensor]], Optimizer]] = {
        "table.weight": lambda own: optim.RAdam(own, RATE),
        "table.bias": lambda own: optim.Adamax(own, RATE),
        "middle.weight": lambda own: optim.Adadelta(own, RATE),
        "middle.bias": lambda own: optim.Adagrad(own, RATE),
        "more.weight": lambda own: optim.RMSprop(own, RATE, centered=True, momentum=0.9),
        "more.bias": lambda own: optim.SGD(own, RATE, momentum=0.9, dampening=0.1),
        "last.weight": lambda own: optim.SGD(own, RATE, fused=True),
        "last.bias": lambda own: optim.Adam(own, RATE, weight_decay=0.1),
    }
    return [makers[name]([parameter]) for name, parameter in named]


Make = Callable[[Named], list[Optimizer]]
MAKERS: dict[str, Make] = {make.__name__: make for make in (groups, one_each, one_each_of_others)}


def plain(make: Make) -> tuple[State, list[float]]:
    """Train without a pipeline; return the weights and the norms."""
    model, (x, y) = Chain(), rows()
    optimizers = make(model.named_parameters())
    rates, norms = [ExponentialLR(o, 0.9) for o in optimizers], []
    for number, factor in enumerate(FACTORS):
        for a, b in zip(x.chunk(NUM_MICROBATCHES), (y * factor).chunk(NUM_MICROBATCHES), strict=True):
            MSE(model(a), b).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(NUM_MICROBATCHES)
        if number == POISONED:
            poison(model.named_parameters())
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        norms.append(float(norm))
        if bool(norm.isfinite()):
            nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)
            for optimizer in optimizers:
                optimizer.step()
        for rate in rates:
            rate.step()
        model.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, norms


def piped(pipeline: zbcompile.Pipeline, make: Make) -> tuple[State, list[Update]]:
    """Do the same on a pipeline; return this process's weights and what came of the updates."""
    x, y = rows()
    optimizers = make(pipeline.named_parameters())
    rates, updates = [ExponentialLR(o, 0.9) for o in optimizers], []
    for number, factor in enumerate(FACTORS):
        pipeline.step(x, target=y * factor)
        if number == POISONED:
            poison(pipeline.named_parameters())
        updates.append(pipeline.optimizer_step(optimizers, MAX_NORM))
        for rate in rates:
            rate.step()
    return {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}, updates


def train_all(rank: int) -> dict[str, Any]:
    """Train with every optimizer, without a barrier, each from the same weights; also with one."""
    found: dict[str, Any] = {}
    for tied in (False, True):
        model = Chain(tied)
        pipeline = compiled(model, 4, post_validation=True)
        first = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
        for name in ("groups",) if tied else MAKERS:
            pipeline.load_state_dict(first)
            state, updates = piped(pipeline, MAKERS[name])
            decided = [(float(u.norm), u.clipped, u.skipped) for u in updates]
            found[f"{name} tied" if tied else name] = state, decided
        pipeline.close()
    with compiled(Chain(), 4) as pipeline:
        state, updates = piped(pipeline, MAKERS["groups"])
        found["barrier"] = state, [(float(u.norm), u.clipped, u.skipped) for u in updates]
    return found


class Noisy(nn.Module):
    """Four layers with running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        parts: list[nn.Module] = []
        for _ in range(4):
            parts += [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2)]
        self.layers = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def lived(pipeline: zbcompile.Pipeline) -> dict[str, Any]:
    """Train with much between the steps; return what was seen on this process."""
    x, y = rows()
    seen: dict[str, Any] = {"losses": [], "norms": []}
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=RATE)

    def note(name: str) -> None:
        seen[name] = {key: tensor.clone() for key, tensor in pipeline.state_dict().items()}

    for number, factor in enumerate((1.0, 6.0, 6.0, 6.0, 6.0, 6.0, 1.0)):
        count = 6 if number in (3, 4) else 8  # a microbatch less: an order of its own
        for _ in range(1 + (number == 2)):  # two steps to one of the optimizer
            pipeline.step(x[:count], target=y[:count] * factor, losses=seen["losses"])
        update = pipeline.optimizer_step(optimizer, 0.5)
        if number == 1:
            note("read by this process alone")
        if number == 2:
            seen["evaluated"] = pipeline.eval(x)
        if number == 4:
            pipeline.optimizer_step(optimizer, 0.5)  # there is no gradient
        if number == 5:
            pipeline.synchronize()
            seen["norms"].append(float(update.norm))
    optimizer.zero_grad()
    pipeline.step(x, target=y)
    update = pipeline.optimizer_step(optimizer, 100.0)
    seen["norms"].append(float(update.wait().norm))
    seen["moments"] = {
        name: value.clone()
        for name, value in pipeline.optimizer_state_dict(optimizer).items()
        if isinstance(value, Tensor)
    }
    note("at last")
    return seen


def live(rank: int, folder: str) -> dict[str, Any]:
    """Live on four ranks without a barrier, also with one that trains nothing; see what may go wrong."""
    with compiled(Noisy(), 4, post_validation=True) as pipeline:
        seen = lived(pipeline)
    with half_frozen_chain(post_validation=True) as pipeline:
        seen["half frozen"] = half_frozen(pipeline)
    with half_frozen_chain() as pipeline:
        seen["scaled"] = half_frozen_scaled(pipeline)
    return {**seen, **differ(rank), "again": meet_nobody(rank, folder)}


def half_frozen(pipeline: zbcompile.Pipeline) -> State:
    """Train a chain whose second layer is frozen; its rank has no optimizer."""
    x, y = rows()
    own = [p for p in pipeline.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(own, lr=RATE) if own else None
    for factor in (1.0, 6.0, 1.0):
        pipeline.step(x, target=y * factor)
        pipeline.optimizer_step(optimizer, 1.0)
    return {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}


def half_frozen_scaled(pipeline: zbcompile.Pipeline) -> dict[str, Any]:
    """Do the same with a gradient scaler, one step of which is left out."""
    x, y = rows()
    own = [p for p in pipeline.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(own, lr=RATE) if own else None
    scaler, scales = pipeline.scaler(init_scale=8.0, growth_interval=2), []
    for factor in (1.0, float("inf"), 1.0, 1.0):
        pipeline.zero_grad()
        pipeline.step(x, target=y * factor)
        if factor == 1.0:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {**{name: tensor.clone() for name, tensor in pipeline.state_dict().items()}, "scales": scales}


def half_frozen_chain(**options: Any) -> zbcompile.Pipeline:
    """Compile a chain whose second layer is frozen."""
    model = Chain()
    model.middle.requires_grad_(False)
    return compiled(model, 4, **options)


def meet_nobody(rank: int, folder: str) -> bool:
    """Let the last rank come to `optimizer_step` only when the first has begun the next step.

    Returns whether that forward was run again.
    """
    pipeline = compiled(Chain(), 4, post_validation=True, stall_limit=60.0)
    optimizer, (x, y) = torch.optim.SGD(pipeline.parameters(), lr=RATE), rows()
    begun = Path(folder) / "begun"
    runs = 0
    real = StageGraphs.run_forward

    def run_forward(self: StageGraphs, state: Any, inputs: Any) -> Any:
        nonlocal runs
        runs += 1
        if rank == 0:
            begun.touch()
        return real(self, state, inputs)

    pipeline.step(x, target=y * 3.0)
    with mock.patch.object(StageGraphs, "run_forward", run_forward):
        while rank == 3 and not begun.exists():
            time.sleep(0.01)
        pipeline.optimizer_step(optimizer, 1.1)
        pipeline.step(x, target=y)
    pipeline.close()
    return runs > NUM_MICROBATCHES


def differ(rank: int) -> dict[str, Any]:
    """Ask for different things, change weights on the way, meet a gradient that is not finite."""
    seen: dict[str, Any] = {}
    x, y = rows()

    def attempt(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except ZBCompileError as error:
            seen[name] = type(error).__name__, str(error)

    with compiled(Chain(), 4, post_validation=True) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=RATE)
        before = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
        pipeline.step(x, target=y)
        pipeline.optimizer_step(optimizer, 1.0 + (rank == 2))
        attempt("max_norm", lambda: pipeline.step(x, target=y))
        pipeline.step(x, target=y)
        poison(pipeline.named_parameters())
        pipeline.optimizer_step(optimizer, 1.0, error_if_nonfinite=True)
        attempt("not finite", lambda: pipeline.step(x, target=y))
        state = pipeline.state_dict()
        seen["kept"] = all(torch.equal(tensor, before[name]) for name, tensor in state.items())
        pipeline.step(x, target=y)
        update = pipeline.optimizer_step(optimizer, 1.0)
        if rank == 1:
            with torch.no_grad():
                next(iter(pipeline.local_stages[0].parameters())).add_(0.0)  # it is validated by then
        pipeline.step(x, target=y)
        assert update.known
        parameter = next(pipeline.parameters())
        pipeline.optimizer_step(optimizer, 1.0)
        if rank == 1:
            with torch.no_grad():
                parameter.add_(0.0)
        attempt("changed", lambda: pipeline.step(x, target=y))
        attempt("changed again", lambda: pipeline.step(x, target=y))
    return seen


def die(rank: int, when: str) -> list[str]:
    """Lose rank 2 before or after its part of an update; return what the others are told."""
    pipeline = compiled(Chain(), 4, post_validation=True, stall_limit=60.0)
    optimizer, (x, y) = torch.optim.SGD(pipeline.parameters(), lr=RATE), rows()
    pipeline.step(x, target=y)
    pipeline.synchronize()
    if rank == 2 and when == "before":
        os._exit(3)
    update = pipeline.optimizer_step(optimizer, 1.0)
    if rank == 2:
        os._exit(3)
    told = []
    for call in (lambda: pipeline.step(x, target=y), update.wait, pipeline.state_dict):
        try:
            call()
        except ZBCompileError as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append("")
    return told
