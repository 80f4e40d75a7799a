"""Measure what stages cost: times of F, B, W and BW on this machine, bytes from the graphs.

``tuple[StageGraphs] + one microbatch --> Profile``. Contract in: stages with weights. Contract out: every
time is the median of several runs after a warm-up, on the real inputs of the stage; `Profile.unsteady` names
the times whose runs differ widely; bytes are exact.
Parameters, buffers and random state are left as they were.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from zbcompile.passes.split.stage_graphs import StageGraphs
from zbcompile.runtime.wiring import RunnableStage, Wiring
from zbcompile.schedule.costs import Edge, Profile, StageCost
from zbcompile.schedule.spread import unsteady

__all__ = ["OPTIMIZER_SLOTS", "cost_of", "edges_of", "measure", "snapshot_bytes", "static_bytes_of"]

OPTIMIZER_SLOTS = 2
"""Tensors like the parameter that the optimizer keeps per parameter: AdamW's two moments."""
_SECONDS_PER_STAGE = 2.0

_Times = tuple[int, int, int, int]
"""Of F, B, W and BW in ns."""
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def measure(
    stages: Sequence[StageGraphs],
    state: Mapping[str, Tensor],
    microbatch: Sequence[Tensor],
    *,
    repeats: int = 5,
    together: bool = False,
    others: Sequence[Sequence[StageGraphs]] | None = None,
) -> Profile:
    """Time every stage, and what else it may run as.

    Parameters
    ----------
    stages
        In order.
    state
        Parameters and buffers by name.
    microbatch
        The flat batch inputs of one microbatch.
    repeats
        How often a stage is timed, unless that takes longer than two seconds.
    together
        Whether other processes time the same stages at the same time: then as often as was asked for.
    others
        Per stage the same stage at other levels of recompute: its variants. They are timed in turns with it.
    """
    values: dict[str, Tensor] = {}
    costs, limit_s = [], math.inf if together else _SECONDS_PER_STAGE
    repeated: dict[tuple[str, str], list[int]] = {}
    with torch.no_grad(), torch.random.fork_rng():
        for k, stage in enumerate(stages):
            inputs = [
                microbatch[p.source[1]] if p.source[0] == "batch" else values[p.name] for p in stage.inputs
            ]
            ways = (stage, *(others[k] if others else ()))
            outputs, samples = _time_stage(ways, state, inputs, repeats, limit_s)
            times = [_medians(way, found) for way, found in zip(ways, samples, strict=True)]
            repeated |= _by_kind(f"stage {k}", samples)
            values.update({p.name: t for p, t in zip(stage.outputs, outputs, strict=True)})
            own = sum(state[n].nbytes for n in stage.trainable)
            costs.append(cost_of(ways, times, static_bytes_of(stage, state), own))
    device = stages[0].inputs[0].device if stages[0].inputs else "cpu"
    source = f"measured on {device}, torch {torch.__version__}"
    return Profile(tuple(costs), edges_of(stages), source=source, unsteady=unsteady(repeated))


def _by_kind(place: str, samples: Sequence[Sequence[_Times]]) -> dict[tuple[str, str], list[int]]:
    """Return the repeats of a stage by kind; those of its levels of recompute are named by their number."""
    return {
        (place if level == 0 else f"{place} with recompute {level}", kind): list(values)
        for level, found in enumerate(samples)
        for kind, values in zip(("F", "B", "W", "BW"), zip(*found, strict=True), strict=True)
    }


def cost_of(
    ways: Sequence[StageGraphs],
    times: Sequence[_Times],
    static_bytes: int,
    gradient_bytes: int,
) -> StageCost:
    """Return the cost of a stage, the first of ``ways``, with the others as its variants.

    Parameters
    ----------
    ways
        One stage at several levels of recompute.
    times
        Of F, B, W and BW in ns, for each.
    static_bytes, gradient_bytes
        Of the stage, at every level.
    """
    stage, *variants = (
        StageCost(
            *ns,
            way.saved_bytes,
            way.saved_for_weight_bytes,
            static_bytes,
            name=way.title,
            gradient_bytes=gradient_bytes,
        )
        for way, ns in zip(ways, times, strict=True)
    )
    return replace(stage, variants=tuple(variants))


def static_bytes_of(stage: StageGraphs, state: Mapping[str, Tensor]) -> int:
    """Return the bytes of a stage's parameters, buffers, gradients and optimizer state."""
    total = sum(state[n].nbytes for n in (*stage.parameters, *stage.buffers))
    return total + (1 + OPTIMIZER_SLOTS) * sum(state[n].nbytes for n in stage.trainable)


def snapshot_bytes(trained_bytes: int) -> int:
    """Return what a copy of parameters of some bytes takes together with one of their optimizer's state."""
    return (1 + OPTIMIZER_SLOTS) * trained_bytes


def edges_of(stages: Sequence[RunnableStage]) -> tuple[Edge, ...]:
    """Return what flows between stages, in bytes per microbatch."""
    ports = Wiring.of(stages).ports
    edges = []
    for backward, source, target in sorted(ports):
        if backward:
            continue
        back = ports.get((True, target, source), ())
        edges.append(
            Edge(
                source,
                target,
                sum(p.num_bytes for p in ports[False, source, target]),
                sum(p.num_bytes for p in back),
                bool(back),
            )
        )
    return tuple(edges)


def _time_stage(
    ways: Sequence[StageGraphs],
    state: Mapping[str, Tensor],
    inputs: list[Tensor],
    repeats: int,
    limit_s: float,
) -> tuple[list[Tensor], list[list[_Times]]]:
    """Return the stage's outputs, and for each way the times of its runs."""
    samples: list[list[_Times]] = [[] for _ in ways]
    began = time.perf_counter()
    outputs: list[Tensor] = []
    for turn in range(repeats + 1):
        for way, found in zip(ways, samples, strict=True):
            outputs, times = _time_once(way, state, inputs)
            if turn:
                found.append(times)
        if turn and time.perf_counter() - began > limit_s:
            break
    return outputs, samples


def _medians(stage: StageGraphs, samples: Sequence[_Times]) -> _Times:
    """Return the median times; W and BW of a stage whose inputs want no gradient are the same calls."""
    f, b, w, bw = ([int(ns) for ns in column] for column in zip(*samples, strict=True))
    if not any(port.has_gradient for port in stage.inputs):
        w = bw = [*w, *bw]
    return (
        int(statistics.median(f)),
        int(statistics.median(b)),
        int(statistics.median(w)),
        int(statistics.median(bw)),
    )


def _time_once(
    stage: StageGraphs, state: Mapping[str, Tensor], inputs: list[Tensor]
) -> tuple[list[Tensor], _Times]:
    """Return the outputs of one run, and the times of F, B, W and BW in ns."""
    f, (outputs, saved) = _timed(stage, stage.run_forward, _unchanged(stage, state), list(inputs))
    b, (_, saved) = _timed(stage, stage.run_backward_input, saved, _tangents(stage))
    w, _ = _timed(stage, stage.run_backward_weight, saved)
    _, saved = stage.run_forward(_unchanged(stage, state), list(inputs))
    bw, _ = _timed(stage, stage.run_full_backward, saved, _tangents(stage))
    return outputs, (f, b, w, bw)


def _unchanged(stage: StageGraphs, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state with copies of the buffers that F changes: code may ask for their values."""
    return {**state, **{name: state[name].clone() for name in stage.mutated}}


def _tangents(stage: StageGraphs) -> list[Tensor | None]:
    """Return a gradient of ones for each output that takes one."""
    return [
        torch.ones(p.shape, dtype=p.dtype, device=p.device) if p.has_gradient else None for p in stage.outputs
    ]


def _timed(
    stage: StageGraphs,
    call: Callable[_Arguments, _Result],
    *args: _Arguments.args,
    **kwargs: _Arguments.kwargs,
) -> tuple[int, _Result]:
    """Return the time of a call in ns, and its result."""
    device = stage.outputs[0].device if stage.outputs else torch.device("cpu")
    _synchronize(device)
    begin = time.perf_counter_ns()
    result = call(*args, **kwargs)
    _synchronize(device)
    return time.perf_counter_ns() - begin, result


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
