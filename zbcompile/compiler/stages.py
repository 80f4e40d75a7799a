"""From a model to its stages: capture, fold_constant_masks, partition, split_backward, verify."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.compiler.observe import Observer, quiet
from zbcompile.errors import UsageError
from zbcompile.passes.capture.capture import capture
from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.capture.constant_masks import fold_constant_masks
from zbcompile.passes.capture.with_loss import with_loss
from zbcompile.passes.partition.cut_points import CutPoint
from zbcompile.passes.partition.cuts import piece_cuts
from zbcompile.passes.partition.homes import SameHomes
from zbcompile.passes.partition.partition import Policy, legal_cuts, partition
from zbcompile.passes.split.backends import check_backend, with_backend
from zbcompile.passes.split.recompute import Recompute, check_recompute
from zbcompile.passes.split.rewrites import FOLD_MASKS, check_known
from zbcompile.passes.split.split_backward import TracedStages
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.passes.verify.verify import cheap_to_verify
from zbcompile.passes.verify.verify import verify as compare_with_model
from zbcompile.schedule.devices import Device

__all__ = [
    "build_pieces",
    "build_stages",
    "captured_with_loss",
    "split_into_stages",
    "verify_stages",
]


def build_stages(
    model: nn.Module,
    num_stages: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    split_points: Sequence[str] | Policy | None = None,
    homes: Sequence[Sequence[str]] | None = None,
    recompute: Recompute | tuple[Recompute, ...] = "none",
    backend: str = "eager",
    device: torch.device | str | None = None,
    verify: bool | None = False,
    planned_for: Device | None = None,
    num_microbatches: int | None = None,
    constant: Collection[int] = (),
    fixed_branches: bool = False,
    known: Callable[[StagedModel], bool] | None = None,
    before_calls: Callable[[StagedModel], None] | None = None,
    skip: Collection[str] = (),
    observer: Observer = quiet,
    choose: Callable[[Captured], Sequence[CutPoint] | None] | None = None,
) -> StagedModel:
    """Capture a model on one example microbatch, cut it, and split the backward of every stage.

    Parameters
    ----------
    model, num_stages
        What to cut, and into how many pieces.
    args, kwargs, target
        One microbatch as the model and the loss get it.
    loss_fn
        The last stage computes ``loss_fn(output, target)``. Without it the model's own loss is looked for:
        the entry called loss, or a scalar result.
    split_points, recompute, backend
        See docs/reference/split.md; ``backend`` is one of `backends.BACKENDS`, ``recompute`` a level for
        all stages or one for each.
    homes
        Per stage, names of parameters and buffers that it has: cut so that they stay there.
    device
        Device that a model on the meta device is captured for.
    verify
        Whether F, B and W of all stages are compared with the untouched model; None: where that is cheap.
    planned_for
        Device on which the stages shall take equal times and recompute its price; None: the nominal one of
        what the model is captured for (`nominal_device`).
    num_microbatches
        Of a step, if every stage has a rank of its own.
    constant
        Flat positions of the tensors in (args, kwargs, target) whose values become part of the graphs.
    fixed_branches
        Whether branches on data take the side that they take on this microbatch, and are checked.
    known
        Says of stages whether they were compared before: then ``verify=None`` does not compare them again.
    before_calls
        Called with the stages before any of their calls runs; may refuse them.
    skip
        Names of rewrites to leave out (see `rewrites`).
    observer
        Called after each step; within ``split_backward``, by the name ``split_backward.joint`` and with a
        `JointStep`, after each rewrite of a joint graph.
    choose
        Returns the cuts of the captured model, of any number (`compiler.cut_choice`), or None.

    Returns
    -------
    StagedModel
        The stages as F, B, W and BW graphs, and what they were made from.

    Raises
    ------
    CaptureError, CutError, SplitError, UsageError
        Each names module path and source line where known.
    """
    check_backend(backend)
    check_known(skip)
    captured = captured_with_loss(
        model,
        args,
        kwargs,
        target=target,
        loss_fn=loss_fn,
        device=device,
        constant=constant,
        fixed_branches=fixed_branches,
    )
    observer("capture", captured)
    if FOLD_MASKS not in skip:
        fold_constant_masks(captured)
    observer("fold_constant_masks", captured)
    if choose is not None and homes is None and (cuts := choose(captured)) is not None:
        num_stages, split_points = len(cuts) + 1, lambda legal, count: cuts
    staged = split_into_stages(
        captured,
        num_stages,
        split_points=split_points if homes is None else SameHomes(captured, homes),
        recompute=recompute,
        backend=backend,
        planned_for=planned_for,
        num_microbatches=num_microbatches,
        skip=skip,
        observer=observer,
    )
    if before_calls is not None:
        before_calls(staged)
    verify_stages(
        model,
        staged,
        args,
        kwargs,
        target=target,
        loss_fn=loss_fn,
        verify=verify,
        known=known,
        observer=observer,
    )
    return staged


def verify_stages(
    model: nn.Module,
    staged: StagedModel,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    verify: bool | None = None,
    known: Callable[[StagedModel], bool] | None = None,
    observer: Observer = quiet,
) -> None:
    """Compare stages with the untouched model where that is asked for or cheap; as `build_stages` does.

    Raises
    ------
    SplitError
        They differ.
    """
    if verify is None:
        verify = cheap_to_verify(with_loss(model, loss_fn)) and not (known and known(staged))
    if verify:
        observer("verify", compare_with_model(model, staged, args, kwargs, target, loss_fn))


def build_pieces(
    model: nn.Module,
    most: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    planned_for: Device | None = None,
    **asked: Any,
) -> StagedModel:
    """Do as `build_stages`, with small pieces in place of stages: at most ``most`` (see `piece_cuts`)."""

    def choose(captured: Captured) -> Sequence[CutPoint]:
        return piece_cuts(legal_cuts(captured, planned_for), most)

    return build_stages(model, 1, args, kwargs, planned_for=planned_for, choose=choose, **asked)


def captured_with_loss(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    device: torch.device | str | None = None,
    constant: Collection[int] = (),
    fixed_branches: bool = False,
) -> Captured:
    """Capture a model on one example microbatch as `build_stages` does, with a loss that is a real scalar.

    Raises
    ------
    CaptureError, UsageError
        As `capture`; or the loss function gives no real scalar.
    """
    captured = capture(
        model,
        args,
        kwargs,
        target=target,
        loss_fn=loss_fn,
        device=device,
        constant=constant,
        fixed_branches=fixed_branches,
    )
    return _with_usable_loss(captured, loss_fn is not None)


def split_into_stages(
    captured: Captured,
    num_stages: int,
    *,
    split_points: Sequence[str] | Policy | None = None,
    recompute: Recompute | tuple[Recompute, ...] = "none",
    backend: str = "eager",
    planned_for: Device | None = None,
    num_microbatches: int | None = None,
    skip: Collection[str] = (),
    observer: Observer = quiet,
) -> StagedModel:
    """Cut a captured model and split the backward of every stage; the arguments are those of `build_stages`.

    The captured model stays as it is.

    Raises
    ------
    CutError, SplitError, UsageError
        Each names module path and source line where known.
    """
    sources = partition(
        captured,
        num_stages,
        split_points=split_points,
        device=planned_for,
        num_microbatches=num_microbatches,
    )
    observer("partition", sources)
    levels = recompute if isinstance(recompute, tuple) else (recompute,) * len(sources)
    for level in levels:
        check_recompute(level)
    traced = TracedStages(
        captured,
        sources,
        backend=backend,
        device=planned_for,
        skip=skip,
        observer=lambda step: observer("split_backward.joint", step),
    )
    stages = traced.split(levels)
    observer("split_backward", stages)
    stages = with_backend(stages, backend, skip, traced.compiled)
    observer("backend", stages)
    return StagedModel.of(captured, sources, stages, backend, traced)


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
