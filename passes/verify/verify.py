"""Verify at compile time: compare F, B and W of all stages with the untouched model under autograd.

``model + StagedModel + one microbatch --> VerifyReport``. Contract in: a model with weights. Contract out:
outputs, gradients of all parameters and buffers agree: to the bit, or within a tolerance where the order of
rounding differs (`rounding_reasons`). Buffers, gradients and random state are left as they were.

The microbatch runs through the original model (not the captured one: a comparison with that cannot see what
the capture lost) and through the stages in sequence, both from the same random state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from zbcompile.errors import SplitError, UsageError
from zbcompile.passes import torch_patches, torch_private
from zbcompile.passes.capture.nested_values import flatten, unflatten
from zbcompile.passes.capture.state_guards import attributes_kept
from zbcompile.passes.capture.with_loss import result_with_loss, with_loss
from zbcompile.passes.hooks import has_hooks
from zbcompile.passes.split.sequence import run_backward, run_forward
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.passes.verify.deviations import Deviation, Values, VerifyReport, deviations
from zbcompile.passes.verify.rounding_reasons import reasons_of, tolerance_of

__all__ = ["cheap_to_verify", "compare", "place_of", "verify"]

SMALL_BYTES = 1 << 30
"""Parameters of the largest model that is verified unless told otherwise."""


def verify(
    model: nn.Module,
    staged: StagedModel,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    target: object = None,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    tolerance: float | None = None,
) -> VerifyReport:
    """Compare stages with their model as `compare` does, and raise if a value is wrong.

    Raises
    ------
    SplitError
        A value differs by more than is allowed; names parameter, module, stage and the largest difference.
    UsageError
        As `compare`.
    """
    report = compare(model, staged, args, kwargs, target, loss_fn, tolerance=tolerance)
    if report.wrong:
        raise _mismatch(staged, report)
    return report


def compare(
    model: nn.Module,
    staged: StagedModel,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    target: object = None,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    tolerance: float | None = None,
) -> VerifyReport:
    """Compare F, B and W, then F and BW, of stages with their model on one microbatch like the compiled one.

    Every value must be equal to the bit unless `rounding_reasons` knows why it need not be; then its relative
    error may reach 1e-6 in float32, 2 eps in a narrower dtype, 1e-5 for stages compiled by inductor.

    Parameters
    ----------
    model
        The untouched model.
    staged
        Its stages.
    args, kwargs, target, loss_fn
        As for `capture`.
    tolerance
        A relative error allowed for every value instead, with or without a reason.

    Returns
    -------
    VerifyReport
        All values, right or wrong.

    Raises
    ------
    UsageError
        A model without weights (on the meta device), one that fails on the example or changes the shape of a
        buffer, or a gradient hook.
    """
    whole = with_loss(model, loss_fn)
    _check_real(whole)
    batch = [tensor.detach().clone() for tensor in staged.flat_inputs(args, kwargs, target)]
    allowed = tolerance_of(staged) if tolerance is None else tolerance
    with attributes_kept(model, whole), _untouched(whole, batch) as start:
        expected = _run_model(model, staged, batch, loss_fn)
        start()
        found = _run_stages(whole, staged, batch)
        start()
        fused = _run_stages(whole, staged, batch, fused=True)
    reasons = reasons_of(staged)
    values = deviations(found, expected, reasons)
    by_bw = [v for v in deviations(fused, expected, reasons) if v.kind == "gradient" and v not in values]
    values += tuple(replace(v, phase="BW") for v in by_bw)
    return VerifyReport(values, allowed, needs_reason=tolerance is None)


def _run_model(
    model: nn.Module, staged: StagedModel, batch: list[Tensor], loss_fn: Callable[..., Tensor] | None
) -> Values:
    args, kwargs, target = unflatten(staged.input_spec, [tensor.clone() for tensor in batch])
    with torch.enable_grad(), torch_patches.compiled_code_as_eager():
        try:
            value = model(*args, **kwargs)
            if loss_fn is not None:
                value = result_with_loss(loss_fn(value, target), value)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UsageError(
                f"the model itself fails on the example: {type(error).__name__}: {error}"
            ) from error
        leaves = flatten(value, results=True)[0]
        whole = with_loss(model, loss_fn)
        grads = {} if staged.loss is None else _autograd(whole, leaves[staged.loss])
    names = list(staged.result_spec.paths())
    return {
        "output": {name: leaf.detach() for name, leaf in zip(names, leaves, strict=True)},
        "gradient": grads,
        "buffer": {name: buffer.detach().clone() for name, buffer in whole.named_buffers()},
    }


def _autograd(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    """Return the gradient of every parameter that requires one, through ``.grad``, which the caller restores.

    (``torch.autograd.grad`` would not do: reentrant checkpoints refuse it.)
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    hooked = [name for name, p in named.items() if has_hooks(p)]
    if hooked:
        raise UsageError(
            f"cannot verify: {hooked[0]} has a gradient hook, which the check would trigger",
            fix="leave verify out, or put the hook on afterwards",
        )
    for parameter in named.values():
        parameter.grad = None
    torch.autograd.backward([loss])
    return {name: parameter.grad for name, parameter in named.items()}


def _run_stages(model: nn.Module, staged: StagedModel, batch: list[Tensor], *, fused: bool = False) -> Values:
    state = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    outputs, saves = run_forward(staged.stages, state | buffers, [tensor.clone() for tensor in batch])
    results = [outputs[stage][position] for stage, position in staged.result_ports]
    del outputs
    grads: dict[str, Tensor] = {} if staged.loss is None else run_backward(staged.stages, saves, fused=fused)
    names = list(staged.result_spec.paths())
    return {
        "output": dict(zip(names, results, strict=True)),
        "gradient": dict(grads),
        "buffer": dict(buffers),
    }


def place_of(staged: StagedModel, value: Deviation) -> str:
    """Return ``stage 1, weight of module layers.2``: who computes a value."""
    module, _, leaf = value.name.rpartition(".")
    holders = [str(s.index) for s in staged.stages if value.name in (*s.trainable, *s.buffers)]
    if value.kind == "output":
        position = list(staged.result_spec.paths()).index(value.name)
        holders, module = [f"{staged.result_ports[position][0]} or earlier"], ""
    place = f"stage {', '.join(holders)}" if holders else "in no stage"
    return f"{place}, {leaf} of module {module}" if module else place


def _mismatch(staged: StagedModel, report: VerifyReport) -> SplitError:
    value, count, allowed = report.wrong[0], len(report.wrong), report.tolerance
    more = f", and {count - 1} more values do" if count > 1 else ""
    return SplitError(
        f"the {value.words} differs from plain autograd{more}",
        where=place_of(staged, value),
        needed=f"within {allowed:.0e}: {value.reason}" if value.reason else "equal to the bit",
        given=value.size,
        fix="report the model; zbcompile bisect names the rewrite that does it; verify=False runs "
        "it unchecked, with gradients that are likely wrong",
    )


def cheap_to_verify(model: nn.Module) -> bool:
    """Return whether a model is verified unless told otherwise.

    It is on the CPU, has at most 1 GiB of parameters, and its parameters have no hooks.
    """
    parameters = list(model.parameters())
    small = sum(p.nbytes for p in parameters) <= SMALL_BYTES
    return small and all(p.device.type == "cpu" and not has_hooks(p) for p in parameters)


def _check_real(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise UsageError(
                "a model on the meta device has no values to verify",
                where=name,
                fix="compile with verify=False",
            )


@contextlib.contextmanager
def _untouched(model: nn.Module, batch: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
    """Restore buffers, gradients and random state at the end.

    Yields
    ------
    callable
        Restores all but the gradients in between.
    """
    grads = [(p, p.grad) for p in model.parameters()]
    held = torch_private.assigned_buffers(model)
    buffers = [
        (module, name, held[module, name], held[module, name].detach().clone()) for module, name in held
    ]
    devices = sorted({t.device.index or 0 for t in [*model.parameters(), *batch] if t.is_cuda})
    state, on_device = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in devices]

    def restore() -> None:
        resized: list[str] = []
        torch.set_rng_state(state)
        for device, value in zip(devices, on_device, strict=True):
            torch.cuda.set_rng_state(value, device)
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                torch_private.set_buffer(module, name, buffer)
                if buffer.shape != value.shape:
                    resized.append(f"{type(module).__name__}.{name} {list(value.shape)}")
                    resized[-1] += f" to {list(buffer.shape)}"
                    buffer.resize_(value.shape)
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        if resized:
            raise UsageError(
                f"the forward changes the shape of buffer {resized[0]}",
                fix="run the model once on the example before it is compiled",
            )

    try:
        yield restore
    finally:
        restore()
        for parameter, grad in grads:
            parameter.grad = grad
