"""Capture: an unmodified model becomes one flat graph.

``nn.Module + example microbatch --> Captured``. Contract in: the model runs on the example. Contract
out: a graph of aten calls whose placeholders have roles, whose nodes carry ``module_path``, ``source``
and ``region`` (the autocast and grad modes that they run under), and whose results are plain tensors.
The model, its buffers and the random state are left as they were.

    model(x), loss_fn(y, t)  -->  placeholders: parameters, buffers, constants, batch; aten calls; results
"""

from __future__ import annotations

import contextlib
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from zbcompile.errors import CaptureError, UsageError, ZBCompileError
from zbcompile.passes import torch_patches, torch_private
from zbcompile.passes.capture.branches import Answers, FixedBranches, answers_of
from zbcompile.passes.capture.caches import caches_kept
from zbcompile.passes.capture.captured import Captured, Role, RoleKind
from zbcompile.passes.capture.collection import collection_paused
from zbcompile.passes.capture.custom_functions import intercepted
from zbcompile.passes.capture.inline import inline
from zbcompile.passes.capture.meta_capture import meta_as_fake
from zbcompile.passes.capture.modes import traced_modes
from zbcompile.passes.capture.nested_values import Spec, flatten, unflatten
from zbcompile.passes.capture.refusals import explain, refuse_kept_tensors, refuse_wrappers
from zbcompile.passes.capture.state_guards import (
    AttributeChanges,
    attributes_kept,
    gradients_kept,
    random_kept,
    state_guarded,
    trace_until_settled,
)
from zbcompile.passes.capture.trace_guards import TraceGuard
from zbcompile.passes.capture.with_loss import loss_module, loss_name, result_with_loss, with_loss
from zbcompile.passes.provenance import MODEL_PREFIX
from zbcompile.signals import deferred_signals

__all__ = ["capture", "may_be_read"]

_FEW = 16
"""Elements of the largest buffer whose value code may read."""
_ROLES: dict[str, RoleKind] = {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant"}
"""Export's kind of an input -> role."""


def capture(
    model: nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    target: object = None,
    loss_fn: Callable[..., Tensor] | None = None,
    device: torch.device | str | None = None,
    constant: Collection[int] = (),
    fixed_branches: bool = False,
) -> Captured:
    """Capture a model, and its loss, on one example microbatch.

    An autocast region around this call becomes part of the graph, as if it stood in the model.

    Parameters
    ----------
    model
        Is not changed.
    args, kwargs
        The example as the model gets it.
    target
        What the loss gets beside the output.
    loss_fn
        Called with (output, target); may be a module with parameters, and may return (loss, metrics) with a
        dict of tensors. Without it the model's own loss is looked for.
    device
        A model on the meta device is captured as if it were on this device; see `meta_capture`. Without
        meta tensors it is not looked at.
    constant
        Positions among the flat tensors of (args, kwargs, target) whose values become part of the graph.
    fixed_branches
        Whether branches on data take the side that they take on the example, and are checked.

    Raises
    ------
    CaptureError
        A branch on tensor data, an unsupported wrapper, or anything that export refuses; names the source
        line and the module path.
    UsageError
        The example holds no tensor, or the device cannot be planned for.
    """
    whole = with_loss(model, loss_fn)
    for root in dict.fromkeys((model, whole)):
        refuse_wrappers(root)
    tensors, spec = flatten((tuple(args), dict(kwargs or {}), target))
    if not tensors:
        raise UsageError("the example holds no tensor", fix="give example args or kwargs with a tensor")
    pinned = {k: tensors[k].detach().clone() for k in constant}
    for tensor in pinned.values():
        if tensor.is_meta:
            raise UsageError(
                "a constant argument is on the meta device: it has no value", fix="give it on the CPU"
            )
    given = [k for k in range(len(tensors)) if k not in pinned]
    record = _Record(whole)
    if fixed_branches:
        record.answers = answers_of(model, whole, args, kwargs or {}, target, loss_fn)
    with (
        intercepted() as functions,
        meta_as_fake(whole, [tensors[k] for k in given], device) as (examples, mode),
        attributes_kept(model, whole),
        gradients_kept(whole.parameters()),
        random_kept(),
        collection_paused(),
        torch_patches.compiled_code_as_eager() as unwrapped,
    ):

        def trace() -> ExportedProgram:
            return _export(_Traced(model, loss_fn, spec, pinned, record, mode), examples)

        program = trace_until_settled(whole, record.changes, trace)
    if record.spec is None:
        raise CaptureError(f"the forward of {type(model).__name__} did not return")
    if unwrapped:
        warnings.warn(
            f"torch.compile'd code is taken as it was before torch.compile: {', '.join(unwrapped)}. "
            'To compile the stages, give backend="inductor"',
            stacklevel=2,
        )
    tables, names = _canonical(whole)
    roles = _roles(program, names, given)
    graph = inline(program, roles)
    refuse_kept_tensors(graph, roles, record.changes)
    constants = {
        r.name: cast("Tensor", program.constants[r.name]) for r in roles.values() if r.kind == "constant"
    }
    state = {role.name: tables[role.name] for role in roles.values() if role.name in tables}
    module = GraphModule(dict(program.graph_module.named_modules()), graph)
    results = tuple(node.name for node in cast("Sequence[Node]", graph.output_node().args[0]))
    read = {name: record.numbers[name] for name in sorted(record.guard.read_buffers)}
    return Captured(
        module,
        roles,
        state,
        constants,
        spec,
        results,
        record.spec,
        record.loss,
        functions,
        read,
        record.metrics,
    )


class _Record:
    """What the traced call noted (outside the module, whose attributes export restores).

    Attributes
    ----------
    held
        Id of a tensor of the model -> its name.
    numbers
        Name of a small buffer of whole numbers -> its value.
    changes, guard
        What the guards saw.
    answers
        What the example answers to questions that make a branch; None: they are refused.
    spec, loss, metrics
        How the results are nested, and which of them are the loss and what the loss function returns beside.
    """

    def __init__(self, whole: nn.Module) -> None:
        self.held = {id(tensor): name for name, tensor in _named(whole)}
        self.numbers = {name: b.clone() for name, b in whole.named_buffers() if may_be_read(b)}
        self.changes = AttributeChanges()
        self.guard = TraceGuard({})
        self.answers: Answers | None = None
        self.spec: Spec | None = None
        self.loss: int | None = None
        self.metrics: tuple[int, ...] = ()


class _Traced(nn.Module):
    """Model and loss as a function of the flat batch inputs: what export traces."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor] | None,
        spec: Spec,
        pinned: Mapping[int, Tensor],
        record: _Record,
        mode: contextlib.AbstractContextManager[object],
    ) -> None:
        super().__init__()
        self.mode = mode
        self.eager = True
        self.autocast = torch_private.ambient_autocast()
        self.model = model
        self.training = model.training
        self.tables = (with_loss(model, loss_fn),)  # in tuples: not registered a second time
        self.losses = (loss_fn,)
        loss = loss_module(model, loss_fn)
        if loss is not None:
            self.add_module(loss_name(self.tables[0]), loss)
        self.spec, self.pinned = spec, dict(pinned)
        self.record = record

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with self.mode, contextlib.ExitStack() as regions:
            for device, dtype in self.autocast:
                regions.enter_context(torch.autocast(device, dtype))
            return self._forward(tensors)

    def _forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        flat = [self.pinned[k] if k in self.pinned else next(rest) for k in range(self.spec.num_tensors)]
        args, kwargs, target = unflatten(self.spec, flat)
        (tables,), (loss_fn,) = self.tables, self.losses
        before = torch_private.assigned_buffers(tables)
        as_eager = torch_patches.patched("eager path") if self.eager else contextlib.nullcontext()
        record, now = self.record, dict(_named(tables))
        traced = {key: now[name] for key, name in record.held.items()}
        with torch_private.outside_the_trace():  # the forward may change them
            values = {name: value.clone() for name, value in record.numbers.items()}
        buffers = {name: (now[name], value) for name, value in values.items()}
        branches = None if record.answers is None else FixedBranches(record.answers)
        guard = TraceGuard(traced, sys._getframe(), list(self.pinned.values()), buffers, branches)
        record.guard = guard
        asked = torch_patches.Answers(guard.truth, guard.demand)
        with as_eager, traced_modes(asked), state_guarded(tables, record.changes), guard:
            value: object = self.model(*args, **kwargs)
            loss = None if loss_fn is None else loss_fn(value, target)
        _write_assigned_buffers(before, tables)
        if loss is not None:
            value = result_with_loss(loss, value)
        results, record.spec = flatten(value, results=True)
        found = _own_loss(value)
        if loss is not None:
            places = enumerate(record.spec.paths())
            record.metrics = tuple(k for k, path in places if path.startswith(".metrics."))
        record.loss = next((i for i, item in enumerate(results) if item is found), None)
        return tuple(results)


def _write_assigned_buffers(before: Mapping[tuple[nn.Module, str], Tensor], model: nn.Module) -> None:
    """``self.buffer = new`` --> ``self.buffer.copy_(new)``, so that the buffer is changed like any other."""
    for (module, name), new in torch_private.assigned_buffers(model).items():
        old = before.get((module, name))
        if old is new:
            continue
        if old is None or old.shape != new.shape or old.dtype != new.dtype:
            raise CaptureError(
                f"the forward gives buffer {name!r} of {type(module).__name__} another shape or dtype",
                fix="run the model once on such a batch before it is compiled, or register the final buffer",
            )
        with torch.no_grad():
            old.copy_(new.detach())
        torch_private.set_buffer(module, name, old)


def _own_loss(value: object) -> object:
    """Return the loss that a model returns itself.

    It is the entry called loss, the only value if a scalar, or of a tuple the first entry if a scalar, else
    its only scalar: ``(loss, logits)`` and ``(logits, loss)``.
    """
    if isinstance(value, Mapping):
        return value.get("loss")
    if isinstance(value, Tensor) and value.dim() == 0:
        return value
    if isinstance(value, tuple | list) and value:
        tensors = [item for item in value if isinstance(item, Tensor)]
        scalars = [item for item in tensors if item.dim() == 0 and item.is_floating_point()]
        return scalars[0] if len(scalars) == 1 or (scalars and scalars[0] is value[0]) else None
    found = getattr(value, "loss", None)
    return found if isinstance(found, Tensor) else None


def _export(whole: _Traced, tensors: Sequence[Tensor]) -> ExportedProgram:
    """Export the path that the model takes in eager.

    If that one cannot be exported, the path that the model keeps for export is; if that fails too, the first
    failure is told.
    """
    detached = tuple(tensor.detach() for tensor in tensors)
    modes = torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[])
    with modes[0], modes[1], modes[2], torch_patches.patched("fake tensors"), torch_patches.quiet():
        try:
            return _export_once(whole, detached)
        except ZBCompileError:
            raise
        except Exception as error:
            whole.eager, first = False, whole.record.guard
            try:
                return _export_once(whole, detached)
            except Exception:
                integers = _integers(whole, detached)
                raise explain(whole.model, whole.tables[0], error, first, integers) from error


def _integers(whole: _Traced, tensors: Sequence[Tensor]) -> list[str]:
    """Return the names of the model's arguments that hold whole numbers and are not pinned."""
    free = [path for k, path in enumerate(whole.spec.paths()) if k not in whole.pinned]
    pairs = zip(free, tensors, strict=True)
    found = [p for p, t in pairs if not t.is_floating_point() and not t.is_complex() and p[:3] != "[2]"]
    return [path.removeprefix("[1].").replace("[0]", "args", 1) for path in found]


def may_be_read(buffer: Tensor) -> bool:
    """Return whether code of a model may ask for the value of such a buffer: a few whole numbers."""
    whole = not buffer.is_floating_point() and not buffer.is_complex()
    return whole and buffer.numel() <= _FEW and not buffer.is_meta and buffer.layout is torch.strided


def _export_once(whole: _Traced, tensors: tuple[Tensor, ...]) -> ExportedProgram:
    # torch aborts the process where an interrupt comes in the middle of some of its calls.
    with caches_kept(), deferred_signals(signal.SIGINT):
        return torch.export.export(whole, tensors, strict=False)


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return every name of every parameter and buffer."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _canonical(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return parameters and buffers by their first name, and every name -> the first name of its tensor."""
    named = _named(model)
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in named}
    return {name: tensor for name, tensor in named if names[name] == name}, names


def _roles(program: ExportedProgram, names: Mapping[str, str], positions: Sequence[int]) -> dict[str, Role]:
    """Return the role of every placeholder.

    Parameters
    ----------
    program
        What export made.
    names
        Any name of a tensor -> its canonical one.
    positions
        Per batch input of the program, its flat index in the batch.
    """
    roles: dict[str, Role] = {}
    position = iter(positions)
    for spec in program.graph_signature.input_specs:
        placeholder, kind = spec.arg.name, _ROLES.get(spec.kind.name)
        if spec.kind.name == "USER_INPUT":
            roles[placeholder] = Role("batch", placeholder, next(position))
        elif kind is None or spec.target is None:
            raise CaptureError(
                f"the forward uses an object that a graph cannot hold ({spec.kind.name})", where=placeholder
            )
        else:
            name = spec.target if kind == "constant" else names[spec.target.removeprefix(MODEL_PREFIX)]
            roles[placeholder] = Role(kind, name)
    return roles
