"""The two cuts of a stage: what F keeps for B, and what F and B keep for W.

``StageValues --> values to keep``. The cut for W is made first: it says what B must hand on. Then the cut for
B may keep a value for B and W alike, or have it computed again.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from zbcompile.passes.aliasing import owned_bytes
from zbcompile.passes.joint.graph_facts import ancestors
from zbcompile.passes.op_costs import is_heavy
from zbcompile.passes.ops import facts
from zbcompile.passes.split.save_set import Phase, cut
from zbcompile.passes.split.stage_values import StageValues

__all__ = ["kept_for_backward", "kept_for_weight"]

Price = Callable[[Node], int | None]


def kept_for_weight(values: StageValues, price: Price) -> set[Node]:
    """Return the values that F or B keep for W.

    Heavy calls and gathers that only parameter gradients need stay in W. Cheap work of W moves into B where
    that holds fewer bytes (gradients of norms' parameters). A stage without gradients of inputs has an empty
    B: everything late stays in W.
    """
    early = ancestors([*values.results, *values.input_grads.values()])
    if values.input_grads:
        late = {n for n in values.nodes if n not in early and _stays_in_weight(n)}
    else:
        late = {n for n in values.late if n not in early and n.op != "placeholder"}
    return cut(
        Phase(
            nodes=values.nodes,
            needed=list(values.weight_grads.values()),
            late=late,
            early=early,
            free=values.free,
            size=_size,
            price=price,
        )
    )


def kept_for_backward(values: StageValues, for_weight: set[Node], price: Price) -> set[Node]:
    """Return the values that F keeps for B and for what B leaves to W."""
    return cut(
        Phase(
            nodes=values.nodes,
            needed=[*values.input_grads.values(), *values.ordered(for_weight)],
            late={n for n in values.late if n.op != "placeholder"},
            early=ancestors(values.results),
            free={*values.free, *values.tangents},
            size=_size,
            price=price,
        )
    )


def _size(node: Node) -> int | None:
    """Return the bytes of a value that can be kept; what a collective has not delivered yet cannot."""
    return None if facts(node.target).collective else owned_bytes(node)


def _stays_in_weight(node: Node) -> bool:
    return node.op == "call_function" and (is_heavy(node) or facts(node.target).gathers)
