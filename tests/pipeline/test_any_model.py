"""Models as people have them, through the public API: three optimizer steps equal those of plain autograd."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
    joined,
    mean_square,
    same,
    same_state,
)
from zbcompile.errors import CaptureError, CutError, ShapeError, SplitError, UsageError, ZBCompileError


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


# Shapes of models.


class UNet(nn.Module):
    """Skip connections that cross several cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up1, self.up2 = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down1(x))
        two = F.relu(self.down2(one))
        return self.up2(torch.cat([self.up1(F.relu(self.middle(two)) + two), one], 1))


class Norms(nn.Module):
    """BatchNorm, GroupNorm and a buffer that two stages read."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3)
        self.batch, self.group = nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.register_buffer("shift", torch.arange(4.0).view(4, 1, 1))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.batch(self.one(x)) + self.shift)
        x = F.relu(self.group(self.two(x)) - self.shift)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn, self.head = (
            nn.Embedding(9, 6),
            nn.LSTM(6, 6, 2, batch_first=True),
            nn.Linear(6, 9),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.table(ids))[0])


class Experts(nn.Module):
    """Top-1 routing: how many rows an expert gets depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.gate = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 3)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.outside = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inside(x))
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == k)
            result = result.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return self.outside(result + x)


class Complex(nn.Module):
    """Complex parameters, a complex tensor at the cut, an FFT."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.phase = nn.Parameter(torch.randn(SIZE, dtype=torch.complex64))
        self.turn = nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.complex64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.fft(self.one(x)) * self.phase
        y = (y @ self.turn).conj() + y
        return self.two(torch.fft.ifft(y).real + y.abs().log1p())


class Sign(torch.autograd.Function):
    """Straight through: its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.sign() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1) * ctx.scale * 0.7, None


class Pair(torch.autograd.Function):
    """Two results, one of them without gradient; the newer way to write the context."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y, (x > y).long()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return 2 * grad * y, 3 * grad * x


def functions(m: Calls, x: Tensor) -> Tensor:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:
            return given.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 0.5 * grad

    y, larger = Pair.apply(m.first(x), m.second(x))
    return m.third(Halved.apply(Sign.apply(y, 2.0))) * larger


def in_place(m: Calls, x: Tensor) -> Tensor:
    y = m.first(x) * 1.5
    y[:, :2] += m.b[:2]
    y[:, 3:].mul_(0.5)[:, 2:].zero_()
    z = torch.relu_(m.second(y.mul_(2.0)))
    z = z + x
    z += m.b
    return m.third(F.leaky_relu(z, inplace=True))


def expanded_gradient(m: Calls, x: Tensor) -> Tensor:
    return m.second(m.first(x)) + m.b.sum()


def checkpointed(m: Calls, x: Tensor) -> Tensor:
    y = checkpoint(lambda v: torch.tanh(m.first(v)), x, use_reentrant=False)
    return m.third(checkpoint(lambda v: F.gelu(m.second(v)) @ m.a, y, use_reentrant=True))


def autocast(m: Calls, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.relu(m.second(torch.relu(m.first(x))))
        with torch.autocast("cpu", enabled=False):
            y = m.norm(y.float()) @ m.a
    return m.third(y.bfloat16().float())


def no_grad_region(m: Calls, x: Tensor) -> Tensor:
    y = m.first(x)
    with torch.no_grad():
        target = m.second(y).sigmoid()
    return m.third(torch.relu(y)) - target + y.detach() * m.b


class Resampled(nn.Module):
    """Every kind of interpolation: eager runs one kernel for each."""

    def __init__(self, *modes: str) -> None:
        super().__init__()
        self.modes = modes
        self.convolutions = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in modes)

    def forward(self, x: Tensor) -> Tensor:
        for mode, convolution in zip(self.modes, self.convolutions, strict=True):
            x = F.interpolate(convolution(x), scale_factor=1.5, mode=mode)
        return x


class Blended(Resampled):
    def __init__(self) -> None:
        super().__init__("bilinear", "nearest", "bicubic")


class Nearest(Resampled):
    def __init__(self) -> None:
        super().__init__("nearest-exact", "area")


def pictures() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 2, 8, 8)


def words() -> Tensor:
    torch.manual_seed(0)
    return torch.randint(0, 9, (6, 5))


MODELS: dict[str, tuple[Any, Callable[[], Tensor], dict[str, Any]]] = {
    "skips": (UNet, pictures, {"stages": 4}),
    "batch-norm": (Norms, pictures, {"stages": 3, "ordered": True}),
    "resampled": (Blended, pictures, {"stages": 3}),
    "resampled-nearest": (Nearest, pictures, {"stages": 2}),
    "lstm": (Recurrent, words, {"stages": 3}),
    "experts": (Experts, lambda: batch_of(SIZE), {"stages": 2}),
    "complex": (Complex, lambda: batch_of(SIZE), {"stages": 3}),
    "functions": (functions, lambda: batch_of(SIZE), {"stages": 3}),
    "in-place": (in_place, lambda: batch_of(SIZE), {"stages": 2, "split_points": ["third"]}),
    "expanded gradient": (expanded_gradient, lambda: batch_of(SIZE), {"stages": 2}),
    "checkpoint": (checkpointed, lambda: batch_of(SIZE), {"stages": 3}),
    "autocast": (autocast, lambda: batch_of(SIZE), {"stages": 3}),
    "no-grad": (
        no_grad_region,
        lambda: batch_of(SIZE),
        {"stages": 3, "inexact": "a value used in three stages"},
    ),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_three_steps(name: str) -> None:
    build, batch, options = MODELS[name]
    torch.manual_seed(1)
    model = build() if isinstance(build, type) else Calls(build)
    stages, microbatches = options["stages"], 3
    order = {"schedule": in_order(stages, microbatches)} if "ordered" in options else {}
    cuts = {"split_points": options["split_points"]} if "split_points" in options else {}
    assert_right(
        model,
        batch(),
        stages=stages,
        microbatches=microbatches,
        loss=mean_square,
        steps=3,
        optimizer=adamw if build is not Complex else sgd,
        exact="inexact" not in options,
        **order,
        **cuts,
    )


# Tied weights, shared buffers.


class TiedModel(nn.Module):
    """A table used at both ends, and one Linear registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(9, SIZE), nn.Linear(SIZE, SIZE)
        self.again = self.middle
        self.head = nn.Linear(SIZE, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.table(ids)))
        return self.head(torch.tanh(self.again(x)))


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_tied_weights(stages: int, frozen: bool) -> None:
    torch.manual_seed(2)
    model = TiedModel()
    model.table.weight.requires_grad_(not frozen)
    pipeline = assert_right(
        model,
        words(),
        stages=stages,
        target=words(),
        loss=lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        steps=3,
        optimizer=lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad], lr=0.1),
        exact=stages == 1,
    )
    assert model.head.weight is model.table.weight
    listed = list(pipeline.parameters())
    assert len({id(p) for p in listed}) == len(listed) == 3


def test_a_parameter_of_two_stages_without_a_gradient_has_none() -> None:
    """Codes that are looked up and detached: autograd gives them no gradient, so AdamW leaves them alone."""

    def quantized(m: Calls, x: Tensor) -> Tensor:
        x = m.first(x)
        nearest = torch.cdist(x, m.a).argmin(-1)
        return m.third(m.second(x + (m.a[nearest] - x).detach()))

    model = Calls(quantized)
    pipeline = compiled(model, Batch((batch_of(SIZE),)), 3, 3, loss_fn=mean_square)
    pipeline.step(batch_of(SIZE))
    held = [stage.index for stage in pipeline if "a" in dict(stage.named_parameters())]
    assert len(held) == 2
    assert model.a.grad is None
    assert model.first.weight.grad is not None


# Arguments and results.


class Result(NamedTuple):
    value: Tensor
    extra: dict[str, Any]


@dataclasses.dataclass
class Outcome:
    value: Tensor
    count: int


RESULTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda y, z: (y, z),
    "list-in-dict": lambda y, z: {"first": [y, z], "name": "n", "none": None},
    "named-tuple": lambda y, z: Result(y, {"z": z, "k": 3}),
    "dataclass": lambda y, z: Outcome(y, 5),
    "twice": lambda y, z: (y, y, z),
    "input-and-output": lambda y, z: {"y": y, "z": z, "plain": y.detach().argmax(1)},
}


def leaf(value: Any) -> Tensor:
    """The mean square of the first tensor of a result."""
    while not isinstance(value, Tensor):
        value = (
            value.value
            if hasattr(value, "value")
            else next(iter(value.values()))
            if isinstance(value, dict)
            else value[0]
        )
    return value.pow(2).mean()


@pytest.mark.parametrize("kind", list(RESULTS))
def test_nested_results(kind: str) -> None:
    """The result has the model's own type, its tensors joined over the microbatches."""
    make = RESULTS[kind]
    model, x = Calls(lambda m, x: make(m.first(x), m.second(torch.relu(m.first(x))))), batch_of(SIZE)
    pipeline = assert_right(model, x, loss=lambda out, _: leaf(out), exact=False)
    found, parts = pipeline.step(x, return_outputs=True), [model(part) for part in x.chunk(3)]
    assert all(type(found) is type(part) for part in parts)
    if kind == "dataclass":
        found, parts = vars(found), [vars(part) for part in parts]
    mine, spec = torch.utils._pytree.tree_flatten(found)
    theirs, other = torch.utils._pytree.tree_flatten(joined(parts))
    assert spec == other
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, Tensor):
            same(kind, a, b, exact=True)
        else:
            assert a == b


def test_arguments_of_every_kind() -> None:
    """Positional, keyword, nested, whole, constant, unused, integer and scalar arguments."""

    def body(
        m: Calls, x: Tensor, pair: Any, scale: float, *, mask: Any = None, table: Any = None, mode: str = ""
    ) -> Any:
        y = m.first(x) * scale + pair[0]
        y = y.masked_fill(mask["keep"], 0.0) if mode == "mask" else y
        return m.second(torch.relu(y)) @ table + pair[1]["shift"]

    x = batch_of(SIZE)
    kwargs = {
        "mask": {"keep": torch.rand(6, SIZE) > 0.5, "unused": torch.zeros(3)},
        "table": torch.randn(6, SIZE),
        "mode": "mask",
    }
    assert_right(
        Calls(body),
        x,
        (x.sin(), {"shift": torch.tensor(0.5)}),
        2.0,
        kwargs=kwargs,
        loss=mean_square,
        whole=("table",),
    )


def test_a_target_of_several_tensors_and_none() -> None:
    x = batch_of(SIZE)
    target = {"labels": torch.arange(6) % SIZE, "weights": [torch.rand(6)], "smooth": 0.1}

    def loss(out: Tensor, target: Any) -> Tensor:
        each = F.cross_entropy(out, target["labels"], reduction="none", label_smoothing=target["smooth"])
        return (each * target["weights"][0]).mean()

    assert_right(Calls(lambda m, x: m.second(torch.relu(m.first(x)))), x, loss=loss, target=target)


def test_losses_that_are_modules() -> None:
    """Class weights of a loss are buffers; test_trained_losses.py has those with parameters."""
    x, labels = batch_of(SIZE), torch.arange(6) % SIZE
    model = Calls(lambda m, x: m.second(torch.relu(m.first(x))))
    weighted = nn.CrossEntropyLoss(weight=torch.rand(SIZE), label_smoothing=0.1, ignore_index=2)
    assert_right(model, x, loss=weighted, target=labels, steps=2, optimizer=sgd, verify=True)


# Training as users do it.


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("through", ["model", "pipeline", "optimizer"])
def test_ways_to_zero_gradients(through: str, to_none: bool) -> None:
    model, x = Calls(lambda m, x: m.second(torch.relu(m.first(x)))), batch_of(SIZE)
    reference = copy.deepcopy(model)
    pipeline = compiled(model, Batch((x,)), 2, 3, loss_fn=mean_square)
    optimizer = sgd(pipeline.parameters())
    theirs = sgd(reference.parameters())
    for _ in range(2):
        if through == "pipeline":
            pipeline.zero_grad()
        else:
            (model if through == "model" else optimizer).zero_grad(set_to_none=to_none)
        theirs.zero_grad()
        pipeline.step(x)
        autograd(reference, Batch((x,)).cut(3), mean_square, scale=3)
        nn.utils.clip_grad_norm_(list(pipeline.parameters()), 0.1)
        nn.utils.clip_grad_norm_([p for p in reference.parameters() if p.grad is not None], 0.1)
        optimizer.step()
        theirs.step()
    same_state(model, reference)


def test_state_dict_round_trip() -> None:
    """A checkpoint of model and optimizer taken mid-way, loaded into a fresh pipeline, goes on to the bit."""

    def body(m: Calls, x: Tensor) -> Tensor:
        return m.third(F.dropout(torch.relu(m.second(m.first(x))), 0.5))

    x = batch_of(SIZE)
    model = Calls(body)
    pipeline = compiled(model, Batch((x,)), 3, 3, loss_fn=mean_square, seed=3)
    optimizer = adamw(pipeline.parameters())
    for turn in range(4):
        if turn == 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), pipeline.step_number))
        optimizer.zero_grad()
        pipeline.step(x)
        optimizer.step()
    other = Calls(body)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(saved[0])
    again = compiled(other, Batch((x,)), 3, 3, loss_fn=mean_square, seed=3)
    resumed = adamw(again.parameters())
    resumed.load_state_dict(saved[1])
    again.step_number = saved[2]
    for _ in range(2):
        resumed.zero_grad()
        again.step(x)
        resumed.step()
    same_state(other, model)
    names = [name for stage in again for name, _ in stage.named_parameters()]
    assert set(names) <= set(other.state_dict())
    for stage in again:
        held = stage.state_dict()
        assert all(torch.equal(held[name], other.state_dict()[name]) for name in held)


def test_evaluation_between_steps() -> None:
    """eval(): no dropout, running statistics, any batch that can be cut; training goes on undisturbed."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(SIZE, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)
    )
    x, y = batch_of(SIZE), torch.arange(6) % 3
    pipeline = compiled(model, Batch((x,), target=y), 2, 3, loss_fn=F.cross_entropy, schedule=in_order(2, 3))
    pipeline.step(x, target=y)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    losses: list[Tensor] = []
    twice, labels = torch.cat([x, x]), torch.cat([y, y])
    found = pipeline.eval(twice, target=labels, losses=losses)
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    reference = copy.deepcopy(model).eval()
    with torch.no_grad():
        parts = [reference(part) for part in twice.chunk(3)]
    assert torch.equal(found, joined(parts))
    wanted = [F.cross_entropy(part, label) for part, label in zip(parts, labels.chunk(3), strict=True)]
    assert torch.equal(torch.stack(losses), joined(wanted))
    assert model.training
    pipeline.step(x, target=y)


def test_a_searched_order_under_a_memory_limit() -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(SIZE, SIZE), nn.Tanh())))
    x = batch_of(SIZE)
    free = compiled(model, Batch((x,)), 2, 6, loss_fn=mean_square, search=True)
    least = max(s.static_bytes + s.saved_bytes for s in free.profile.stages)
    pipeline = assert_right(
        model, x, microbatches=6, loss=mean_square, search=True, memory_limit=least, profile=free.profile
    )
    assert pipeline.certificate.value_ns >= free.certificate.bound_ns
    with pytest.raises(ZBCompileError, match=str(least)):
        compiled(
            model,
            Batch((x,)),
            2,
            6,
            loss_fn=mean_square,
            search=True,
            memory_limit=least - 1,
            profile=free.profile,
        )


# Refusals.


def test_more_stages_than_cut_points() -> None:
    with pytest.raises(CutError, match="9 stages wanted"):
        zbcompile.compile(nn.Linear(SIZE, SIZE), 9, example_args=(batch_of(SIZE),), loss_fn=mean_square)


def test_sizes_from_data_leave_no_cut_and_the_way_out_is_named() -> None:
    def chosen(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        rows = x[keep]
        return m.norm(m.second(torch.relu(m.first(rows))))

    keep = torch.tensor([True, False] * 3)
    batch = Batch((batch_of(SIZE), keep))
    for points, stages in ((None, 6), (["second"], 2)):
        with pytest.raises(CutError, match=r"(?s)\.py:\d+.*compile\(\.\.\., constant=\[") as caught:
            compiled(Calls(chosen), batch, stages, 3, loss_fn=mean_square, split_points=points)
        assert "whose size depends on data may cross a cut" in str(caught.value)
    assert_right(Calls(chosen), *batch.args, loss=mean_square, constant=[1])


def hooked(m: Calls, x: Tensor) -> Tensor:
    y = m.first(x)
    y.register_hook(lambda grad: grad * 3)
    return m.second(y)


def test_gradient_hooks_on_tensors_are_refused_by_line() -> None:
    given = Tensor.register_hook
    with pytest.raises(CaptureError, match="hook.*test_any_model.py:"):
        compiled(Calls(hooked), Batch((batch_of(SIZE),)), 2, 3, loss_fn=mean_square)
    assert Tensor.register_hook is given


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(9, SIZE, sparse=True), nn.Linear(SIZE, SIZE))
    with pytest.raises(SplitError, match="0.weight is sparse"):
        compiled(model, Batch((words(),)), 2, 3, loss_fn=mean_square)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_stages": 0}, "num_stages"),
        ({"num_stages": True}, "num_stages"),
        ({"num_microbatches": 0}, "microbatch"),
        ({"num_microbatches": -2}, "microbatch"),
        ({"placement": "zigzag"}, "zigzag"),
        ({"placement": (0, 2)}, "rank"),
        ({"objective": "speed"}, "speed"),
        ({"transport": "pigeon"}, "pigeon"),
        ({"recompute": "sometimes"}, "sometimes"),
        ({"split_points": ["nowhere"]}, "nowhere"),
        ({"split_points": ["first", "second", "third"]}, "split_points"),
        ({"num_ranks": 5}, "5"),
        ({"profile": "missing.json"}, "missing.json"),
        ({"schedule": "missing.json"}, "missing.json"),
        ({"example_args": ()}, "tensor"),
        ({"example_args": (torch.tensor(1.0),)}, "batch dimension"),
    ],
    ids=lambda v: str(next(iter(v))) + repr(next(iter(v.values())))[:12] if isinstance(v, dict) else "",
)
def test_arguments_that_cannot_be_meant(options: dict[str, Any], words: str) -> None:
    model = Calls(lambda m, x=None: m.third(m.second(torch.relu(m.first(x)))))
    given = {
        "num_stages": 2,
        "example_args": (batch_of(SIZE),),
        "loss_fn": mean_square,
        "time_limit": 0.5,
    } | options
    with pytest.raises(UsageError, match=words):
        zbcompile.compile(model, **given)


def test_results_of_several_sizes_are_refused_only_where_they_are_joined() -> None:
    def found(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.second(torch.relu(m.first(x)))
        return y.square().sum(), y[:, y.detach()[0] > 0]

    model, x = Calls(found), batch_of(SIZE)
    assert len({model(part)[1].shape for part in x.chunk(3)}) > 1
    pipeline = compiled(model, Batch((x,)), 2, 3)
    with pytest.raises(ShapeError, match="differ in shape.*joined"):
        pipeline.step(x, return_outputs=True)
    assert all(p.grad is None for p in model.parameters())
    assert pipeline.step(x) is None
    mine = [p.grad for p in model.parameters()]
    model.zero_grad()
    (sum(model(part)[0] for part in x.chunk(3)) / 3).backward()
    assert all((a is None) == (p.grad is None) for a, p in zip(mine, model.parameters(), strict=True))
    for a, p in zip(mine, model.parameters(), strict=True):
        if a is not None:
            torch.testing.assert_close(a, p.grad, rtol=1e-6, atol=1e-6)  # divided after the sum


def test_step_without_a_loss_and_losses_of_the_wrong_kind() -> None:
    x = batch_of(SIZE)
    body = Calls(lambda m, x: m.second(torch.relu(m.first(x))))
    pipeline = compiled(body, Batch((x,)), 2, 3)
    with pytest.raises(UsageError, match="no loss"):
        pipeline.step(x)
    for loss in (lambda out, _: out, lambda out, _: out.sum().long(), lambda out, _: 1.0):
        with pytest.raises((UsageError, SplitError), match="loss"):
            compiled(body, Batch((x,)), 2, 3, loss_fn=loss)
    frozen = Calls(lambda m, x: m.second(torch.relu(m.first(x)))).requires_grad_(False)
    with pytest.raises((UsageError, SplitError), match="loss|gradient"):
        compiled(frozen, Batch((x,)), 2, 3, loss_fn=mean_square).step(x)
