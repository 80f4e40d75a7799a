"""A stage's captured graph as a function again, for the joint trace: same calls, same modes, same order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from zbcompile.passes import torch_private
from zbcompile.passes.capture.captured import Region
from zbcompile.passes.capture.custom_functions import FunctionCall, is_function_call
from zbcompile.passes.joint.gradient_layouts import Order, laid_out
from zbcompile.passes.joint.recurrent import recurrent

__all__ = ["Replay"]


class Replay(nn.Module):
    """Runs a graph call by call under the autocast and grad modes recorded per node.

    Outputs whose position is not in ``live`` are detached; an output that shares storage with an
    argument or an earlier output is cloned (autograd's tracing loses the gradient of such a pair).
    Those in ``orders`` are copied into that layout (see `tangents`).
    """

    def __init__(
        self,
        module: GraphModule,
        functions: Mapping[int, FunctionCall],
        live: frozenset[int],
        orders: Mapping[int, Order] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.graph = module.graph
        self.attributes = {
            str(node.target): getattr(module, str(node.target))
            for node in module.graph.nodes
            if node.op == "get_attr"
        }
        self.live, self.orders = live, orders
        self.functions = functions
        self.running: Node | None = None
        """The call that is running: after a failure the one that failed."""
        self.steps: dict[str, Node] = {}
        """Name of autograd's step backwards -> the first call that made one."""

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        values: dict[Node, Any] = {}
        given = iter(arguments)
        with _Regions() as regions:
            for node in self.graph.nodes:
                if node.op == "placeholder":
                    values[node] = next(given)
                elif node.op == "get_attr":
                    values[node] = self.attributes[str(node.target)]
                elif node.op == "call_function":
                    self.running = node
                    regions.enter(node.meta.get("region", ()))
                    with torch_private.node_meta(node):
                        values[node] = self._call(node, values)
                    step = getattr(values[node], "grad_fn", None)
                    if step is not None:
                        self.steps.setdefault(step.name(), node)
        self.running = None
        results: Any = self.graph.output_node().args[0]
        outputs = [values[node] for node in results]
        return self._separate(outputs, arguments)

    def _call(self, node: Node, values: dict[Node, Any]) -> Any:
        args: Any = torch.fx.map_arg(node.args, lambda n: values[n])
        kwargs: Any = torch.fx.map_arg(node.kwargs, lambda n: values[n])
        if is_function_call(node.target):
            return self.functions[args[0]](args[1])
        target: Callable[..., Any] = recurrent(node) or node.target  # type: ignore[assignment]
        return target(*args, **kwargs)

    def _separate(self, outputs: list[Tensor], arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen = {torch_private.storage_key(argument) for argument in arguments}
        results = []
        for position, output in enumerate(outputs):
            if position not in self.live:
                output = output.detach()
            if torch_private.storage_key(output) in seen:
                output = output.clone()
            seen.add(torch_private.storage_key(output))
            order = self.orders.get(position)
            results.append(output if order is None else laid_out(output, order))
        return tuple(results)


class _Regions(contextlib.ExitStack):
    """The open modes; `enter` closes and opens what differs from the wanted nesting."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[tuple[Region, contextlib.ExitStack]] = []

    def enter(self, wanted: tuple[Region, ...]) -> None:
        shared = 0
        while shared < min(len(wanted), len(self._open)) and self._open[shared][0] == wanted[shared]:
            shared += 1
        while len(self._open) > shared:
            self._open.pop()[1].close()
        for region in wanted[shared:]:
            stack = contextlib.ExitStack()
            stack.enter_context(region.mode())
            self.callback(stack.close)
            self._open.append((region, stack))
