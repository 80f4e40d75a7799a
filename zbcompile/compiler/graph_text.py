"""The graphs of all stages as readable text, one file per stage and phase.

    stage-1/forward.txt, stage-1/backward_input.txt, stage-1/backward_weight.txt, stage-1/full_backward.txt

Each starts with what enters and leaves; each call names shape and dtype, module path and source line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch.fx import GraphModule

from zbcompile.passes.split.stage_graphs import Graphs, Port, StageGraphs
from zbcompile.passes.torch_private import JointGraph

__all__ = ["graph_text", "joint_text", "stage_files", "stage_text"]


def stage_files(stages: Sequence[StageGraphs]) -> list[tuple[Path, str]]:
    """Return a relative path and a text for every graph of every stage, in order.

    A graph is shown as it runs: with the eager backend's writes in place, once that backend is chosen.
    """
    files = []
    first: dict[int, int] = {}
    for stage in stages:
        like = first.setdefault(id(stage.graphs), stage.index)
        for name, call in zip(Graphs.__slots__, stage.calls, strict=True):
            runs = getattr(call, "__self__", None)
            graph = runs if isinstance(runs, GraphModule) else getattr(stage.graphs, name)
            files.append(
                (Path(f"stage-{stage.index}") / f"{name}.txt", stage_text(stage, like) + graph_text(graph))
            )
    return files


def stage_text(stage: StageGraphs, like: int | None = None) -> str:
    """Return ports, bytes and parameters of a stage as comment lines.

    Parameters
    ----------
    stage
        The stage.
    like
        Index of the stage whose graphs it shares.
    """
    lines = [
        f"# stage {stage.index}: held F to B {stage.saved_bytes} B, B to W {stage.saved_for_weight_bytes} B",
        *_ports("in", stage.inputs),
        *_ports("out", stage.outputs),
        f"# parameters: {', '.join(stage.parameters) or '-'}",
        f"# buffers: {', '.join(stage.buffers) or '-'}; changed: {', '.join(stage.mutated) or '-'}",
    ]
    if like is not None and like != stage.index:
        lines.append(f"# same structure as stage {like}: module paths below are of that stage")
    return "\n".join(lines) + "\n"


def _ports(word: str, ports: Sequence[Port]) -> list[str]:
    return [
        f"# {word}: {port.name} {str(port.dtype).removeprefix('torch.')}{list(port.shape)} "
        f"from {port.source[0]} {port.source[1]}"
        + (f" to stage {', '.join(map(str, port.targets))}" if port.targets else "")
        + (", with gradient" if port.has_gradient else "")
        for port in ports
    ]


def joint_text(joint: JointGraph) -> str:
    """Return a joint graph as text, with the values of each role in comment lines.

    The roles are what counts: the graph's own list of results is that of the trace.
    """
    roles = (("output", joint.outputs), ("changed", joint.mutations), ("gradient", joint.gradients))
    lines = [f"# {role} {i}: {node.name}" for role, values in roles for i, node in sorted(values.items())]
    return "\n".join(lines) + "\n" + graph_text(joint.module)


def graph_text(module: GraphModule) -> str:
    """Return one graph as code with shapes, dtypes, module paths and source lines."""
    text: str = module.print_readable(print_output=False)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
