"""Rewrites of joint graphs and in-place calls: which calls go, and that no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from zbcompile.passes.joint.cheaper_calls import use_cheaper_calls
from zbcompile.passes.joint.simplify import simplify
from zbcompile.passes.split.in_place import written_in_place
from zbcompile.passes.torch_private import JointGraph

aten = torch.ops.aten
Function = Callable[..., Any]


def traced(function: Function, *examples: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*examples)


def rewritten(function: Function, *examples: Tensor) -> GraphModule:
    module = traced(function, *examples)
    holes = dict(enumerate(module.graph.find_nodes(op="placeholder")))
    result = module.graph.output_node().args[0]
    joint = JointGraph(module, holes, {}, {0: result}, {}, {})
    simplify(joint)
    use_cheaper_calls(joint)
    simplify(joint)
    assert joint.outputs[0] is module.graph.output_node().args[0]
    module.graph.lint()
    module.recompile()
    return module


def names(module: GraphModule) -> list[str]:
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    return [str(node.target).removeprefix("aten.").split(".")[0] for node in calls]


def bits(value: Tensor) -> Tensor:
    return (
        torch.view_as_real(value).contiguous().view(torch.int32)
        if value.is_complex()
        else value.view(torch.int32)
    )


def assert_same(module: GraphModule, function: Function, *arguments: Tensor) -> None:
    expected, given = function(*arguments), module(*(a.clone() for a in arguments))
    assert expected.stride() == given.stride()
    assert torch.equal(bits(expected), bits(given))


def sliced(ranges: list[tuple[int, int, int]], shape: tuple[int, ...], dim: int) -> Function:
    def function(*pieces: Tensor) -> Tensor:
        total = None
        for piece, (start, stop, step) in zip(pieces, ranges, strict=True):
            term = aten.slice_backward.default(piece, list(shape), dim, start, stop, step)
            total = term if total is None else total + term
        assert total is not None
        return total

    return function


END = 2**63 - 1


@pytest.mark.parametrize(
    ("ranges", "sizes", "joined"),
    [
        ([(0, 2, 1), (2, END, 1)], (2, 4), True),
        ([(4, 6, 1), (0, 3, 1), (3, 4, 1)], (2, 3, 1), True),
        ([(-2, END, 1), (0, 4, 1)], (2, 4), True),
        ([(0, 2, 1), (3, 6, 1)], (2, 3), False),
        ([(0, 3, 1), (2, 6, 1)], (3, 4), False),
        ([(0, 6, 2), (1, 6, 2)], (3, 3), False),
    ],
)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradients_of_slices_that_cover_are_joined(
    ranges: list[tuple[int, int, int]], sizes: tuple[int, ...], joined: bool, dim: int
) -> None:
    shape = [3, 5]
    shape[dim] = 6
    pieces = []
    for size in sizes:
        extents = list(shape)
        extents[dim] = size
        pieces.append(torch.randn(extents).masked_fill_(torch.rand(extents) < 0.4, -0.0))
    function = sliced(ranges, tuple(shape), dim)
    module = rewritten(function, *pieces)
    assert ("slice_backward" not in names(module)) == joined
    assert_same(module, function, *pieces)


def test_a_slice_read_elsewhere_stays() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        first = aten.slice_backward.default(a, [4, 3], 0, 0, 2, 1)
        return (first + aten.slice_backward.default(b, [4, 3], 0, 2, 4, 1)) * first

    pieces = torch.randn(2, 3), torch.randn(2, 3)
    assert names(rewritten(function, *pieces)).count("slice_backward") == 2


def test_views_of_views_and_undone_transposes_are_one() -> None:
    def function(x: Tensor) -> Tensor:
        y = aten.view.default(aten._unsafe_view.default(x.exp(), [6, 4]), [2, 3, 4])
        z = aten.transpose.int(aten.transpose.int(y, 0, 1), 0, 1)
        return aten.t.default(aten.t.default(aten.view.default(z, [3, 8]))) + 1.0

    module = rewritten(function, torch.randn(24))
    assert names(module) == ["exp", "view", "add"]
    assert_same(module, function, torch.randn(24))


@pytest.mark.parametrize("divisor", [3.0, 7, 512])
def test_a_scalar_is_applied_before_the_broadcast(divisor: float) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return aten.div.Scalar(aten.expand.default(x, [5, 6]), divisor) * y

    examples = torch.randn(5, 1), torch.randn(5, 6)
    module = rewritten(function, *examples)
    assert names(module) == ["div", "expand", "mul"]
    assert_same(module, function, *examples)


def test_a_broadcast_that_a_matmul_reads_is_not_moved() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return aten.mm.default(aten.mul.Scalar(aten.expand.default(x, [5, 6]), 3.0), y)

    assert names(rewritten(function, torch.randn(5, 1), torch.randn(6, 2))) == ["expand", "mul", "mm"]


@pytest.mark.parametrize(("shape", "moved"), [((5, 1), False), ((1, 1), True)])
def test_a_broadcast_that_a_kernel_of_several_roundings_reads_is_moved_if_it_is_one_number(
    shape: tuple[int, int], moved: bool
) -> None:
    """Such a kernel rounds the rest of a row otherwise than whole vectors; rows of one number are one row."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return aten.silu_backward.default(aten.div.Scalar(aten.expand.default(x, [5, 23]), 3.0), y)

    examples = torch.randn(shape), torch.randn(5, 23)
    module = rewritten(function, *examples)
    assert names(module) == (
        ["div", "expand", "silu_backward"] if moved else ["expand", "div", "silu_backward"]
    )
    assert_same(module, function, *examples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_sum_is_made_in_the_layout_of_its_copy(dtype: torch.dtype) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        turned = aten.transpose.int(a.exp() * aten.transpose.int(b, 0, 1).exp(), 0, 1)
        return aten.clone.default(turned, memory_format=torch.contiguous_format) + 1.0

    examples = torch.randn(3, 5, dtype=dtype), torch.randn(5, 3, dtype=dtype)
    module = rewritten(function, *examples)
    assert ("clone" in names(module)) == dtype.is_complex
    assert_same(module, function, *examples)


def test_the_first_power_is_no_copy_unless_it_is_a_result() -> None:
    examples = (torch.randn(4),)
    assert names(rewritten(lambda x: aten.pow.Tensor_Scalar(x, 1.0) * 2.0, *examples)) == ["mul"]
    assert names(rewritten(lambda x: aten.pow.Tensor_Scalar(x, 1.0), *examples)) == ["pow"]


def in_place(function: Function, *examples: Tensor) -> GraphModule:
    module = written_in_place(traced(function, *examples))
    assert_same(module, function, *examples)
    return module


def test_a_value_that_dies_is_written_over() -> None:
    a, b, row = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)
    assert names(in_place(lambda a, b: (a * b).sin() + b, a, b)) == ["mul", "sin_", "add_"]
    assert names(in_place(lambda a, b: b + a.exp(), a, b)) == ["exp", "add_"]
    assert names(in_place(lambda a, row: row * a.exp(), a, row)) == ["exp", "mul_"]
    assert names(in_place(lambda a, b: aten.mm.default(a, b.t().contiguous()) + 1.0, a, b))[-1] == "add_"
    module = in_place(lambda a, b: aten.silu_backward.default(a.exp(), b), a, b)
    assert [str(n.target) for n in module.graph.nodes][-2] == "aten.silu_backward.grad_input"


def test_what_is_read_again_or_given_is_left_alone() -> None:
    a, b, row = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)
    given = a.clone()
    module = in_place(lambda a, b: a * b, a, b)
    module(a, b)
    assert torch.equal(a, given)
    assert names(module) == ["mul"]

    def read_later(a: Tensor) -> Tensor:
        x = a.exp()
        return x.sin() * x

    def read_through_a_view(a: Tensor) -> Tensor:
        x = a.exp()
        part = aten.slice.Tensor(x, 0, 0, 2)
        return aten.cat.default([x.sin(), part])

    def part_of_a_storage(a: Tensor) -> Tensor:
        return aten.slice.Tensor(a.exp(), 0, 0, 2).sin()

    def turned_against_itself(a: Tensor) -> Tensor:
        x = a.exp()
        return aten.mm.default(x, x.t()) + 0.5 * aten.mm.default(x, x.t()).t()

    assert names(in_place(read_later, a)) == ["exp", "sin", "mul_"]
    assert "sin_" not in names(in_place(read_through_a_view, a))
    assert names(in_place(part_of_a_storage, a)) == ["exp", "slice", "sin"]
    assert names(in_place(lambda a, row: a + row.exp(), a, row)) == ["exp", "add"]
    in_place(turned_against_itself, a)


def test_results_are_not_written_over() -> None:
    def function(a: Tensor) -> tuple[Tensor, Tensor]:
        x = a.exp()
        return x, x.sin()

    module = written_in_place(traced(function, torch.randn(3)))
    assert names(module) == ["exp", "sin"]


def test_other_dtypes_and_complex_products_are_kept_apart() -> None:
    a, z = torch.randn(4), torch.randn(4, dtype=torch.complex64)
    assert names(in_place(lambda a: aten.gt.Scalar(a.exp(), 1.0) * 2.0, a)) == ["exp", "gt", "mul"]
    assert names(in_place(lambda a, z: a * z.exp(), a, z)) == ["exp", "mul"]
