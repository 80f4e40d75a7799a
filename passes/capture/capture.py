"""Capture: an unmodified model -> one flat graph.

``nn.Module + example microbatch --> Captured``. Contract in: the model runs on the example. Contract
out: a graph of aten calls whose placeholders have roles, whose nodes carry ``module_path``, ``source``
and ``region`` (the autocast and grad modes they run under), and whose results are plain tensors.
The model, its buffers and the random state are left as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from zbcompile.errors import CaptureError, UsageError, ZBCompileError
from zbcompile.passes import torch_private
from zbcompile.passes.aliasing import StorageGroups, viewed_arguments
from zbcompile.passes.capture.collection import collection_paused
from zbcompile.passes.capture.custom_functions import FunctionCall, intercepted
from zbcompile.passes.capture.meta_capture import on_planned_device
from zbcompile.passes.capture.modes import modes_seen
from zbcompile.passes.capture.nested_values import Spec, flatten, unflatten
from zbcompile.passes.capture.refusals import (
    explain,
    refuse_changed_state,
    refuse_kept_tensors,
    refuse_wrappers,
)
from zbcompile.passes.capture.trace_guards import (
    Changes,
    TraceGuard,
    attributes_kept,
    random_kept,
    repeated,
    unchanged,
)
from zbcompile.passes.capture.with_loss import loss_module, loss_name, with_loss
from zbcompile.passes.provenance import is_own_file, is_torch_file

__all__ = ["Captured", "Region", "Role", "capture"]

PREFIX = "model."


@dataclass(frozen=True, slots=True)
class Role:
    """What a placeholder is: ``kind`` is parameter, buffer, constant or batch; ``name`` the original
    model's name, or for a batch input its flat index in ``position``."""

    kind: str
    name: str
    position: int = -1


@dataclass(frozen=True, slots=True)
class Region:
    """A mode that nodes run under; ``number`` tells two regions of equal settings apart."""

    kind: str
    settings: tuple[Any, ...]
    number: int


@dataclass(frozen=True)
class Captured:
    """The whole model as one graph.

    module : the graph; roles : placeholder name -> Role; state : parameters and buffers by canonical
    name (the model's own tensors); constants : tensors that the code made; input_spec : how the flat
    batch inputs sit in (args, kwargs, target); results : per tensor leaf of ``result_spec`` the node's
    name; loss : position of the loss among the results, or None; functions : the custom Functions that
    ``zbcompile::function`` calls stand for.
    """

    module: GraphModule
    roles: Mapping[str, Role]
    state: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    input_spec: Spec
    results: tuple[str, ...]
    result_spec: Spec
    loss: int | None
    functions: Mapping[int, FunctionCall]


class _Record:
    """What the traced call noted (outside the module, whose attributes export restores)."""

    spec: Spec | None = None
    loss: int | None = None

    def __init__(self, whole: nn.Module) -> None:
        self.held = {id(tensor): name for name, tensor in _named(whole)}
        self.changes = Changes()
        self.watch = TraceGuard({})


class _Whole(nn.Module):
    """Model and loss as a function of the flat batch inputs; remembers how its results were nested."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor] | None,
        spec: Spec,
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
        self.spec = spec
        self.record = record

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with self.mode, contextlib.ExitStack() as regions:
            for device, dtype in self.autocast:
                regions.enter_context(torch.autocast(device, dtype))
            return self._forward(tensors)

    def _forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        args, kwargs, target = unflatten(self.spec, tensors)
        (tables,), (loss_fn,) = self.tables, self.losses
        before = torch_private.assigned_buffers(tables)
        as_eager = torch_private.as_in_eager() if self.eager else contextlib.nullcontext()
        record, now = self.record, dict(_named(tables))
        record.watch = TraceGuard({key: now[name] for key, name in record.held.items()})
        hooks, kept = torch_private.without_tensor_hooks(), unchanged(tables, record.changes)
        with as_eager, modes_seen(), hooks, kept, record.watch:
            value = self.model(*args, **kwargs)
            loss = None if loss_fn is None else loss_fn(value, target)
        _as_changes(before, tables)
        if loss is not None:
            value = {"loss": loss, "output": value}
        results, record.spec = flatten(value, results=True)
        found = loss if loss is not None else _own_loss(value)
        record.loss = next((i for i, item in enumerate(results) if item is found), None)
        return tuple(results)


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    device: torch.device | str | None = None,
) -> Captured:
    """Capture ``model`` (and ``loss_fn(output, target)``) on one example microbatch.

    A model on the meta device is captured as if it were on ``device`` (default: where the example is,
    else the CPU); without meta tensors ``device`` is not looked at.

    An autocast region around this call becomes part of the graph, as if it stood in the model.

    Raises
    ------
    CaptureError : a branch on tensor data, an unsupported wrapper, or anything that export refuses;
        names the source line and the module path.
    """
    whole = with_loss(model, loss_fn)
    for root in dict.fromkeys((model, whole)):
        refuse_wrappers(root)
    tensors, spec = flatten((tuple(args), dict(kwargs or {}), target))
    if not tensors:
        raise UsageError("the example holds no tensor", fix="give example args or kwargs with a tensor")
    record = _Record(whole)
    with (
        intercepted() as functions,
        on_planned_device(whole, tensors, device) as (examples, mode),
        attributes_kept(model, whole),
        random_kept(),
        collection_paused(),
    ):

        def trace() -> Any:
            return _export(_Whole(model, loss_fn, spec, record, mode), examples)

        program = repeated(whole, record.changes, trace, trace())
    if record.spec is None:
        raise CaptureError(f"the forward of {type(model).__name__} did not return")
    state, names = _canonical(whole)
    graph, roles, constants, results = _inline(program, _roles(program, names))
    refuse_kept_tensors(graph, roles, record.changes)
    state = {role.name: state[role.name] for role in roles.values() if role.name in state}
    module = GraphModule(dict(program.graph_module.named_modules()), graph)
    return Captured(module, roles, state, constants, spec, results, record.spec, record.loss, functions)


def _as_changes(before: Mapping[tuple[nn.Module, str], Tensor], model: nn.Module) -> None:
    """``self.buffer = new`` --> ``self.buffer.copy_(new)``, so that the buffer is changed like any other."""
    for (module, name), new in torch_private.assigned_buffers(model).items():
        old = before.get((module, name))
        if old is new:
            continue
        if old is None or old.shape != new.shape or old.dtype != new.dtype:
            raise CaptureError(
                f"the forward gives buffer {name!r} of {type(module).__name__} another shape or dtype",
                fix="register the buffer with its final shape and dtype",
            )
        with torch.no_grad():
            old.copy_(new.detach())
        torch_private.set_buffer(module, name, old)


def _own_loss(value: Any) -> Any:
    """The loss that a model returns itself: the entry called loss, or its only value if a scalar."""
    if isinstance(value, Mapping):
        return value.get("loss")
    if isinstance(value, Tensor) and value.dim() == 0:
        return value
    if isinstance(value, tuple | list) and value:
        first = value[0]
        return first if isinstance(first, Tensor) and first.dim() == 0 else None
    found = getattr(value, "loss", None)
    return found if isinstance(found, Tensor) else None


def _export(whole: _Whole, tensors: list[Tensor]) -> Any:
    """Export the path that the model takes in eager; if that one cannot be exported, the path that it
    keeps for export. The first failure is the one to tell."""
    detached = tuple(tensor.detach() for tensor in tensors)
    modes = torch.inference_mode(False), torch.enable_grad(), torch_private.grouped_products_of_any_dtype()
    with modes[0], modes[1], modes[2], torch.random.fork_rng(devices=[]), torch_private.quiet():
        try:
            return torch.export.export(whole, detached, strict=False)
        except ZBCompileError:
            raise
        except Exception as error:
            whole.eager, first = False, whole.record.watch
            try:
                return torch.export.export(whole, detached, strict=False)
            except Exception:
                raise explain(whole.model, whole.tables[0], error, first) from error


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every name of every parameter and buffer."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _canonical(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and buffers by their first name, and every name -> the first name of its tensor."""
    named = _named(model)
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in named}
    return {name: tensor for name, tensor in named if names[name] == name}, names


def _inline(
    program: Any, roles: dict[str, Role]
) -> tuple[Graph, dict[str, Role], dict[str, Tensor], tuple[str, ...]]:
    """Copy the exported graph: roles on placeholders, regions on nodes, no region submodules."""
    source = program.graph_module
    graph = Graph()
    values: dict[Node, Any] = {}
    numbers = iter(range(1 << 30))
    outputs: Any = ()

    def copy_body(module: Any, values: dict[Node, Any], regions: tuple[Region, ...]) -> Any:
        for node in module.graph.nodes:
            if node.op == "output":
                return torch.fx.map_arg(node.args[0], lambda n: values[n])
            if node in values:
                continue
            call = torch_private.region_of_call(node) if node.op == "call_function" else None
            if call is not None:
                kind, settings, body, arguments = call
                inner = getattr(module, str(body.target))
                given = torch.fx.map_arg(arguments, lambda n: values[n])
                holes = inner.graph.find_nodes(op="placeholder")
                region = Region(kind, settings, next(numbers))
                values[node] = copy_body(inner, dict(zip(holes, given, strict=True)), (*regions, region))
            elif torch_private.is_higher_order(node):
                raise CaptureError(
                    f"cannot split {getattr(node.target, '__name__', node.target)}: it takes functions",
                    where=_where(node),
                    fix="use torch.where or a loop in Python, or a choice that is made before training",
                )
            elif node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), nn.Module):
                values[node] = node
            elif _is_pick(node) and not isinstance(values[node.args[0]], Node):
                values[node] = values[node.args[0]][node.args[1]]
            elif getattr(node.target, "__name__", "") != "_assert_tensor_metadata.default":
                values[node] = graph.node_copy(node, lambda n: values[n])
                values[node].meta.update(_place(node), region=regions)
        return ()

    outputs = copy_body(source, values, ())
    graph.output(outputs)
    kept = {role.name: program.constants[role.name] for role in roles.values() if role.kind == "constant"}
    refuse_changed_state(graph, roles)
    _protect_batch(graph, roles)
    _hoist_buffer_writes(graph, roles)
    for node in graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.erase_node(node)
    return graph, roles, kept, tuple(node.name for node in outputs)


def _protect_batch(graph: Graph, roles: Mapping[str, Role]) -> None:
    """A model that changes its input in place gets a copy: the caller's batch stays as it is."""
    groups = StorageGroups(graph)
    holes = list(graph.find_nodes(op="placeholder"))
    changed = [n for n in holes if roles[n.name].kind == "batch" and groups.root(n) in groups.changes]
    for node in changed:
        with graph.inserting_after(holes[-1]):
            copy = graph.call_function(torch.ops.aten.clone.default)
        node.replace_all_uses_with(copy)
        copy.args = (node,)
        copy.meta = {**node.meta, "region": (), "module_path": "", "source": ""}


def _hoist_buffer_writes(graph: Graph, roles: Mapping[str, Role]) -> None:
    """Move ``buffer.copy_(new)`` up to where ``new`` is made, unless the buffer is used in between."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if str(node.target) != "aten.copy_.default" or node.users:
            continue
        buffer, new = node.args[0], node.args[1]
        if not isinstance(new, Node) or buffer.op != "placeholder" or roles[buffer.name].kind != "buffer":
            continue
        uses = [user for user in buffer.users if user is not node]
        if any(viewed_arguments(user) for user in uses):
            continue
        made: Any = new.args[0] if str(new.target) == "aten.detach.default" and len(new.users) == 1 else new
        last = max([made, *uses], key=lambda n: position[n])
        if position[last] < position[node] and last.op != "placeholder":
            last.append(node)
            if made is not new:
                last.append(new)


def _is_pick(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _place(node: Node) -> dict[str, str]:
    """Module path and source line of a node: the last line outside torch, or the last one at all."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    path = path.removeprefix(PREFIX) if path != PREFIX.rstrip(".") else ""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    frames = [line.split(", in ")[0] for line in lines if line.startswith('File "')]
    places = [frame.removeprefix('File "').replace('", line ', ":") for frame in frames]
    places = [place for place in places if not is_own_file(place) and not place.startswith("<")]
    outside = [place for place in places if not is_torch_file(place)]
    return {"module_path": path, "source": (outside or places or [""])[-1]}


def _where(node: Node) -> str:
    found = _place(node)
    return ", ".join(part for part in (found["module_path"], found["source"]) if part)


def _roles(program: Any, names: Mapping[str, str]) -> dict[str, Role]:
    kinds = {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant"}
    roles: dict[str, Role] = {}
    position = 0
    for spec in program.graph_signature.input_specs:
        kind = kinds.get(spec.kind.name)
        if spec.kind.name == "USER_INPUT":
            roles[spec.arg.name] = Role("batch", spec.arg.name, position)
            position += 1
        elif kind is None:
            raise CaptureError(
                f"the forward uses an object that a graph cannot hold ({spec.kind.name})", where=spec.arg.name
            )
        else:
            name = spec.target if kind == "constant" else names[spec.target.removeprefix(PREFIX)]
            roles[spec.arg.name] = Role(kind, name)
    return roles
