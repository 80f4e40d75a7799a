"""The record of a lower bound: its value, what proved it, and the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Bound"]


@dataclass(frozen=True, slots=True)
class Bound:
    """A proof that no order is shorter than ``value_ns``.

    Attributes
    ----------
    value_ns
        The bound.
    method
        What proved it, as certificates name it (``work``, ``area``, ``crossing``, ...).
    objective
        ``span`` or ``makespan``. A bound of the span holds for the makespan as well.
    witness
        The evidence: plain JSON values. For bounds that can be checked by hand, the numbers whose sum the
        bound is.
    """

    value_ns: int
    method: str
    objective: str
    witness: Mapping[str, object] = field(default_factory=dict)
