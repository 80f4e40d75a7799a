"""Remove calls of a joint graph that change nothing: repeated calls, copies and aliases of a value.

``joint graph --> joint graph``. Contract in: a traced graph with fake values. Contract out: the same bits,
and no call that is pure and unread::

    x.detach()                                     -->   x
    x.clone(), of a storage nobody writes to       -->   x
    a = x.sin(); b = x.sin()                       -->   a = b = x.sin()

A call is repeated when an earlier one has the same target and arguments. Only calls of the same phase are
joined, so that what the model recomputes in its backward on purpose (``torch.utils.checkpoint``) is still
recomputed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor
from torch.fx import Node
from torch.fx.node import Argument

from zbcompile.passes.aliasing import is_random
from zbcompile.passes.joint.graph_facts import ancestors, node_argument, storage_root
from zbcompile.passes.nodes import is_getitem, value_of
from zbcompile.passes.ops import facts, namespace
from zbcompile.passes.torch_private import JointGraph, OpOverload, schema

__all__ = ["simplify"]


def simplify(joint: JointGraph) -> None:
    """Apply all simplifications in place. Values that have a role in ``joint`` keep their calls."""
    _Simplifier(joint).run()


class _Simplifier:
    """One run over a joint graph; the attributes are what all simplifications ask.

    Attributes
    ----------
    boundary
        Values with a role: outputs, changed arguments, gradients.
    boundary_roots
        Owners of their storages.
    forward
        What outputs and changed arguments are computed from.
    changed
        Arguments that the caller changes.
    known
        Target, phase and arguments of a call -> the first such call.
    """

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        self.graph = joint.module.graph
        ends = (joint.outputs, joint.mutations, joint.gradients)
        self.boundary: set[Node] = {value for role in ends for value in role.values()}
        self.forward = ancestors([*joint.outputs.values(), *joint.mutations.values()])
        self.boundary_roots = {storage_root(node) for node in self.boundary}
        self.changed = {joint.arguments[i] for i in joint.mutations}
        self.known: dict[Hashable, Node] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op != "call_function" or node in self.boundary:
                continue
            other = node.args[0] if self._is_no_op(node) else self._earlier(node)
            if isinstance(other, Node):
                node.replace_all_uses_with(other)
                self.graph.erase_node(node)
        for node in reversed(list(self.graph.nodes)):
            if node.op != "call_function" or node.users or node in self.boundary:
                continue
            if _is_pure(node):
                self.graph.erase_node(node)

    def _is_no_op(self, node: Node) -> bool:
        form = facts(node.target).form
        if form in ("view", "expand"):
            return _same_layout(node, node.args[0])
        copies = form == "copy" or (form == "power" and bool(node.args[1] == 1))  # torch copies x ** 1.0
        return form == "alias" or (copies and self._is_idle_copy(node))

    def _is_idle_copy(self, node: Node) -> bool:
        """Return whether a clone has the layout of its argument and nobody writes to that whole storage.

        A copy that keeps a result apart from an argument is not idle.
        """
        argument = node_argument(node, 0)
        root = storage_root(argument)
        if root in self.changed or (root.op == "placeholder" and node in self.boundary_roots):
            return False
        if not _same_layout(node, argument):
            return False
        value: Tensor = argument.meta["val"]
        size = value.untyped_storage().nbytes()
        return _known_equal((size,), (value.numel() * value.element_size(),))

    def _earlier(self, node: Node) -> Node | None:
        """Return an earlier call with the same result, or None; later calls may then find this one."""
        if not _is_pure(node) or _owns_copy(node):
            return None
        key = (node.target, node in self.forward, _frozen(node.args), _frozen(node.kwargs))
        try:
            found = self.known.setdefault(key, node)
        except TypeError:
            return None
        return None if found is node or found in self.boundary else found


def _is_pure(node: Node) -> bool:
    """Return whether the result depends on the arguments alone and the call does nothing else."""
    if is_getitem(node):
        return True
    target = node.target
    if not isinstance(target, OpOverload) or is_random(node):
        return False
    if schema(target).is_mutable or namespace(target) not in ("aten", "prims"):
        return False
    return not facts(target).impure


def _owns_copy(node: Node) -> bool:
    """Return whether a call is there to have storage of its own."""
    return facts(node.target).form == "copy"


def _same_layout(node: Node, other: Argument) -> bool:
    """Return whether two nodes have the same shape, strides, dtype and lazy bits."""
    mine, theirs = value_of(node), value_of(other) if isinstance(other, Node) else None
    if mine is None or theirs is None:
        return False
    return bool(
        _known_equal(mine.shape, theirs.shape)
        and _known_equal(mine.stride(), theirs.stride())
        and mine.dtype == theirs.dtype
        and mine.is_conj() == theirs.is_conj()
        and mine.is_neg() == theirs.is_neg()
    )


def _known_equal(mine: Sequence[object], theirs: Sequence[object]) -> bool:
    """Return whether extents are equal; one that depends on data equals only itself."""
    return len(mine) == len(theirs) and all(
        a == b if isinstance(a, int) and isinstance(b, int) else str(a) == str(b)
        for a, b in zip(mine, theirs, strict=True)
    )


def _frozen(value: object) -> Hashable:
    """Return arguments as something that can be compared; 1, 1.0 and True stay apart."""
    if isinstance(value, tuple | list):
        return (type(value).__name__, *(_frozen(item) for item in value))
    if isinstance(value, dict):
        return tuple((key, _frozen(value[key])) for key in sorted(value))
    if isinstance(value, slice):
        return ("slice", _frozen(value.start), _frozen(value.stop), _frozen(value.step))
    return (type(value).__name__, repr(value)) if isinstance(value, float) else (type(value).__name__, value)
