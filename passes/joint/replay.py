"""A stage's captured graph as a function again, to trace forward and backward through it.

``StageSource.module --> nn.Module``. Contract out: the same calls under the same autocast and grad modes in
the same order, and results that autograd's tracing can take: no two of them share storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from zbcompile.passes import torch_private
from zbcompile.passes.capture.captured import Region
from zbcompile.passes.capture.custom_functions import FunctionCall, is_function_call
from zbcompile.passes.joint.gradient_layouts import GradientLayout, in_layout
from zbcompile.passes.joint.recurrent import recurrent

__all__ = ["Replay"]


class Replay(nn.Module):
    """Runs a graph call by call under the autocast and grad modes that each node records.

    An output that shares storage with an argument or an earlier output is cloned: autograd's tracing loses
    the gradient of such a pair.

    Parameters
    ----------
    module
        The graph of a stage.
    functions
        The custom Functions that its calls of ``zbcompile::function`` stand for.
    live
        Positions of the outputs that take a gradient; the others are detached.
    layouts
        Output -> layout that its gradient arrives in; the output is copied into it (see `gradient_layouts`).

    Attributes
    ----------
    running
        The call that is running; after a failure, the one that failed.
    steps
        Name of autograd's backward step -> the first call that made one.
    """

    def __init__(
        self,
        module: GraphModule,
        functions: Mapping[int, FunctionCall],
        live: frozenset[int],
        layouts: Mapping[int, GradientLayout],
    ) -> None:
        super().__init__()
        self.graph = module.graph
        self.attributes: dict[str, Argument] = {
            str(node.target): getattr(module, str(node.target))
            for node in module.graph.nodes
            if node.op == "get_attr"
        }
        self.live, self.layouts = live, layouts
        self.functions = functions
        self.running: Node | None = None
        self.steps: dict[str, Node] = {}

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        values: dict[Node, Argument] = {}
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
        results = cast("Sequence[Node]", self.graph.output_node().args[0])
        return self._separate([cast("Tensor", values[node]) for node in results], arguments)

    def _call(self, node: Node, values: Mapping[Node, Argument]) -> Argument:
        args = torch.fx.map_arg(node.args, lambda n: values[n])
        kwargs = torch.fx.map_arg(node.kwargs, lambda n: values[n])
        if is_function_call(node.target):
            key, tensors = args
            return self.functions[cast("int", key)](cast("Sequence[Tensor]", tensors))
        target = recurrent(node) or cast("Callable[..., Argument]", node.target)
        return target(*args, **kwargs)

    def _separate(self, outputs: Sequence[Tensor], arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs detached, cloned and laid out as the class says."""
        seen = {torch_private.storage_key(argument) for argument in arguments}
        results = []
        for position, output in enumerate(outputs):
            if position not in self.live:
                output = output.detach()
            if torch_private.storage_key(output) in seen:
                output = output.clone()
            seen.add(torch_private.storage_key(output))
            layout = self.layouts.get(position)
            results.append(output if layout is None else in_layout(output, layout))
        return tuple(results)


class _Regions(contextlib.ExitStack):
    """The modes that are open."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[tuple[Region, contextlib.ExitStack]] = []

    def enter(self, wanted: tuple[Region, ...]) -> None:
        """Close and open the modes that differ from the wanted nesting."""
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
