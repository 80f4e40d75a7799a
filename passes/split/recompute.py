"""What may be computed again in the backward instead of being kept, and what that costs."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch.fx import Node

from zbcompile.errors import UsageError
from zbcompile.passes.aliasing import is_random, viewed_arguments
from zbcompile.passes.joint.graph_facts import is_elementwise
from zbcompile.passes.nodes import value_of
from zbcompile.passes.op_costs import is_heavy, node_ns
from zbcompile.passes.ops import facts
from zbcompile.schedule.devices import Device

__all__ = [
    "AUTO",
    "POLICIES",
    "Recompute",
    "check_recompute",
    "is_gathered",
    "level_in",
    "level_text",
    "recompute_price",
    "recompute_seconds",
    "titled",
]

Recompute = str | float
"""``"none"``, ``"regather"`` (all-gathers twice, alone), ``"min_memory"`` (no heavy call twice), ``"full"``
(anything but random draws twice), or a price: bytes that one second of recompute must save."""

POLICIES = ("none", "regather", "min_memory", "full")
"""The named ones, "none" first and "full", the one that holds least, last."""

AUTO = "auto"
"""No policy of a stage: the planner chooses a level for each."""

_TITLE = re.compile(r"(?:^|, )recompute=(none|regather|min_memory|full|[0-9][0-9.e+-]{0,30})$")

FUSED_SHARE = 0.1
"""Of its time in eager, what an element-wise call costs when inductor fuses it into its user."""


def check_recompute(recompute: Recompute) -> None:
    """Raise UsageError for a value that is none of `Recompute`."""
    if isinstance(recompute, int | float) and not isinstance(recompute, bool):
        known = recompute >= 0
    else:
        known = recompute in POLICIES
    if not known:
        named = ", ".join(f'"{name}"' for name in POLICIES)
        raise UsageError(
            "unknown recompute",
            given=recompute,
            fix=f"use {named} or a price in bytes per second",
        )


def level_text(recompute: Recompute) -> str:
    """Return a policy as one word: its name, or its price in bytes per second, to the bit."""
    return recompute if isinstance(recompute, str) else repr(float(recompute)).removesuffix(".0")


def titled(name: str, level: Recompute) -> str:
    """Return the name of a stage's cost with its level, as `level_in` reads it; "none" is left out."""
    return name if level == "none" else f"{name}, recompute={level_text(level)}"


def level_in(title: str) -> Recompute | None:
    """Return the level that a stage's cost names at its end (``stage 2, recompute=full``), or None."""
    found = _TITLE.search(title)
    if found is None or found[1] in POLICIES:
        return found and found[1]
    try:
        return float(found[1])
    except ValueError:
        return None


def recompute_price(recompute: Recompute, seconds: Callable[[Node], float]) -> Callable[[Node], int | None]:
    """Return a function that gives the cost of computing a value again.

    The cost is in bytes, to be weighed against the bytes of the values that need not be kept. It is 0 for
    views and None for what may not be computed again. ``seconds`` is the time of a call.
    """

    def price(node: Node) -> int | None:
        if viewed_arguments(node):
            return 0
        if recompute == "none" or is_random(node):
            return None
        if recompute == "regather":
            return 0 if is_gathered(node) else None
        if recompute == "min_memory":
            return None if is_heavy(node) else 0
        if recompute == "full":
            return 0
        return int(float(recompute) * seconds(node))

    return price


def is_gathered(node: Node) -> bool:
    """Return whether a value is nothing but gathered from a group: an all-gather, its wait, pieces rejoined.

    ``all_gather_tensor`` along a dimension other than the first joins pieces of the result (``cat``).
    """
    if facts(node.target).all_gather:
        return True
    joins = facts(node.target).wait or node.target is torch.ops.aten.cat.default or viewed_arguments(node)
    sources = node.all_input_nodes
    return bool(joins and sources) and all(is_gathered(source) for source in sources)


def recompute_seconds(node: Node, backend: str, device: Device) -> float:
    """Return the counted time of computing ``node`` once more on a device under a backend."""
    time = 1e-9 * node_ns(node, device)
    if backend == "inductor" and is_elementwise(node) and value_of(node) is not None:
        return FUSED_SHARE * time
    return time
