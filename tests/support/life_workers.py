"""What the processes of the tests about life after compile() run, and the plain loops beside it."""

from __future__ import annotations

import copy
import itertools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbcompile
from zbcompile.errors import PipelineError, UsageError
from zbcompile.runtime.connections import leave_group
from zbcompile.runtime.torch_private import new_group
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule

MSE = nn.functional.mse_loss
NUM_MICROBATCHES = 4
FACTORS = (1.0, 1.0, 3e4, 1.0, 1.0, 1.0)
"""What the batches of scaled steps are multiplied by: one makes gradients that float16 cannot hold."""
POISONED = 4
"""The scaled step in which one gradient alone is not finite."""


class Chain(nn.Module):
    """Four layers; ``tied``: the first and the last share their weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.register_buffer("depth", torch.tensor(2))
        self.register_buffer("scale", torch.ones(8))
        torch.manual_seed(0)
        self.table = nn.Linear(8, 8)
        self.middle, self.more = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        if tied:
            self.last.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.table(x * self.depth))))
        if int(self.depth) > 1:  # type: ignore[arg-type]
            x = x * self.scale
        result: Tensor = self.last(torch.tanh(self.more(x)))
        return result


def compiled(
    model: nn.Module, num_stages: int = 2, dtype: torch.dtype = torch.float32, **options: Any
) -> zbcompile.Pipeline:
    """Compile a model for `rows`."""
    x, y = (t.to(dtype) for t in rows())
    return zbcompile.compile(
        model,
        num_stages,
        example_args=(x,),
        example_target=y,
        loss_fn=MSE,
        num_microbatches=NUM_MICROBATCHES,
        time_limit=0.3,
        **options,
    )


def serial_order(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the order of a rank per stage that runs one microbatch after the other."""
    order = [
        [
            Action(kind, stage, i)
            for i in range(num_microbatches)
            for kind in (Kind.FORWARD, Kind.FULL_BACKWARD)
        ]
        for stage in range(num_stages)
    ]
    return Schedule.of(Placement.linear(num_stages), num_microbatches, order)


def rows() -> tuple[Tensor, Tensor]:
    """Return a batch and its target."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def optimizer_per_parameter(parameters: Iterable[nn.Parameter]) -> None:
    """Let every parameter be trained in a hook of its own, which frees the gradient."""
    for parameter in parameters:
        optimizer = torch.optim.AdamW([parameter], lr=0.1)

        def hook(held: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)


def note_hooks(model: nn.Module, calls: list[str]) -> None:
    """Let every parameter's hook note its name."""
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda held, name=name: calls.append(name))


def plain_backward(model: nn.Module, loss_scale: float = 1.0) -> None:
    """Do what a step does, by autograd."""
    x, y = rows()
    for a, b in zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True):
        (MSE(model(a), b) * loss_scale).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(NUM_MICROBATCHES)


def plain_steps(model: nn.Module, steps: int) -> None:
    """Train without a pipeline."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        plain_backward(model)
        optimizer.step()


def main_parameter_steps(pipeline: zbcompile.Pipeline, steps: int) -> None:
    """Train in float32 what runs in bfloat16, as docs/reference/runtime.md says."""
    x, y = (t.to(torch.bfloat16) for t in rows())
    own = dict(pipeline.named_parameters())
    main = {name: p.detach().float().requires_grad_() for name, p in own.items()}
    optimizer = torch.optim.AdamW(main.values(), lr=0.1)
    for _ in range(steps):
        pipeline.step(x, target=y)
        pipeline.clip_grad_norm_(0.5)
        for name, parameter in own.items():
            main[name].grad, parameter.grad = parameter.grad, None
        optimizer.step()
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(main[name])


def poison(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Make one gradient infinite, on the rank that has it."""
    for name, parameter in named:
        if name == "more.bias" and parameter.grad is not None:
            parameter.grad[0] = float("inf")


def scaled_steps(pipeline: zbcompile.Pipeline) -> list[float]:
    """Train with a gradient scaler; return its scale after every step."""
    x, y = rows()
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
    scaler, scales = pipeline.scaler(init_scale=2.0**14, growth_interval=2), []
    for number, factor in enumerate(FACTORS):
        optimizer.zero_grad()
        pipeline.step(x * factor, target=y)
        if number == POISONED:
            poison(pipeline.named_parameters())
        scaler.unscale_(optimizer)
        pipeline.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(pipeline.loss_scale)
    return scales


def freed(rank: int, file: str) -> dict[str, Any]:
    """Compile with ``free_model``, train in hooks, evaluate, merge, and use what is gone."""
    model = Chain(tied=True)
    kept = {name: (weakref.ref(p), id(p)) for name, p in model.named_parameters()}
    calls: list[str] = []
    note_hooks(model, calls)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pipeline = compiled(model, 4, free_model=True)
    optimizer_per_parameter(pipeline.parameters())
    own = dict(pipeline.named_parameters())
    assert {name for name, (ref, _) in kept.items() if ref() is not None} == own.keys()
    assert all(id(p) == kept[name][1] for name, p in own.items())
    x, y = rows()
    before = pipeline.eval(x)
    for count in (8, 8, 7):  # the last microbatch of 7 rows has a shape of its own
        pipeline.step(x[:count], target=y[:count])
    assert sorted(calls) == sorted(3 * list(own))
    uses: dict[str, Callable[[], object]] = {
        "state_dict": model.state_dict,
        "forward": lambda: model(x),
        "optimizer": lambda: torch.optim.AdamW(model.parameters()),
        "deepcopy": lambda: copy.deepcopy(model),
        "vector": lambda: nn.utils.parameters_to_vector(model.parameters()),
    }
    for use in uses.values():
        with pytest.raises(UsageError, match=r"another rank.*\((table|middle|more|last|scale)"):
            use()
    pipeline.save_merged(file)
    result = {
        "state": {name: tensor.clone() for name, tensor in pipeline.state_dict().items()},
        "before": before,
        "after": pipeline.eval(x[:4]),
        "told": [str(w.message) for w in told if "free_model" in str(w.message)],
    }
    pipeline.close()
    return result


def replanned(rank: int) -> dict[str, Any]:
    """Train in a poor order, plan again between two steps, and go on with the same optimizer."""
    model, (x, y) = Chain(), rows()
    pipeline = compiled(model, 4, schedule=serial_order(4, NUM_MICROBATCHES))
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
    own = {name: id(p) for name, p in pipeline.named_parameters()}

    def step() -> None:
        optimizer.zero_grad()
        pipeline.step(x, target=y)
        optimizer.step()

    step()
    evaluated = pipeline.eval(x)
    source = pipeline.source(rank)
    with pytest.raises(PipelineError, match=r"ranks differ in their arguments of replan\(\)"):
        pipeline.replan(threshold=0.1 * rank)
    step()
    kept = pipeline.replan(threshold=0.99, time_limit=0.3)
    assert not kept.changed
    assert pipeline.source(rank) == source
    step()
    taken = pipeline.replan(time_limit=0.3)
    assert taken.changed, taken
    assert pipeline.source(rank) != source
    step()
    assert {name: id(p) for name, p in pipeline.named_parameters()} == own
    again = pipeline.eval(x)
    result = {
        "state": {name: tensor.clone() for name, tensor in pipeline.state_dict().items()},
        "evaluated": (evaluated, again),
        "taken": str(taken),
        "links": pipeline.profile.links,
    }
    pipeline.close()
    return result


def mixed(rank: int) -> dict[str, Any]:
    """Train bfloat16 parameters by float32 gradients, and under float16 with one scaler."""
    x, y = (t.to(torch.bfloat16) for t in rows())
    result: dict[str, Any] = {}
    for name, tied in (("half", False), ("tied", True)):
        pipeline = compiled(
            Chain(tied).to(torch.bfloat16), 4, dtype=torch.bfloat16, gradient_dtype=torch.float32
        )
        if tied:
            pipeline.step(x, target=y)
            result[name] = {name: p.grad for name, p in pipeline.named_parameters()}
        else:
            main_parameter_steps(pipeline, 3)
            result[name] = {name: p.detach() for name, p in pipeline.named_parameters()}
        pipeline.close()
    with torch.autocast("cpu", torch.float16):
        pipeline = compiled(Chain(), 4)
        result["scales"] = scaled_steps(pipeline)
        result["scaled"] = {name: p.detach() for name, p in pipeline.named_parameters()}
        pipeline.loss_scale = 1.0 + rank
        with pytest.raises(UsageError, match=r"(?s)different norms.*loss_scale.*loss_scale.*scaler\(\)"):
            pipeline.clip_grad_norm_(1.0)
    pipeline.close()
    return result


def groups_left_at_once(rank: int, count: int) -> int:
    """Make groups and leave each as soon as this rank's call has returned; return how many were made."""
    for k in range(count):
        leave_group(new_group(f"left {k}", [0, 1, 2, 3], timedelta(seconds=5), "gloo"))
    return count


def lost_in_new_group(rank: int, last: int) -> str:
    """Compile while rank 3 ends once it is connected in its group number ``last``; return the refusal."""
    waits, made = dist.barrier, itertools.count(1)

    def wait(*args: Any, **kwargs: Any) -> Any:
        if rank == 3 and next(made) == last:
            os._exit(7)
        return waits(*args, **kwargs)

    dist.barrier = wait
    with pytest.raises(PipelineError) as caught:
        compiled(Chain(), 4, stall_limit=20.0)
    return str(caught.value)
