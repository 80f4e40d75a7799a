"""Calls, state and orders that broke pipelines of other users (data/public-failures.md), in one process.

The test ids carry the number of the report.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.pipeline_oracle import (
    SIZE,
    Batch,
    Calls,
    assert_right,
    autograd,
    batch_of,
    compiled,
    in_order,
    mean_square,
    same_state,
)
from tests.support.planner_cases import brute_force
from zbcompile.errors import CheckError, ShapeError, UsageError
from zbcompile.passes.split.stage_graphs import StageGraphs
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Kind, Schedule
from zbcompile.schedule.problem import Problem


def two_layers(m: Calls, x: Tensor) -> Tensor:
    return m.second(torch.relu(m.first(x)))


def three_layers(m: Calls, x: Tensor) -> Tensor:
    return m.third(torch.relu(m.second(torch.relu(m.first(x)))))


# Submodules that are compiled already.


def compiled_submodule() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(SIZE, SIZE), nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU()), nn.Linear(SIZE, SIZE)
    )
    model[1] = torch.compile(model[1], backend="eager")
    return model


def compiled_in_place() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(SIZE, SIZE), nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU()), nn.Linear(SIZE, SIZE)
    )
    model[1].compile(backend="eager")
    return model


def compiled_whole() -> nn.Module:
    return torch.compile(Calls(two_layers), backend="eager")  # type: ignore[return-value]


@torch.compile(backend="eager", fullgraph=True)
def compiled_helper(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def compiled_function() -> nn.Module:
    return Calls(lambda m, x: m.second(compiled_helper(m.first(x))))


@pytest.mark.parametrize(
    "build",
    [compiled_submodule, compiled_in_place, compiled_whole, compiled_function],
    ids=lambda f: f"pytorch#161904-{f.__name__}",
)
def test_torch_compile_inside(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = build()
    names = [name for name, _ in model.named_parameters()]
    assert_right(model, batch_of(SIZE), loss=mean_square)
    assert [name for name, _ in model.named_parameters()] == names


# Objects as arguments.


@dataclasses.dataclass
class Mask:
    keep: Tensor
    scale: float = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedMask:
    keep: Tensor
    scale: float = 2.0


class NamedMask(NamedTuple):
    keep: Tensor
    scale: float = 2.0


class PlainMask:
    def __init__(self, keep: Tensor) -> None:
        self.keep, self.scale = keep, 2.0


class SlotsMask:
    __slots__ = ("keep", "scale")

    def __init__(self, keep: Tensor) -> None:
        self.keep, self.scale = keep, 2.0


class Outer:
    def __init__(self, keep: Tensor) -> None:
        self.masks = {"inner": [Mask(keep)]}

    @property
    def keep(self) -> Tensor:
        return self.masks["inner"][0].keep

    scale = 2.0


@pytest.mark.parametrize(
    "kind",
    [Mask, SlottedMask, NamedMask, PlainMask, SlotsMask, Outer],
    ids=lambda k: f"torchtitan#3584-{k.__name__}",
)
def test_objects_that_hold_tensors(kind: Any) -> None:
    """Cut along the batch like any tensor, and the object of each step is used, not the example's."""
    model = Calls(lambda m, x, mask=None: m.second(m.first(x) * mask.keep * mask.scale))
    reference = copy.deepcopy(model)
    x = batch_of(SIZE)
    masks = [torch.rand(6, SIZE) > 0.5 for _ in range(2)]
    pipeline = compiled(model, Batch((x,), {"mask": kind(masks[0])}), 2, 3, loss_fn=mean_square)
    for keep in masks:
        pipeline.step(x, mask=kind(keep))
        parts = [Batch((a,), {"mask": kind(b)}) for a, b in zip(x.chunk(3), keep.chunk(3), strict=True)]
        autograd(reference, parts, mean_square, scale=3)
        same_state(model, reference)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("relu", "tanh"),
        (2.0, 3.0),
        (True, False),
        (None, "relu"),
        ((1, 2), (1, 3)),
        (Mask(torch.ones(6, 1)), None),
    ],
    ids=lambda v: f"torchtitan#3584-{type(v).__name__}",
)
def test_a_constant_that_changes_is_refused(first: Any, second: Any) -> None:
    """What is no tensor is part of the compiled model: another value is an error that names it."""

    def body(m: Calls, x: Tensor, how: Any = None) -> Tensor:
        y = m.first(x)
        if isinstance(how, float):
            y = y * how
        return m.second(y.tanh() if how == "tanh" else y.relu())

    model, x = Calls(body), batch_of(SIZE)
    pipeline = compiled(model, Batch((x,), {"how": first}), 2, 2, loss_fn=mean_square)
    pipeline.step(x, how=first)
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with pytest.raises(UsageError, match="how"):
        pipeline.step(x, how=second)
    assert all(torch.equal(model.get_parameter(n).grad, g) for n, g in before.items())


# Numbers of microbatches and sizes.


@pytest.mark.parametrize("microbatches", [1, 2, 6], ids=lambda m: f"torchtitan#775-{m}")
def test_fewer_microbatches_than_ranks(microbatches: int) -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(SIZE, SIZE), nn.Tanh())))
    assert_right(model, batch_of(SIZE), stages=4, microbatches=microbatches, loss=mean_square)
    assert_right(model, batch_of(SIZE), stages=4, microbatches=microbatches, loss=mean_square, search=True)


@pytest.mark.parametrize(
    ("size", "microbatches"), [(8, 3), (2, 4), (7, 2)], ids=lambda n: f"pytorch#126600-{n}"
)
def test_a_batch_that_cannot_be_cut_is_a_value_error(size: int, microbatches: int) -> None:
    model, x = Calls(two_layers), torch.randn(size, SIZE)
    with pytest.raises(ValueError, match=f"{size}.*{microbatches}"):
        zbcompile.compile(model, 2, example_args=(x,), loss_fn=mean_square, num_microbatches=microbatches)
    pipeline = zbcompile.compile(model, 2, loss_fn=mean_square, num_microbatches=microbatches)
    with pytest.raises(ValueError, match=f"{size}.*{microbatches}"):
        pipeline.step(x)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x[..., :3],
        lambda x: x[0],
    ],
    ids=[f"torchtitan#431-{n}" for n in ("dtype", "features", "dimensions")],
)
def test_another_shape_is_refused_and_the_pipeline_lives_on(change: Callable[[Tensor], Tensor]) -> None:
    model, x = Calls(two_layers), batch_of(16, SIZE)
    reference = copy.deepcopy(model)
    pipeline = compiled(model, Batch((x,)), 2, 3, loss_fn=mean_square)
    with pytest.raises((ShapeError, UsageError), match=r"args\[0\]"):
        pipeline.step(change(x))
    assert all(p.grad is None for p in model.parameters())
    pipeline.step(x)
    autograd(reference, Batch((x,)).cut(3), mean_square, scale=3)
    same_state(model, reference)


def test_torchtitan_431_calls_of_another_form() -> None:
    model, x = Calls(lambda m, x, y=None: m.second(m.first(x) + (0 if y is None else y))), batch_of(SIZE)
    pipeline = compiled(model, Batch((x,), {"y": x}), 2, 3, loss_fn=mean_square)
    for args, kwargs in (
        ((), {"x": x, "y": x}),
        ((x,), {}),
        ((x, x), {}),
        ((x,), {"y": x, "z": x}),
        ((x,), {"y": [x]}),
    ):
        with pytest.raises((ShapeError, UsageError)):
            pipeline.step(*args, **kwargs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.first.eval(), "first"),
        (lambda m: m.eval(), "mode"),
        (lambda m: m.double(), "float64"),
        (lambda m: setattr(m.second, "weight", nn.Parameter(torch.randn(3, SIZE))), "second.weight"),
        (lambda m: setattr(m.third, "weight", nn.Parameter(m.first.weight.detach().clone())), "third.weight"),
        (lambda m: m.norm.requires_grad_(True), "norm"),
    ],
    ids=[
        f"torchtitan#545-{n}" for n in ("module-mode", "model-mode", "dtype", "shape", "untied", "unfrozen")
    ],
)
def test_a_model_changed_after_compiling_is_refused(change: Callable[[Calls], Any], words: str) -> None:
    model = Calls(lambda m, x: m.norm(m.third(torch.relu(m.second(m.first(x))))))
    model.third.weight = model.first.weight
    model.norm.requires_grad_(False)
    x = batch_of(SIZE)
    pipeline = compiled(model, Batch((x,)), 2, 3, loss_fn=mean_square)
    change(model)
    with pytest.raises((ShapeError, UsageError), match=words):
        pipeline.step(x)


def test_torchtitan_545_frozen_after_compiling() -> None:
    model, x = Calls(two_layers), batch_of(SIZE)
    pipeline = assert_right(model, x, loss=mean_square)
    model.zero_grad()
    model.first.requires_grad_(False)
    reference = copy.deepcopy(model)
    pipeline.step(x)
    autograd(reference, Batch((x,)).cut(3), mean_square, scale=3)
    same_state(model, reference)


# Buffers and random state.


class Counting(nn.Module):
    """BatchNorm, a step counter, a running mean of its own and a buffer that is only read."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.norm, self.drop = nn.BatchNorm1d(SIZE), nn.Dropout(dropout)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(SIZE))
        self.register_buffer("shift", torch.arange(SIZE) / 10)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = self.drop(self.norm(self.first(x)))
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.second(torch.relu(x)) - self.average + self.shift


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_pytorch_PR188763_buffers_change_once_per_microbatch(stages: int) -> None:
    model = Counting()
    order = in_order(stages, 3)
    assert_right(model, batch_of(SIZE), stages=stages, loss=mean_square, steps=2, schedule=order)
    assert int(model.steps) == int(model.norm.num_batches_tracked) == 6


def test_pytorch_PR188763_an_order_that_changes_buffers_out_of_turn_is_refused() -> None:
    schedule = Schedule.parse("placement 0\nmicrobatches 2\nrank 0: 0F1 0F0 0BW0 0BW1")
    with pytest.raises(CheckError, match="steps|average|norm"):
        compiled(Counting(), Batch((batch_of(SIZE),)), 1, 2, loss_fn=mean_square, schedule=schedule)
    compiled(Calls(two_layers), Batch((batch_of(SIZE),)), 1, 2, loss_fn=mean_square, schedule=schedule)


@pytest.mark.parametrize("lazy", [False, True], ids=["pytorch-PR#188763-eager", "pytorch-PR#188763-lazy"])
def test_compiling_touches_no_buffer_and_no_random_state(lazy: bool) -> None:
    model, x = Counting(dropout=0.5), batch_of(SIZE)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(123)
    state = torch.get_rng_state()
    pipeline = zbcompile.compile(
        model,
        2,
        example_args=None if lazy else (x,),
        loss_fn=mean_square,
        num_microbatches=3,
        schedule=in_order(2, 3),
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    pipeline.step(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert int(model.steps) == int(model.norm.num_batches_tracked) == 3


# Memory.


@pytest.mark.parametrize("order", ["1f1b", "random"], ids=lambda o: f"pytorch#128910-{o}")
def test_outputs_live_no_longer_than_the_order_says(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 microbatches: stage outputs alive at any time, against those between F and their last use."""
    stages, count = 3, 16
    model, x = Calls(three_layers), torch.randn(count, SIZE)
    options: Any = {"schedule": in_order(stages, count)} if order == "1f1b" else {"seed": 5}
    pipeline = compiled(
        model, Batch((x,)), stages, count, loss_fn=mean_square, split_points=["second", "third"], **options
    )
    alive: dict[int, list[Any]] = {s: [] for s in range(stages)}
    most = dict.fromkeys(range(stages), 0)
    run = StageGraphs.run_forward

    def watched(self: StageGraphs, state: Any, inputs: Any) -> Any:
        outputs, saved = run(self, state, inputs)
        refs = alive[self.index]
        refs += [weakref.ref(t) for t in outputs[:1]]
        most[self.index] = max(most[self.index], sum(ref() is not None for ref in refs))
        return outputs, saved

    monkeypatch.setattr(StageGraphs, "run_forward", watched)
    assert pipeline.step(x) is None
    assert not any(ref() is not None for refs in alive.values() for ref in refs)
    peaks = _peaks(_executed(pipeline))
    for stage in range(stages - 1):
        assert len(alive[stage]) == count
        assert 0 < most[stage] <= peaks[stage]
    if order == "1f1b":
        assert max(most.values()) < count // 2


def _executed(pipeline: zbcompile.Pipeline) -> list[Any]:
    """The compute actions of the last step in the order in which they ran."""
    rows = itertools.chain.from_iterable(pipeline._ready().runner.actions())
    return [action for action, _, _ in sorted(rows, key=lambda row: row[1]) if action.kind.is_compute]


def _peaks(actions: list[Any]) -> dict[int, int]:
    """Per stage: most outputs at a time between F and the last use, here in B or in W of the next stage."""
    held: dict[int, dict[int, set[str]]] = {}
    peak: dict[int, int] = {}
    for action in actions:
        stage, i = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            held.setdefault(stage, {})[i] = {"own B", "next W"}
            peak[stage] = max(peak.get(stage, 0), len(held[stage]))
        if action.kind in (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD):
            held[stage][i].discard("own B")
        if action.kind in (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD) and stage:
            held[stage - 1][i].discard("next W")
        for outputs in held.values():
            for done in [i for i, uses in outputs.items() if not uses]:
                del outputs[done]
    return peak


# Orders.


def test_zero_bubble_9_three_layers_over_two_stages() -> None:
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    for search in (False, True):
        pipeline = assert_right(model, batch_of(SIZE), loss=mean_square, search=search)
        assert sum(len(list(stage.parameters())) for stage in pipeline) == 6


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ("0F0 0F1 0W0 0B0 0BW1", "1F0 1BW0 1F1 1BW1", "0W0"),
        ("0F0 0F1 0BW0 0BW1", "1F0 1F1 1B1 1W0 1B0 1W1", "1W0"),
        ("0F0 0F1 0BW0 0BW1", "1F0 1B0 1W0 1F1 1W1", "1B1"),
        ("0F0 0F1 0BW0 0BW1", "1F0 1B0 1W0 1F1 1BW1 1W1", "1W1|1BW1"),
        ("0F0 0F1 0BW0 0BW1", "1BW0 1F0 1F1 1BW1", "1BW0|1F0"),
        ("0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F1 1BW1 2F0", "2F0"),
        ("0F0 0BW0 0F1 0BW1", "1F1 1BW1 1F0 1BW0", "."),
    ],
    ids=[
        f"zero-bubble#72-{n}"
        for n in ("W-before-B", "W-of-another", "no-B", "W-twice", "B-before-F", "foreign-stage", "deadlock")
    ],
)
def test_a_broken_order_is_refused_naming_the_action(first: str, second: str, named: str) -> None:
    text = f"placement 0 1\nmicrobatches 2\nrank 0: {first}\nrank 1: {second}"
    with pytest.raises((CheckError, UsageError)) as caught:
        compiled(
            Calls(two_layers),
            Batch((batch_of(SIZE),)),
            2,
            2,
            loss_fn=mean_square,
            schedule=Schedule.parse(text),
        )
    assert re.search(named, str(caught.value))


@pytest.mark.parametrize("objective", ["span", "makespan"])
@pytest.mark.parametrize(
    "costs",
    [((3, 4, 2), (2, 1, 3)), ((1, 1, 1), (1, 1, 1)), ((2, 3, 0), (4, 2, 5))],
    ids=lambda c: f"zero-bubble#73-{c[0]}",
)
def test_the_planned_order_is_the_optimum(costs: Any, objective: str) -> None:
    """p = 2, m = 3, against every order of both ranks."""
    profile = Profile(tuple(StageCost.simple(*(1000 * n for n in cost)) for cost in costs))
    pipeline = compiled(
        Calls(two_layers),
        Batch((batch_of(SIZE),)),
        2,
        3,
        loss_fn=mean_square,
        search=True,
        profile=profile,
        objective=objective,
        memory_limit=2,
    )
    best = brute_force(Problem.of(profile, None, 3, 2, objective))
    assert pipeline.certificate.value_ns == best
    assert pipeline.certificate.is_optimal
    assert pipeline.certificate.bound_ns == best


def test_pytorch_62283_transposed_boundary_and_expanded_gradient() -> None:
    """A transposed tensor at the cut, and a loss whose gradient is an expanded scalar."""
    for loss in (
        lambda out, _: out.sum(),
        lambda out, _: out.t().sum(0)[0],
        lambda out, _: F.relu(out).mean(),
    ):
        assert_right(
            Calls(lambda m, x: m.first(x).t().relu().t() @ m.a),
            batch_of(SIZE),
            loss=loss,
            microbatches=2,
            exact=False,
        )
