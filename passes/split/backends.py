"""Backends: what runs the graphs of a stage.

``StageGraphs --> StageGraphs`` with other calls and the same graphs. Contract out, per backend:

``eager``
    Runs the emitted calls one by one, element-wise ones in place where `in_place` allows: the bits of
    autograd.
``inductor``
    Compiles F, B, W and BW each with torch's inductor. Chains of element-wise calls become one kernel, which
    also makes recomputing them nearly free, so that a price for recompute saves more memory than in eager. It
    rounds differently (about 1e-7 relative per operation); random calls stay eager's and draw the same masks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch.fx import GraphModule

from zbcompile.errors import SplitError, UsageError
from zbcompile.passes import torch_private
from zbcompile.passes.split.in_place import written_in_place
from zbcompile.passes.split.rewrites import WRITE_IN_PLACE
from zbcompile.passes.split.stage_graphs import GraphCall, Graphs, StageGraphs

__all__ = ["BACKENDS", "check_backend", "compile_graph", "with_backend"]

BACKENDS = ("eager", "inductor")


def check_backend(backend: str) -> None:
    """Raise UsageError for an unknown backend or one that cannot work on this machine."""
    if backend not in BACKENDS:
        raise UsageError("unknown backend", given=backend, fix=f"use one of {', '.join(BACKENDS)}")
    if backend == "inductor" and (missing := torch_private.missing_compiler()):
        raise UsageError(
            f'backend="inductor" needs a C++ compiler: {missing}',
            fix='install g++ or clang (or set CXX to one), or use backend="eager"',
        )


def with_backend(
    stages: Sequence[StageGraphs],
    backend: str,
    skip: Collection[str] = (),
    compiled: dict[int, tuple[GraphCall, ...]] | None = None,
) -> tuple[StageGraphs, ...]:
    """Return the stages with their graphs run by ``backend``; graphs that stages share are compiled once.

    Without the rewrite `rewrites.WRITE_IN_PLACE` the eager backend runs the graphs as they were split.
    ``compiled`` has what was made before, by the identity of forward graphs that are still alive.

    Raises
    ------
    UsageError
        The backend is unknown or cannot work on this machine.
    SplitError
        Inductor refuses a graph; names stage and graph.
    """
    check_backend(backend)
    compiled = {} if compiled is None else compiled
    made = []
    for stage in stages:
        key = id(stage.graphs.forward)
        if key not in compiled:
            compiled[key] = tuple(compile_graph(stage, name, backend, skip) for name in Graphs.__slots__)
        made.append(replace(stage, calls=compiled[key]))
    return tuple(made)


def compile_graph(stage: StageGraphs, name: str, backend: str, skip: Collection[str] = ()) -> GraphCall:
    """Return one graph of a stage, named as in `Graphs`, as a call of ``backend``.

    Raises
    ------
    SplitError
        Inductor refuses the graph.
    """
    module: GraphModule = getattr(stage.graphs, name)
    if backend == "eager":
        return torch_private.call_of(module if WRITE_IN_PLACE in skip else written_in_place(module))
    if not any(node.op == "call_function" for node in module.graph.nodes):
        return torch_private.call_of(module)
    try:
        return torch_private.inductor_compile(module)
    except Exception as error:
        raise SplitError(
            f"inductor cannot compile {name}: {str(error).strip().splitlines()[0]}",
            where=f"stage {stage.index}",
            fix='use backend="eager"',
        ) from error
