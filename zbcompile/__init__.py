"""zbcompile: pipeline-parallel training with provably best orders. See README.md.

Nothing here imports torch until `compile` or a runtime name is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zbcompile.pipeline import Microbatches, Pipeline, Stage, compile
    from zbcompile.schedule.devices import device_named

__all__ = ["Microbatches", "Pipeline", "Stage", "compile", "device_named"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "device_named":
        from zbcompile.schedule.devices import device_named

        return device_named
    if name in __all__:
        from zbcompile import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'zbcompile' has no attribute {name!r}")
