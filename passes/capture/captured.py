"""A captured model: one graph, and what its placeholders, modes and results are."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from zbcompile.passes.capture.custom_functions import FunctionCall
from zbcompile.passes.capture.nested_values import Spec
from zbcompile.passes.nodes import value_of

__all__ = ["Captured", "Region", "Role", "RoleKind"]

RoleKind = Literal["parameter", "buffer", "constant", "batch"]


@dataclass(frozen=True, slots=True)
class Role:
    """What a placeholder of a captured graph is.

    Attributes
    ----------
    kind
        ``"constant"`` is a tensor that the model's code made; ``"batch"`` an input of the call.
    name
        The original model's name of the tensor; of a batch input the placeholder's.
    position
        Flat index of a batch input; -1 for the others.
    """

    kind: RoleKind
    name: str
    position: int = -1


@dataclass(frozen=True, slots=True)
class Region:
    """A mode that nodes run under, from a ``with`` block of the model.

    Attributes
    ----------
    kind, settings
        ``"grad"`` with (enabled,), or ``"autocast"`` with (device type, dtype, enabled, cache enabled).
    number
        Tells two regions of equal settings apart.
    """

    kind: Literal["grad", "autocast"]
    settings: tuple[object, ...]
    number: int

    def mode(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that puts calls under this mode again."""
        if self.kind == "grad":
            (enabled,) = cast("tuple[bool]", self.settings)
            return torch.set_grad_enabled(enabled)
        device, dtype, enabled, _ = cast("tuple[str, torch.dtype, bool, bool]", self.settings)
        return torch.autocast(device, dtype, enabled, cache_enabled=True)


@dataclass(frozen=True)
class Captured:
    """The whole model as one graph.

    Attributes
    ----------
    module
        The graph: aten calls, and ``zbcompile::function`` for custom autograd Functions.
    roles
        Placeholder name -> its role.
    state
        Parameters and buffers that the graph reads, by canonical name: the model's own tensors.
    constants
        Name -> tensor that the model's code made.
    input_spec
        How the flat batch inputs sit in (args, kwargs, target).
    results
        Name of the node of each tensor leaf of ``result_spec``.
    result_spec
        How the results are nested.
    loss
        Position of the loss among the results; None without one.
    metrics
        Positions of what the loss function returns beside the loss.
    functions
        The custom Functions that the calls of ``zbcompile::function`` stand for, by key.
    read_buffers
        Name of a buffer that Python code of the model read -> the value that the graph was made for.
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
    read_buffers: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: tuple[int, ...] = ()

    @property
    def device(self) -> torch.device:
        """The device of the first tensor that the graph takes; the CPU where it takes none."""
        values = map(value_of, self.module.graph.find_nodes(op="placeholder"))
        return next((value.device for value in values if value is not None), torch.device("cpu"))
