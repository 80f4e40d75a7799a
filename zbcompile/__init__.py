"""zbcompile: pipeline-parallel training with provably best orders. See README.md.

The names in ``__all__`` and the modules in ``PUBLIC_MODULES`` are the public API; docs/releases.md says what
of them may change when. Everything else may change in any release.

A name is imported when it is first asked for: planning never loads torch, and a pipeline loads no solver
before it plans.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zbcompile.api import compile
    from zbcompile.compiler.progress import progress
    from zbcompile.options import Shard
    from zbcompile.pipeline import Microbatches, Pipeline, Stage
    from zbcompile.planner.placements import plan_auto
    from zbcompile.planner.plan import plan
    from zbcompile.runtime.by_hand import SavedForBackward
    from zbcompile.schedule.check import check
    from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
    from zbcompile.schedule.devices import Device, device_named
    from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
    from zbcompile.schedule.microbatches import MicrobatchCost
    from zbcompile.schedule.problem import Problem
    from zbcompile.schedule.solution import Certificate, Solution

__all__ = [
    "Action",
    "Certificate",
    "Device",
    "Edge",
    "Kind",
    "Link",
    "MicrobatchCost",
    "Microbatches",
    "Pipeline",
    "Placement",
    "Problem",
    "Profile",
    "SavedForBackward",
    "Schedule",
    "Shard",
    "Solution",
    "Stage",
    "StageCost",
    "check",
    "compile",
    "device_named",
    "plan",
    "plan_auto",
    "progress",
]
__version__ = "0.1.0"

PUBLIC_MODULES = (
    "zbcompile.autograd_oracle",
    "zbcompile.errors",
    "zbcompile.formats.measured_json",
    "zbcompile.formats.profile_json",
    "zbcompile.formats.schedule_json",
)
"""Modules whose own ``__all__`` is public, too."""

_HOMES = {
    "zbcompile.api": ("compile",),
    "zbcompile.compiler.progress": ("progress",),
    "zbcompile.options": ("Shard",),
    "zbcompile.pipeline": ("Microbatches", "Pipeline", "Stage"),
    "zbcompile.planner.placements": ("plan_auto",),
    "zbcompile.planner.plan": ("plan",),
    "zbcompile.runtime.by_hand": ("SavedForBackward",),
    "zbcompile.schedule.check": ("check",),
    "zbcompile.schedule.costs": ("Edge", "Link", "Profile", "StageCost"),
    "zbcompile.schedule.devices": ("Device", "device_named"),
    "zbcompile.schedule.ir": ("Action", "Kind", "Placement", "Schedule"),
    "zbcompile.schedule.microbatches": ("MicrobatchCost",),
    "zbcompile.schedule.problem": ("Problem",),
    "zbcompile.schedule.solution": ("Certificate", "Solution"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'zbcompile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
