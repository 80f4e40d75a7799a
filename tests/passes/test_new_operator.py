"""A made-up operator: what it takes until its work for weights is in W, at its price, and counted.

Its kernel and its formula are torch's business. One row in `ops` says that its backward may be called twice;
without a row the work that has a call of its own goes to W. Floating-point operations come from torch's
registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.flop_counter import flop_registry, register_flop_formula

from tests.support.frontend_helpers import run_autograd, run_stages, state_of
from zbcompile.compiler.stages import build_stages
from zbcompile.passes import ops
from zbcompile.passes.op_costs import count_graph, is_heavy, node_ns
from zbcompile.passes.ops import namespace
from zbcompile.passes.split.stage_graphs import Graphs
from zbcompile.schedule.devices import DEVICES

ROWS, WIDTH = 6, 8
PRODUCT = 2 * ROWS * WIDTH * WIDTH
INPUT, WEIGHTS, ALL = [True, False, False], [False, True, True], [True, True, True]
SCHEMAS = (
    "affine(Tensor x, Tensor weight, Tensor bias) -> Tensor",
    "affine_apart(Tensor x, Tensor weight, Tensor bias) -> Tensor",
    "affine_backward(Tensor grad, Tensor x, Tensor weight, bool[3] mask) -> (Tensor, Tensor, Tensor)",
)


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.t() + bias


def _affine_backward(grad: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
    made = (grad @ weight if mask[0] else None, grad.t() @ x if mask[1] else None)
    made = (*made, grad.sum(0) if mask[2] else None)
    return tuple(grad.new_empty(0) if value is None else value for value in made)


def _formula(ctx, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.zbtest.affine_backward(grad, *ctx.saved_tensors, ALL)


def _formula_apart(ctx, grad: Tensor) -> tuple[Tensor, ...]:
    backward = torch.ops.zbtest.affine_backward
    dx, _, _ = backward(grad, *ctx.saved_tensors, INPUT)
    _, dw, db = backward(grad, *ctx.saved_tensors, WEIGHTS)
    return dx, dw, db


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """Register the operators, their fake results, formulas and costs; forget them afterwards."""
    kernels = (_affine, _affine, _affine_backward)
    with torch.library._scoped_library("zbtest", "DEF") as made:
        for schema, kernel in zip(SCHEMAS, kernels, strict=True):
            name = schema.partition("(")[0]
            made.define(schema)
            made.impl(name, kernel, "CPU")
            torch.library.register_fake(f"zbtest::{name}", kernel, lib=made)
        for name, formula in (("affine", _formula), ("affine_apart", _formula_apart)):
            torch.library.register_autograd(
                f"zbtest::{name}",
                formula,
                setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
                lib=made,
            )
        known = dict(flop_registry)
        own = torch.ops.zbtest
        register_flop_formula([own.affine, own.affine_apart])(lambda *shapes, out_shape, **_: PRODUCT)
        register_flop_formula(own.affine_backward)(lambda *shapes, **_: PRODUCT * sum(shapes[3][:2]))
        yield
        flop_registry.clear()
        flop_registry.update(known)


class Affine(nn.Module):
    def __init__(self, target: Callable[..., Tensor]) -> None:
        super().__init__()
        self.target = target
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.target(x, self.weight, self.bias).tanh()


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def _split(target: Callable[..., Tensor]) -> Graphs:
    """Compile two layers, hold them equal to plain autograd, and return the second stage's graphs."""
    torch.manual_seed(0)
    model = nn.Sequential(Affine(target), Affine(target))
    x, wanted = torch.randn(2, ROWS, WIDTH)
    built = build_stages(model, 2, (x,), target=wanted, loss_fn=_mean, split_points=["1"])
    batches = [((x,), {}, wanted)]
    _, reference = run_autograd(model, batches, _mean)
    _, gradients = run_stages(built, state_of(model), batches)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in reference.named_parameters())
    return built.stages[1].graphs


def _masks(module: GraphModule) -> list[list[bool]]:
    target = torch.ops.zbtest.affine_backward.default
    return [node.args[3] for node in module.graph.find_nodes(op="call_function", target=target)]


def _flops(module: GraphModule) -> int:
    return sum(count.flops for count in count_graph(module) if count.target.startswith("zbtest."))


def test_with_one_row_the_half_for_the_weights_goes_to_w(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_MASKS", (*ops._MASKS, (3, "zbtest.affine_backward.default")))
    ops._facts.cache_clear()
    graphs = _split(torch.ops.zbtest.affine.default)
    monkeypatch.undo()
    ops._facts.cache_clear()
    assert (_masks(graphs.backward_input), _masks(graphs.backward_weight)) == ([INPUT], [WEIGHTS])
    for module in (graphs.forward, graphs.backward_input, graphs.backward_weight):
        assert _flops(module) == PRODUCT
    assert _flops(graphs.full_backward) == 2 * PRODUCT


def test_without_a_row_a_call_for_both_stays_whole_in_b() -> None:
    graphs = _split(torch.ops.zbtest.affine.default)
    assert (_masks(graphs.backward_input), _masks(graphs.backward_weight)) == ([ALL], [])
    assert _flops(graphs.backward_input) == 2 * PRODUCT


def test_without_a_row_a_call_for_the_weights_alone_goes_to_w() -> None:
    graphs = _split(torch.ops.zbtest.affine_apart.default)
    assert (_masks(graphs.backward_input), _masks(graphs.backward_weight)) == ([INPUT], [WEIGHTS])
    assert _flops(graphs.backward_weight) == PRODUCT


def test_a_call_takes_the_time_of_its_products() -> None:
    slow = replace(DEVICES["CPU"], flops_per_second={"float32": 10**9}, launch_ns=0)
    graphs = _split(torch.ops.zbtest.affine_apart.default)
    for module in (graphs.forward, graphs.backward_input, graphs.backward_weight):
        (call,) = (node for node in module.graph.nodes if namespace(node.target) == "zbtest")
        assert node_ns(call, slow) == PRODUCT
        assert is_heavy(call)
