"""Equal stages: a hash of what the split sees of a stage, and one split handed to all that share it.

``StageSource --> 64 hex digits``. Two stages with one hash give the same F, B and W graphs up to names:
it covers the arguments (role, shape, stride, dtype, device, requires_grad), the calls with their wiring,
constants by content, the modes that they run under, and the outputs that take a gradient. It leaves out
names, positions in the model and the values of parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from zbcompile.passes.capture.captured import Captured
from zbcompile.passes.capture.custom_functions import FunctionCall, is_function_call
from zbcompile.passes.capture.nested_values import Spec
from zbcompile.passes.partition.partition import StageSource
from zbcompile.passes.split.stage_graphs import StageGraphs
from zbcompile.passes.torch_private import OpOverload

__all__ = ["renamed", "structural_hash"]

_EXACT = (str, bytes, int, float, complex, bool, type(None))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def structural_hash(
    source: StageSource, captured: Captured, needs_gradient: Sequence[bool], live: Iterable[int]
) -> str:
    """SHA-256 of the stage's structure.

    needs_gradient : per input of the stage. live : positions of the outputs that take a gradient.
    A value that cannot be compared by content (an arbitrary object in a call) counts by identity, which
    can only make two equal stages look different.
    """
    holes = [node for node in source.module.graph.nodes if node.op == "placeholder"]
    head: list[object] = ["live", *sorted(live)]
    for hole, role in zip(holes, source.roles, strict=False):
        value = captured.constants[role.name] if role.kind == "constant" else captured.state[role.name]
        parameter = isinstance(value, nn.Parameter)
        head += [role.kind, parameter, value.requires_grad, _tensor(value), _tensor(hole.meta["val"])]
    for hole, wire, needs in zip(holes[len(source.roles) :], source.inputs, needs_gradient, strict=True):
        head += [wire.source[0], needs, _tensor(hole.meta["val"])]
    body = _Body(source.module, captured.functions)
    return _digest([*head, *body.words()])


@dataclass
class _Body:
    """Turns the calls of one graph into a flat list of words; nodes become their position."""

    module: GraphModule
    functions: Mapping[int, FunctionCall]

    def words(self) -> list[object]:
        found: list[object] = []
        self.position: dict[Node, int] = {}
        self.regions: dict[int, int] = {}
        for node in self.module.graph.nodes:
            self.position[node] = len(self.position)
            if node.op == "placeholder":
                continue
            found += [node.op, self._target(node), *self._modes(node)]
            args = node.args
            if is_function_call(node.target):
                found.append(self._function(self.functions[args[0]]))
                args = args[1:]
            found += [self._word(args), self._word(node.kwargs), self._shape(node)]
        return found

    def _target(self, node: Node) -> object:
        if node.op == "output":
            return ""
        if node.op == "get_attr":
            return self._attribute(_reach(self.module, str(node.target)))
        if isinstance(node.target, OpOverload):
            return str(node.target)
        return _identity(node.target)

    def _attribute(self, value: object) -> object:
        if isinstance(value, GraphModule):
            return _digest(_Body(value, self.functions).words())
        return _content(value) if isinstance(value, Tensor) else _identity(value)

    def _modes(self, node: Node) -> list[object]:
        """The autocast and grad regions around a call; two regions of equal settings stay two."""
        regions = node.meta.get("region", ())
        return [
            (r.kind, self._word(r.settings), self.regions.setdefault(r.number, len(self.regions)))
            for r in regions
        ]

    def _function(self, call: FunctionCall) -> object:
        return (_identity(call.cls), _identity(call.forward), self._spec(call.arguments))

    def _spec(self, spec: Spec) -> object:
        return (
            spec.kind,
            self._word(spec.value),
            self._word(spec.keys),
            tuple(map(self._spec, spec.children)),
        )

    def _shape(self, node: Node) -> object:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, tuple | list):
            return tuple(_tensor(v) if isinstance(v, Tensor) else type(v).__name__ for v in value)
        return ""

    def _word(self, value: object) -> object:
        if isinstance(value, Node):
            return ("node", self.position[value])
        if isinstance(value, tuple | list):
            return (type(value).__name__, *(self._word(item) for item in value))
        if isinstance(value, Mapping):
            return ("dict", *((self._word(k), self._word(v)) for k, v in value.items()))
        if isinstance(value, slice):
            return ("slice", self._word(value.start), self._word(value.stop), self._word(value.step))
        if isinstance(value, Tensor):
            return _content(value)
        return _plain(value)


def _plain(value: object) -> object:
    if type(value) in _EXACT:
        return (type(value).__name__, repr(value))
    return repr(value) if isinstance(value, _NAMED) else _identity(value)


def _reach(module: nn.Module, path: str) -> object:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _tensor(value: Any) -> str:
    return f"{tuple(value.shape)} {tuple(value.stride())} {value.dtype} {value.device}"


def _content(value: Tensor) -> object:
    """Shape and bytes of a constant; identity where there are no bytes (meta and fake tensors)."""
    if value.device.type != "cpu" or type(value) not in (Tensor, nn.Parameter):
        return _identity(value)
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return (_tensor(value), hashlib.sha256(raw).hexdigest())


def _identity(value: object) -> str:
    kind = getattr(value, "__qualname__", type(value).__name__)
    return f"{getattr(value, '__module__', '')}.{kind}@{id(value)}"


def _digest(words: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for word in words:
        digest.update(repr(word).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def renamed(stage: StageGraphs, first: StageSource, other: StageSource, captured: Captured) -> StageGraphs:
    """The stage made from ``first`` as the stage of ``other``, which has the same structure.

    Graphs and layout positions are shared; index, names, ports and constants become those of ``other``.
    """
    names = {a.name: b.name for a, b in zip(first.roles, other.roles, strict=True) if a.kind != "constant"}
    layout = replace(
        stage.layout,
        early=tuple((names[name], position) for name, position in stage.layout.early),
        late=tuple(names[name] for name in stage.layout.late),
        full=tuple(names[name] for name in stage.layout.full),
    )
    ports = [
        tuple(
            replace(
                port,
                name=wire.name,
                source=wire.source,
                targets=wire.targets,
                is_result=wire.is_result,
                is_loss=wire.is_loss,
            )
            for port, wire in zip(old, wires, strict=True)
        )
        for old, wires in ((stage.inputs, other.inputs), (stage.outputs, other.outputs))
    ]
    return replace(
        stage,
        index=other.index,
        inputs=ports[0],
        outputs=ports[1],
        parameters=tuple(names[name] for name in stage.parameters),
        trainable=tuple(names[name] for name in stage.trainable),
        buffers=tuple(names[name] for name in stage.buffers),
        mutated=tuple(names[name] for name in stage.mutated),
        constants=tuple(captured.constants[r.name] for r in other.roles if r.kind == "constant"),
        layout=layout,
    )
