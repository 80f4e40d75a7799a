"""The straight line of the front end: capture, partition, split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.errors import UsageError
from zbcompile.passes.capture.capture import Captured, capture
from zbcompile.passes.capture.constant_masks import fold_constant_masks
from zbcompile.passes.partition.partition import Policy, StageSource, partition
from zbcompile.passes.split.backends import check_backend, with_backend
from zbcompile.passes.split.split_backward import Recompute, split_backward
from zbcompile.passes.split.stage_graphs import StageGraphs
from zbcompile.passes.split.staged_model import CutReport, StagedModel

__all__ = ["build_stages"]


def build_stages(
    model: nn.Module,
    num_stages: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    split_points: Sequence[str] | Policy | None = None,
    recompute: Recompute = "none",
    backend: str = "eager",
    device: torch.device | str | None = None,
) -> StagedModel:
    """Capture ``model`` on one example microbatch and return its stages as F, B, W and BW graphs.

    With ``loss_fn`` the last stage computes ``loss_fn(output, target)``; without it the model's own loss
    is looked for (the entry called loss, or a scalar result). A model on the meta device becomes stages
    for ``device`` (see `capture`). ``backend`` is one of `backends.BACKENDS`. Raises CaptureError, CutError,
    SplitError and UsageError; each names module path and source line where known.
    """
    check_backend(backend)
    captured = _with_usable_loss(
        capture(model, args, kwargs, target=target, loss_fn=loss_fn, device=device), loss_fn is not None
    )
    fold_constant_masks(captured)
    sources = partition(captured, num_stages, split_points=split_points)
    stages = split_backward(captured, sources, recompute=recompute, backend=backend)
    stages = with_backend(stages, backend)
    place = {port.name: (s.index, i) for s in stages for i, port in enumerate(s.outputs) if port.is_result}
    return StagedModel(
        stages,
        captured,
        sources,
        captured.input_spec,
        captured.result_spec,
        tuple(place[name] for name in captured.results),
        captured.loss,
        tuple(_report(captured, source, stage) for source, stage in zip(sources, stages, strict=True)),
        backend,
    )


def _with_usable_loss(captured: Captured, asked: bool) -> Captured:
    """Refuse a loss function that gives no real scalar; a model's own such value is no loss."""
    nodes = {node.name: node for node in captured.module.graph.nodes}
    value = None if captured.loss is None else nodes[captured.results[captured.loss]].meta.get("val")
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
        return captured
    if not asked:
        return replace(captured, loss=None)
    given = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else "no tensor"
    raise UsageError(
        "the loss is not a real scalar",
        where="loss_fn",
        needed="one floating-point number per microbatch",
        given=given,
        fix="reduce it with .mean() or .sum()",
    )


def _report(captured: Captured, source: StageSource, stage: StageGraphs) -> CutReport:
    own = [captured.state[name] for name in stage.parameters]
    return CutReport(
        stage.index,
        source.modules,
        sum(p.numel() for p in own),
        sum(p.numel() * p.element_size() for p in own),
        source.seconds,
        sum(port.num_bytes for port in stage.inputs if port.source[0] == "stage"),
        sum(port.num_bytes * len(port.targets) for port in stage.outputs),
        stage.saved_bytes,
        stage.saved_for_weight_bytes,
    )
