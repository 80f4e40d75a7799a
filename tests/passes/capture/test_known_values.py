"""Values that Python code reads: of constant arguments and of what is made from numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.kinds_zoo import SIZE, Of
from tests.support.pipeline_oracle import mean_square
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import CaptureError
from zbcompile.passes.capture.capture import capture
from zbcompile.passes.verify.verify import verify


def loss(output: Any, target: Any = None) -> Tensor:
    return mean_square(output)


GRID = torch.tensor([[1, 2], [2, 3]])


def parts_of_a_grid(m: Of, x: Tensor, grid: Tensor) -> Tensor:
    """As Qwen2-VL cuts the features of its images."""
    parts = m.a(x).split(grid.prod(-1).tolist(), dim=1)
    return m.c(torch.cat([part * (k + 1) for k, part in enumerate(parts)], 1))


def places_in_a_grid(m: Of, x: Tensor, grid: Tensor) -> Tensor:
    """As rotary tables of images are made, and lengths of packed sequences."""
    places = [torch.arange(h * w).reshape(h, w).flatten() for h, w in grid]
    ends = F.pad(torch.repeat_interleave(grid[:, 1], grid[:, 0]).cumsum(0), (1, 0))
    lengths = (ends[1:] - ends[:-1]).tolist()
    table = torch.outer(torch.arange(int(grid.max()) * 2), m.a.bias)[torch.cat(places)]
    y = m.b(x)[:, : sum(lengths)] * table.sum()
    return m.c(F.pad(y, (0, SIZE - sum(lengths))) + ends.sum())


def chosen_by_a_grid(m: Of, x: Tensor, grid: Tensor) -> Tensor:
    y = torch.zeros(3, SIZE)
    y[: grid[0, 1]] = m.a(x)[0]
    marked = torch.zeros(SIZE, dtype=torch.long)
    marked[grid[1, 0] :] = 1
    if max(grid[0, 0], grid[1, 0]) > 1 and marked.sum() == 6 and bool((grid > 0).all()):
        y = y * len(marked.nonzero())
    return m.c(x + y.sum(0)) * grid.float().mean()


def sizes_as_tensors(m: Of, x: Tensor, grid: Tensor) -> Tensor:
    high, wide = grid[1, 0], grid[1, 1]
    y = m.a(x).narrow(1, grid[0, 0], high * wide).reshape(-1, high, wide)
    return m.c(F.pad(y.transpose(1, 2).reshape(len(x), high * wide), (0, 2)))


def sizes_by_name(m: Of, x: Tensor, grid: Tensor) -> Tensor:
    """As ViLT cuts its table of places to the size of each image."""
    table = m.b.weight[None, None]
    parts = [F.interpolate(input=table, size=(h, w + 1), mode="bilinear").flatten() for h, w in grid]
    return m.c(F.pad(input=m.a(x), pad=(0, grid[0, 0], 0, 0))[:, :SIZE] * torch.cat(parts).sum())


READERS = (parts_of_a_grid, places_in_a_grid, chosen_by_a_grid, sizes_as_tensors)


@pytest.mark.parametrize("reads", [*READERS, sizes_by_name], ids=lambda f: f.__name__)
def test_code_may_read_a_constant_argument(reads: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, args = Of(reads), (torch.rand(3, SIZE), GRID)
    built = build_stages(model, 2, args, loss_fn=loss, constant=[1])
    assert verify(model, built, args, loss_fn=loss).exact


@pytest.mark.parametrize("reads", READERS[1:], ids=lambda f: f.__name__)
def test_reading_any_other_argument_is_refused_and_the_way_out_told(reads: Callable[..., Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"test_known_values.py:\d+(?s:.*)compile\(\.\.\., constant=\["):
        capture(Of(reads), (torch.rand(3, SIZE), GRID))


def test_what_is_made_from_numbers_may_be_read() -> None:
    def forward(m: Of, x: Tensor) -> Tensor:
        sizes = torch.tensor([[2, 3], [1, 2]])
        parts = m.a(x).split([*sizes.prod(1).tolist()], dim=1)
        steps = [step.item() for step in torch.linspace(0, 1, len(parts))]
        return m.c(torch.cat([p * (1 + s) for p, s in zip(parts, steps, strict=True)], 1))

    model, x = Of(forward), torch.rand(3, SIZE)
    built = build_stages(model, 2, (x,), loss_fn=loss)
    assert verify(model, built, (x,), loss_fn=loss).exact


def overwritten(m: Of, x: Tensor) -> Tensor:
    marks = torch.zeros(SIZE)
    view = marks[2:]
    view.copy_(x[0, 2:])
    return m.c(x) * marks.sum().item()


def overwritten_through_another_view(m: Of, x: Tensor) -> Tensor:
    marks = torch.zeros(SIZE)
    first, rest = marks.split((2, SIZE - 2))
    rest[0] = x.detach().sum()
    return m.c(x) * (first.sum() + rest[0]).item()


def filled_at_random(m: Of, x: Tensor) -> Tensor:
    return m.c(x) * torch.zeros(3).uniform_().sum().item()


def drawn_at_random(m: Of, x: Tensor) -> Tensor:
    return m.c(x) * torch.rand_like(torch.zeros(3)).sum().item()


CHANGED = (overwritten, overwritten_through_another_view, filled_at_random, drawn_at_random)


@pytest.mark.parametrize("forward", CHANGED, ids=lambda f: f.__name__)
def test_a_value_that_changes_is_not_known(forward: Callable[..., Tensor]) -> None:
    """A graph that kept the first value would pass a comparison with the example's: nothing is kept."""
    captured = capture(Of(forward), (torch.rand(3, SIZE),))
    reads = [n for n in captured.module.graph.nodes if str(n.target) == "aten.item.default"]
    assert len(reads) == 1


def test_a_value_that_changes_with_known_ones_stays_known() -> None:
    def forward(m: Of, x: Tensor) -> Tensor:
        marks = torch.zeros(SIZE)
        head = marks[:3]
        marks[1:] = torch.arange(7.0)
        head.mul_(2).add_(1)
        return m.a(x) if marks[:4].tolist() == [1.0, 1.0, 3.0, 2.0] else m.b(x)

    captured = capture(Of(forward), (torch.rand(3, SIZE),))
    read = {captured.roles[n.name].name for n in captured.module.graph.find_nodes(op="placeholder")}
    assert {"a.weight", "a.bias"} < read
    assert "b.weight" not in read


def test_a_constant_that_the_forward_changes_is_refused() -> None:
    def forward(m: Of, x: Tensor, grid: Tensor) -> Tensor:
        grid.add_(1)
        return m.c(x) * grid.sum()

    with pytest.raises(CaptureError, match="changes a plain tensor in place"):
        capture(Of(forward), (torch.rand(3, SIZE), GRID), constant=[1])
    assert GRID.tolist() == [[1, 2], [2, 3]]
