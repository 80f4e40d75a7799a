"""Backends: who runs a stage's graphs. ``StageGraphs --> StageGraphs`` with other calls.

``eager`` runs the emitted calls one by one, element-wise ones in place where `in_place` allows: the same
bits as autograd. ``inductor`` compiles F, B, W and BW each with torch's inductor: element-wise chains
become one kernel, which also makes recomputing them nearly free, so that a price for recompute buys more
memory than in eager. It rounds differently (about 1e-7 relative per operation); random calls stay eager's
and draw the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from zbcompile.errors import SplitError, UsageError
from zbcompile.passes import torch_private
from zbcompile.passes.op_costs import seconds
from zbcompile.passes.split.in_place import written_in_place
from zbcompile.passes.split.stage_graphs import Graphs, StageGraphs
from zbcompile.passes.torch_private import OpOverload

__all__ = ["BACKENDS", "check_backend", "compile_graph", "recompute_seconds", "with_backend"]

BACKENDS = ("eager", "inductor")
FUSED_SHARE = 0.1
"""Of its time in eager, what an element-wise call costs when inductor fuses it into its user."""


def check_backend(backend: str) -> None:
    """Raise UsageError for an unknown backend or one that cannot work on this machine."""
    if backend not in BACKENDS:
        raise UsageError("unknown backend", given=backend, fix=f"use one of {', '.join(BACKENDS)}")
    if backend == "inductor" and (missing := torch_private.missing_compiler()):
        raise UsageError(
            f'backend="inductor" needs a C++ compiler: {missing}',
            fix='install g++ or clang (or set CXX to one), or use backend="eager"',
        )


def with_backend(stages: Sequence[StageGraphs], backend: str) -> tuple[StageGraphs, ...]:
    """The stages with their graphs run by ``backend``; graphs that stages share are compiled once.

    Raises
    ------
    UsageError : see `check_backend`. SplitError : inductor refuses a graph; names stage and graph.
    """
    check_backend(backend)
    compiled: dict[int, tuple[Callable[[list[Any]], Any], ...]] = {}
    made = []
    for stage in stages:
        key = id(stage.graphs.forward)
        if key not in compiled:
            compiled[key] = tuple(compile_graph(stage, name, backend) for name in Graphs.__slots__)
        made.append(replace(stage, calls=compiled[key]))
    return tuple(made)


def compile_graph(stage: StageGraphs, name: str, backend: str) -> Callable[[list[Any]], Any]:
    """One graph of a stage (named as in `Graphs`) as a call of ``backend``; raises SplitError."""
    module: GraphModule = getattr(stage.graphs, name)
    if backend == "eager":
        return written_in_place(module).forward
    if not any(node.op == "call_function" for node in module.graph.nodes):
        return module.forward
    try:
        return torch_private.inductor_compile(module)
    except Exception as error:
        raise SplitError(
            f"inductor cannot compile {name}: {str(error).strip().splitlines()[0]}",
            where=f"stage {stage.index}",
            fix='use backend="eager"',
        ) from error


def recompute_seconds(node: Node, backend: str) -> float:
    """Counted time of computing ``node`` once more under a backend."""
    time = seconds(node)
    if backend == "inductor" and _is_elementwise(node):
        return FUSED_SHARE * time
    return time


def _is_elementwise(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    return isinstance(node.meta.get("val"), Tensor)
