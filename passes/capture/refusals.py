"""Refuse what cannot be captured, and explain a failed capture in the user's terms.

Every error names the module, the source line where known, the reason, and what to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Literal

from torch import nn
from torch.fx import Graph, Node

from zbcompile.errors import CaptureError, ZBCompileError
from zbcompile.passes import torch_private
from zbcompile.passes.aliasing import StorageGroups
from zbcompile.passes.capture.captured import Role
from zbcompile.passes.capture.state_guards import AttributeChanges
from zbcompile.passes.capture.trace_guards import TraceGuard
from zbcompile.passes.hooks import refused_kinds
from zbcompile.passes.ops import facts
from zbcompile.passes.provenance import MODEL_PREFIX, is_own_file, is_torch_file, source_of

__all__ = ["explain", "refuse_changed_state", "refuse_kept_tensors", "refuse_wrappers"]

_DATA_DEPENDENT = (
    "data-dependent",
    "Could not guard",
    "GuardOnDataDependent",
    "DataDependent",
    "_local_scalar_dense",
)
_REASONS = (
    (
        _DATA_DEPENDENT,
        "a Python branch or loop depends on tensor data",
        "replace it by torch.where or another tensor operation, or by a flag fixed before training; "
        "an argument that has one value in all steps: compile(..., constant=[its name])",
    ),
    (
        ("DynamicOutputShape",),
        "the shape of a result depends on tensor data",
        "give lengths and sizes as Python numbers, use an operation with a fixed shape, or name an argument "
        "that has one value in all steps in compile(..., constant=[its name])",
    ),
    (
        (".numpy() is not supported", "__array__"),
        "tensor data leaves torch for numpy",
        "do it with torch functions, or before the model and pass the result in",
    ),
    (
        ("UncapturedHigherOrderOp",),
        "a call that takes functions (such as torch.cond) cannot be split",
        "use torch.where or a loop in Python, or a choice that is made before training",
    ),
    (
        ("but got FakeTensor", "type must be tuple of ints", "Pending unbacked symbols"),
        "a size is taken from tensor data",
        "give lengths and sizes as Python numbers (pad sequences instead of packing them), or name an "
        "argument that has one value in all steps in compile(..., constant=[its name])",
    ),
    (
        ("Couldn't swap",),
        "a module is moved or cast inside the forward",
        "call module.to(...) once, before the model is compiled",
    ),
    (
        ("fake tensor in the exported program constant",),
        "a tensor leaves the graph and comes back",
        "do it with plain torch functions, or put it into a torch.autograd.Function",
    ),
    (
        ("non-nested SymInt",),
        "a Python set or dict holds sizes taken from tensor data",
        "give lengths and sizes as Python numbers, or name an argument that has one value in all steps in "
        "compile(..., constant=[its name])",
    ),
)
"""(words of torch's error, reason, fix); the first that matches is told."""


_WALKS = ("torch.Tensor.unbind", "torch.Tensor.__iter__")
_LOOP = (
    "a Python loop runs over a tensor whose length or values depend on data",
    "run over a fixed number of parts (all experts), each with the rows that torch.where gives it; an "
    "argument that has one value in all steps: compile(..., constant=[its name])",
)
_OTHER_EXPERTS = (
    'call model.set_experts_implementation("grouped_mm") (or "batched_mm"), or build the model with '
    'experts_implementation="grouped_mm"'
)


def _has_other_experts(module: nn.Module) -> bool:
    """Return whether a module of transformers loops over experts and could do otherwise."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return chosen == "eager" and hasattr(type(module).forward, "__wrapped__")


def explain(
    model: nn.Module,
    whole: nn.Module,
    error: BaseException,
    guard: TraceGuard,
    integers: Sequence[str] = (),
) -> ZBCompileError:
    """Return the error to raise for one that tracing ended with.

    Parameters
    ----------
    model
        The user's model.
    whole
        The model with its loss; module paths are looked up here.
    error
        What the trace raised. An error of this package is returned as it is.
    guard
        What the trace had called.
    integers
        Names of the arguments that hold whole numbers: code may have read one of them.

    Returns
    -------
    ZBCompileError
        A `CaptureError` that names operator, source line and module path where known.
    """
    if isinstance(error, ZBCompileError):
        return error
    line, path = _locate(whole, error)
    text = f"{type(error).__name__}: {error}"
    reason, fix = _reason(text)
    depends_on_data = any(mark in text for mark in _DATA_DEPENDENT)
    if depends_on_data and guard.failed in _WALKS:
        reason, fix = _LOOP
        if path and _has_other_experts(whole.get_submodule(path)):
            fix = _OTHER_EXPERTS
    op = guard.failed or (guard.read if depends_on_data else "")
    op = f" in {op}" if op else ""
    if guard.transform and not depends_on_data:
        reason, line = f"a torch.func transform cannot be traced here ({reason})", line or guard.transform
        fix = "use torch.autograd.grad(..., create_graph=True), or put it into a torch.autograd.Function"
    if guard.branches is None and op.endswith(("__bool__", "item", "equal", "allclose", "is_nonzero")):
        fix += "; a branch that takes one side in all steps: compile(..., fixed_branches=True)"
    if integers:
        fix = fix.replace("[its name])", f"[its name]) (one of {', '.join(integers)})")
    line = line or guard.suspect
    at = f" at {line}" if line else ""
    return CaptureError(f"cannot capture {type(model).__name__}: {reason}{op}{at}", where=path, fix=fix)


def _reason(text: str) -> tuple[str, str]:
    for marks, reason, fix in _REASONS:
        if any(mark in text for mark in marks):
            return reason, fix
    first = text.strip().splitlines()[0] if text.strip() else "unknown reason"
    return first[:300], ""


def _locate(model: nn.Module, error: BaseException) -> tuple[str, str]:
    """Return (file:line of the last frame outside torch, path of the innermost module) of a traceback."""
    names = {id(module): name for name, module in model.named_modules()}
    line, path = "", ""
    for frame, number in _frames(error.__traceback__):
        file = frame.f_code.co_filename
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            path = names[id(owner)]
        if not file.startswith("<") and not is_torch_file(file) and not is_own_file(file):
            line = f"{file}:{number}"
    return line, path


def _frames(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found


def refuse_changed_state(graph: Graph, roles: Mapping[str, Role]) -> None:
    """Refuse a forward that changes a parameter or a plain tensor in place; name it and the line.

    A buffer that it changes inside ``torch.utils.checkpoint`` is refused, too.
    """
    groups = StorageGroups(graph)
    for root, changes in groups.changes.items():
        for member in groups.members[root]:
            kind = roles[member.name].kind if member.op == "placeholder" else ""
            if kind == "buffer":
                _refuse_checkpointed(roles[member.name].name, changes)
            if kind not in ("parameter", "constant"):
                continue
            name = roles[member.name].name.removeprefix(MODEL_PREFIX)
            what = "a plain tensor" if name.startswith("lifted_tensor") else f"the plain tensor {name!r}"
            what = f"parameter {name!r}" if kind == "parameter" else what
            raise CaptureError(
                f"the forward changes {what} in place ({changes[0].target})",
                where=source_of(changes[0]),
                fix="change it after the step, or register it as a buffer",
            )


def _refuse_checkpointed(name: str, changes: Sequence[Node]) -> None:
    """Refuse a buffer that changes inside a checkpoint, in place or by an assignment."""
    for change in changes:
        made = change.all_input_nodes[1:] if facts(change.target).assigns else []
        if any(torch_private.in_checkpoint(node) for node in (change, *made)):
            raise CaptureError(
                f"the forward changes buffer {name!r} inside torch.utils.checkpoint: eager changes it again "
                "when it recomputes the block, a stage would not",
                where=source_of(change),
                fix="call the block itself, and choose what to hold with compile(..., recompute=...)",
            )


def refuse_kept_tensors(graph: Graph, roles: Mapping[str, Role], changes: AttributeChanges) -> None:
    """Refuse a plain tensor that the forward reads and then replaces: each call would read the first."""
    for placeholder in graph.find_nodes(op="placeholder"):
        name = roles[placeholder.name].name.removeprefix(MODEL_PREFIX)
        if roles[placeholder.name].kind == "constant" and name in changes.tensors and placeholder.users:
            raise CaptureError(
                f"the forward reads the plain tensor {name!r} and replaces it: calls would read the first",
                where=source_of(next(iter(placeholder.users))),
                fix=f"register {name.rpartition('.')[2]!r} as a buffer",
            )


def refuse_wrappers(model: nn.Module) -> None:
    """Refuse wrappers and parameter kinds that cannot be captured; say what works instead.

    Raises
    ------
    CaptureError
        For DistributedDataParallel, DataParallel, FSDP, DTensor parameters, lazy parameters, scripted
        modules, and hooks on gradients (nothing would call them).
    """
    for name, module in model.named_modules():
        kind = torch_private.wrapper_kind(module)
        if kind:
            raise CaptureError(
                f"cannot capture a module wrapped by {kind}",
                where=name or type(module).__name__,
                fix="compile the plain model; parallelism over data or shards comes after, on the stages",
            )
        _refuse_hooks("module", module, name or type(module).__name__)
    for name, parameter in model.named_parameters():
        _refuse_hooks("parameter", parameter, name)
        kind = torch_private.parameter_kind(parameter)
        if kind:
            raise CaptureError(
                f"cannot capture a parameter that is a {kind}",
                where=name,
                fix="compile the model before it is sharded, or initialise it first",
            )


def _refuse_hooks(on: Literal["module", "parameter"], holder: nn.Module | nn.Parameter, where: str) -> None:
    for kind in refused_kinds(on):
        if kind.table(holder):
            raise CaptureError(
                f"cannot capture a {on} with {kind.name}s: they would not run", where=where, fix=kind.fix
            )
