"""What the exact model knows, said without the solver, which takes half a second to import."""

from __future__ import annotations

import importlib

from zbcompile.planner.core.compiled import uncounted
from zbcompile.planner.core.instance import Instance
from zbcompile.schedule.ir import Kind
from zbcompile.schedule.semantics import SendMode

__all__ = ["MODELS", "can_model", "load_solver", "split_is_exact"]

MODELS = ("exact", "exact on costs that no fusing undercuts")
"""How witnesses call the two forms: with fusing and messages, or on `Instance.relaxed` without messages."""

_SENDS = frozenset(kind for kind in Kind if kind.is_send)
_RECEIVES = frozenset(kind for kind in Kind if kind.is_recv)
_COMPUTE = frozenset(kind for kind in Kind if kind.is_compute)


def can_model(mode: SendMode) -> bool:
    """Return whether the model knows what a send mode does to its ranks.

    It does where no send holds up its rank, and where a rank waits for all of its sends before it computes
    again, and for receives if they join an exchange.
    """
    if not mode.holds_rank:
        return True
    exchange = mode.awaited >= _RECEIVES
    return (
        not mode.under_way
        and mode.awaited >= _SENDS
        and mode.waits_before >= _COMPUTE
        and exchange == mode.joins_exchange
        and (exchange or not mode.awaited & _RECEIVES)
        and (mode.receives_first or not mode.waits_before & _RECEIVES)
    )


def load_solver() -> None:
    """Import the solver; no limit counts the seconds."""
    uncounted(lambda: importlib.import_module("ortools.sat.python.cp_model"))


def split_is_exact(instance: Instance) -> bool:
    """Return whether splitting every backward never loses where sends hold up nobody."""
    relaxed = instance.relaxed()
    return (relaxed.backward, relaxed.weight, relaxed.pending) == (
        instance.backward,
        instance.weight,
        instance.pending,
    )
