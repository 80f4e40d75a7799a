"""``compile(..., constant=...)``: arguments whose values the model's code reads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from tests.support.pipeline_oracle import Batch, autograd, compiled, in_order, mean_square, same_state
from zbcompile.errors import UsageError

SIZE = 8
ROWS = 6


class Packed(nn.Module):
    """Cuts its features where an argument says, as models of images and packed sequences do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, sizes: Tensor, extra: dict[str, Any] | None = None) -> Tensor:
        parts = self.first(x).split(sizes[0].tolist(), dim=1)
        y = torch.cat([part * (k + 1) for k, part in enumerate(parts)], 1)
        if extra is not None:
            y = y.roll(int(extra["shift"]), 1)
        return self.last(y.tanh()) + sizes.float().mean()


def data(*sizes: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(ROWS, SIZE), torch.tensor([sizes or (3, 5)] * ROWS)


@pytest.mark.parametrize("named", ["sizes", 1])
@pytest.mark.parametrize("by_name", [False, True])
def test_steps_equal_autograd(named: str | int, by_name: bool) -> None:
    if by_name and named == 1:
        named = "sizes"
    x, sizes = data()
    model = Packed()
    reference = copy.deepcopy(model)
    batch = Batch((x,), {"sizes": sizes}) if by_name else Batch((x, sizes))
    pipeline = compiled(model, batch, 2, 3, loss_fn=mean_square, constant=(named,))
    for _ in range(2):
        pipeline.step(*batch.args, **batch.kwargs)
        autograd(reference, batch.cut(3), mean_square, scale=3)
        same_state(model, reference)


def test_a_step_with_another_value_is_refused_by_name_and_microbatch() -> None:
    x, sizes = data()
    pipeline = compiled(Packed(), Batch((x, sizes)), 2, 3, loss_fn=mean_square, constant=["sizes"])
    other = sizes.clone()
    other[4:] = torch.tensor([4, 4])
    words = (
        r"another value than the one that is compiled \(args\[1\], microbatch 2\)(?s:.*)\[\[3, 5\](?s:.*)4, 4"
    )
    with pytest.raises(UsageError, match=words):
        pipeline.step(x, other)
    pipeline.step(x, sizes)


def test_an_evaluation_may_have_values_of_its_own() -> None:
    x, sizes = data()
    model = Packed()
    pipeline = compiled(model, Batch((x, sizes)), 2, 3, loss_fn=mean_square, constant=["sizes"])
    for other in ((3, 5), (2, 6), (3, 5)):
        _, sizes = data(*other)
        parts = [model(a, b) for a, b in zip(x.chunk(3), sizes.chunk(3), strict=True)]
        assert torch.equal(pipeline.eval(x, sizes), torch.cat(parts))
    assert len(pipeline._ready()._evaluations) == 2


def test_a_constant_in_a_nested_argument_that_is_not_cut() -> None:
    x, sizes = data()
    model = Packed()
    reference = copy.deepcopy(model)
    kwargs = {"extra": {"shift": torch.tensor(3)}, "sizes": sizes}
    pipeline = compiled(model, Batch((x,), kwargs), 2, 3, loss_fn=mean_square, constant=["sizes", "extra"])
    pipeline.step(x, **kwargs)
    autograd(reference, Batch((x,), kwargs).cut(3), mean_square, scale=3)
    same_state(model, reference)
    with pytest.raises(UsageError, match=r"extra.shift, microbatch 0\)\n  needed: 3, as compiled; given: 2"):
        pipeline.step(x, sizes=sizes, extra={"shift": torch.tensor(2)})


class Strided(nn.Module):
    """Keeps its sizes in buffers, as audio codecs do, and counts its calls in another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.stride, self.extra = nn.Buffer(torch.tensor(2)), nn.Buffer(torch.tensor(3))
        self.calls = nn.Buffer(torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        rows = int(torch.ceil(x.shape[1] / self.stride)) * self.stride
        if rows > self.extra:
            x = nn.functional.pad(self.first(x), (0, int(rows - x.shape[1] + self.extra)))
        return self.last(x[:, : rows if self.stride > 1 else 1].tanh()) * self.stride


def test_a_small_buffer_of_whole_numbers_may_be_read_and_must_stay() -> None:
    x, _ = data()
    model = Strided()
    reference = copy.deepcopy(model)
    order = in_order(2, 3)
    pipeline = compiled(model, Batch((x,)), 2, 3, loss_fn=mean_square, verify=True, schedule=order)
    for _ in range(2):
        pipeline.step(x)
        autograd(reference, Batch((x,)).cut(3), mean_square, scale=3)
        same_state(model, reference)
    assert torch.equal(pipeline.eval(x), torch.cat([reference.eval()(part) for part in x.chunk(3)]))
    assert int(model.calls) == 6
    model.extra.fill_(4)
    for run in (pipeline.step, pipeline.eval):
        with pytest.raises(UsageError, match=r"another value now \(extra\)\n  needed: 3; given: 4"):
            run(x)
    model.extra.fill_(3)
    pipeline.step(x)


def test_a_count_that_is_read_is_refused_at_the_next_step() -> None:
    class Counting(Strided):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.last(self.first(x).tanh()) * (1 if int(self.calls) < 5 else 2)

    x, _ = data()
    pipeline = compiled(Counting(), Batch((x,)), 2, 1, loss_fn=mean_square)
    pipeline.step(x)
    with pytest.raises(UsageError, match=r"another value now \(calls\)\n  needed: 0; given: 1"):
        pipeline.step(x)


@pytest.mark.parametrize(
    ("constant", "words"),
    [
        (["size"], r"constant='size' names no tensor of the call\n  needed: one of args\[0\], args\[1\]"),
        ([2], r"constant=2 names no tensor"),
        ([0], r"\(args\[0\], microbatch 1\)"),
    ],
)
def test_what_cannot_be_a_constant(constant: list[Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        compiled(Packed(), Batch(data()), 2, 3, loss_fn=mean_square, constant=constant)


def test_without_it_the_read_is_refused_and_the_way_out_told() -> None:
    x, sizes = data()
    extra = {"shift": torch.tensor(3)}
    words = r"constant=\[its name\]\) \(one of args\[1\], args\[2\].shift\)"
    with pytest.raises(zbcompile.errors.CaptureError, match=words):
        compiled(Packed(), Batch((x, sizes, extra)), 2, 3, loss_fn=mean_square)
