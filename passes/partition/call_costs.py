"""What every call of a captured graph costs in F, B and W, before anything is differentiated.

``Captured --> call -> CallCount``. Each kind of call (operator, shapes, arguments that take a gradient,
modes) runs once under autograd on fake tensors of its own, and the operators that run are counted. They are
those that the graphs of its stage will have, before the rewrites::

    linear(x, w), both with gradients   -->   F: mm;    B: mm;             W: mm
    silu(x)                             -->   F: silu;  B: silu_backward;  W: nothing

A call that cannot run alone (a custom Function, a recurrent layer that fake tensors take apart, a call inside
a torch.func transform, a size that depends on data) counts by its arguments and result; its backward counts
like one forward for gradients of inputs and one for those of parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import Argument

from zbcompile.passes.aliasing import StorageGroups, changed_arguments
from zbcompile.passes.capture.captured import Captured, Region
from zbcompile.passes.nodes import is_getitem, value_of
from zbcompile.passes.op_costs import OpCount, count_call, count_node, has_bounds, op_ns
from zbcompile.passes.ops import facts, namespace
from zbcompile.passes.partition.balance import Work
from zbcompile.passes.torch_patches import joint_trace_patched
from zbcompile.passes.torch_private import (
    OpOverload,
    TorchDispatchMode,
    enable_python_dispatcher,
    fake_mode,
    functorch_nesting,
    schema,
    tree_leaves,
    tree_map,
)
from zbcompile.schedule.devices import Device

__all__ = ["CallCount", "call_counts", "work_on"]


@dataclass(frozen=True, slots=True)
class CallCount:
    """What a call does in a step.

    Attributes
    ----------
    forward
        The operators that it runs in F.
    backward_input
        Those of the gradients of its arguments that come from the batch: its part of B.
    full_backward
        Those of all gradients: its part of B and W.
    differentiable
        Per tensor of its result, whether it takes a gradient.
    """

    forward: tuple[OpCount, ...]
    backward_input: tuple[OpCount, ...]
    full_backward: tuple[OpCount, ...]
    differentiable: tuple[bool, ...]


def work_on(device: Device, count: CallCount) -> Work:
    """Return the times of a call on a device."""
    forward, given, full = (
        sum(op_ns(one, device) for one in part)
        for part in (count.forward, count.backward_input, count.full_backward)
    )
    return Work(forward, given, full - given)


def call_counts(captured: Captured, groups: StorageGroups) -> dict[Node, CallCount]:
    """Return what every call of a captured graph does in a step. ``groups`` : of that graph."""
    counter = _Counter(captured, groups)
    modes = torch.inference_mode(False), torch.enable_grad()
    with modes[0], modes[1], joint_trace_patched(), enable_python_dispatcher():
        for node in captured.module.graph.nodes:
            counter.visit(node)
    counter.add_sums()
    return counter.counts


class _Counter:
    """One walk over a captured graph.

    Attributes
    ----------
    counts
        Call -> what it does.
    differentiable
        Value -> per tensor of it, whether it takes a gradient.
    from_batch
        Values that depend on the batch.
    known
        Kind of call -> what such a call does.
    """

    def __init__(self, captured: Captured, groups: StorageGroups) -> None:
        self.captured, self.groups = captured, groups
        self.counts: dict[Node, CallCount] = {}
        self.differentiable: dict[Node, tuple[bool, ...]] = {}
        self.from_batch: set[Node] = set()
        self.known: dict[Hashable, CallCount] = {}
        self._mode = fake_mode()
        self._depth = 0

    def visit(self, node: Node) -> None:
        """Count one node; those before it have been counted."""
        if node.op == "placeholder":
            self.differentiable[node] = (self._is_trained(node),)
            if self.captured.roles[node.name].kind == "batch":
                self.from_batch.add(node)
        if not self.from_batch.isdisjoint(node.all_input_nodes):
            self.from_batch.add(node)
        if node.op != "call_function":
            return
        step = functorch_nesting(node)
        self._depth += max(step, 0)
        if is_getitem(node):
            self.differentiable[node] = self._picked(node)
            self.counts[node] = CallCount((), (), (), self.differentiable[node])
        else:
            self.counts[node] = self._counted(node)
            self.differentiable[node] = self.counts[node].differentiable
            self._follow_changes(node)
        self._depth += min(step, 0)

    def add_sums(self) -> None:
        """Add, to the first call that uses a value, the sum of the gradients that come from its uses."""
        for node in self.counts:
            users = [n for n in node.users if any(self.differentiable.get(n, ()))]
            value = value_of(node)
            if (
                len(users) > 1
                and any(self.differentiable[node])
                and value is not None
                and _has_known_form(value)
            ):
                first = self.counts[users[0]]
                sums = _sums(value, len(users) - 1)
                self.counts[users[0]] = replace(
                    first,
                    backward_input=(*first.backward_input, *sums),
                    full_backward=(*first.full_backward, *sums),
                )

    def _is_trained(self, node: Node) -> bool:
        role = self.captured.roles[node.name]
        if role.kind not in ("parameter", "buffer"):
            return False
        return self.captured.state[role.name].requires_grad

    def _picked(self, node: Node) -> tuple[bool, ...]:
        source, entry = node.args
        flags = self.differentiable.get(cast("Node", source), ())
        made = cast("Node", source).meta.get("val")
        if not isinstance(made, tuple | list) or not isinstance(entry, int) or len(made) != len(flags):
            return (any(flags),)
        return (flags[entry],)

    def _follow_changes(self, node: Node) -> None:
        """A storage that a call fills with values that take a gradient takes one."""
        if any(self.differentiable[node]):
            for changed in changed_arguments(node):
                for member in self.groups.members[self.groups.root(changed)]:
                    if member in self.differentiable:
                        self.differentiable[member] = tuple(True for _ in self.differentiable[member])

    def _counted(self, node: Node) -> CallCount:
        if self._depth or not _runs_alone(node):
            return self._by_rule(node)
        key = self._kind(node)
        try:
            if key not in self.known:
                self.known[key] = self._run(node)
        except (RuntimeError, TypeError, ValueError):  # torch cannot run it apart from the others
            self.known[key] = self._by_rule(node)
        return self.known[key]

    def _by_rule(self, node: Node) -> CallCount:
        """Count a call by its arguments and result alone."""
        values = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
        wanted = [n for n in node.all_input_nodes if any(self.differentiable.get(n, ()))]
        taking = bool(wanted) and _gradients_on(node)
        count = count_node(node) if has_bounds(node) else OpCount(str(node.target), 0, 0, "float32")
        forward = () if count is None else (count,)
        kinds = {n in self.from_batch for n in wanted} if taking else set()
        return CallCount(
            forward,
            forward * (True in kinds),
            forward * len(kinds),
            tuple(taking and (v.is_floating_point() or v.is_complex()) for v in values),
        )

    def _kind(self, node: Node) -> Hashable:
        """Return what a call has in common with all calls that count alike."""
        inputs = node.all_input_nodes
        position = {n: f"%{i}" for i, n in enumerate(inputs)}
        arguments = repr(torch.fx.map_arg((node.args, node.kwargs), lambda n: position[n]))
        regions = tuple((r.kind, r.settings) for r in _regions(node))
        return node.target, arguments, regions, tuple(self._form(n) for n in inputs)

    def _form(self, node: Node) -> Hashable:
        flags = (node in self.from_batch, *self.differentiable.get(node, ()))
        values = tree_leaves(node.meta.get("val"))
        forms = (
            (tuple(v.shape), v.stride(), v.dtype, str(v.device)) if isinstance(v, Tensor) else repr(v)
            for v in values
        )
        return (*forms, flags)

    def _run(self, node: Node) -> CallCount:
        """Run a call under autograd on fake tensors and count the operators of its forward and backward."""
        given: dict[Node, object] = {}
        leaves: dict[bool, list[Tensor]] = {True: [], False: []}
        with self._mode:
            for n in node.all_input_nodes:
                given[n] = self._fresh(n, leaves[n in self.from_batch])
        if schema(cast("OpOverload", node.target)).is_mutable:  # no leaf that takes a gradient may be changed
            given = {n: tree_map(_copied, value) for n, value in given.items()}
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: cast("Argument", given[n]))
        with self._mode, contextlib.ExitStack() as modes:
            for region in _regions(node):
                modes.enter_context(region.mode())
            with _Recorder() as forward:
                result = cast("Callable[..., object]", node.target)(*args, **kwargs)
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        ends = [value for value in made if value.requires_grad]
        with self._mode:
            of_values = _gradients(ends, leaves[True])
            of_all = _gradients(ends, leaves[True] + leaves[False]) if leaves[False] else of_values
        return CallCount(
            tuple(forward.counts), of_values, of_all, tuple(value.requires_grad for value in made)
        )

    def _fresh(self, node: Node, leaves: list[Tensor]) -> object:
        """Return fake arguments like a node's value; those that take a gradient are added to ``leaves``."""
        flags = iter(self.differentiable.get(node, ()))

        def fresh(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            if next(flags, False) and (made.is_floating_point() or made.is_complex()):
                leaves.append(made.requires_grad_(True))
            return made

        return tree_map(fresh, node.meta["val"])


def _gradients(ends: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[OpCount, ...]:
    """Count the operators that compute the gradients of ``leaves``, given those of ``ends``."""
    if not ends or not leaves:
        return ()
    tangents = [torch.empty_like(value) for value in ends]
    with _Recorder() as backward:
        torch.autograd.grad(ends, leaves, tangents, retain_graph=True, allow_unused=True)
    return tuple(backward.counts)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: list[OpCount] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        count = count_call(func, args, kwargs or {}, result)
        if count is not None:
            self.counts.append(count)
        return result


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) and value.requires_grad else value


def _regions(node: Node) -> tuple[Region, ...]:
    return cast("tuple[Region, ...]", node.meta.get("region", ()))


def _gradients_on(node: Node) -> bool:
    """Return whether the innermost grad mode of a call, if it is under one, is on."""
    modes = [bool(region.settings[0]) for region in _regions(node) if region.kind == "grad"]
    return modes[-1] if modes else True


def _runs_alone(node: Node) -> bool:
    """Return whether a call can run apart from the others on tensors like its arguments."""
    if not isinstance(node.target, OpOverload) or namespace(node.target) == "zbcompile":
        return False
    return not facts(node.target).whole and all(map(_is_plain, (node, *node.all_input_nodes)))


def _is_plain(node: Node) -> bool:
    """Return whether a value holds dense tensors of known sizes and Python's own numbers alone."""
    return "val" in node.meta and all(map(_has_known_form, tree_leaves(node.meta["val"])))


def _has_known_form(value: object) -> bool:
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided
        return plain and all(isinstance(n, int) for n in (*value.shape, *value.stride()))
    return isinstance(value, int | float | bool | complex | str | type(None))


def _sums(value: Tensor, times: int) -> tuple[OpCount, ...]:
    """Return what it takes to add ``times`` more gradients to that of a value."""
    one = count_call(torch.ops.aten.add.Tensor, (value, torch.empty_like(value)), {}, value)
    return () if one is None else (one,) * times
