"""The names of all rewrites, and which of them a user may leave out.

``ZBCOMPILE_SKIP=simplify,write_in_place`` compiles without these two. The rewrites of joint graphs are a list
(`joint_passes.JOINT_PASSES`). Two more change other graphs: `fold_constant_masks` the captured model, before
it is cut, and `write_in_place` the graphs of a stage, after the split, for the eager backend. What makes the
graphs in the first place (capture, inlining, partition, the split itself) is not a rewrite: nothing compiles
without it.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from zbcompile.errors import UsageError
from zbcompile.passes.joint import joint_passes

__all__ = [
    "FOLD_MASKS",
    "WRITE_IN_PLACE",
    "check_known",
    "required_rewrites",
    "rewrite_names",
    "skipped_from_environment",
]

FOLD_MASKS = "fold_constant_masks"
WRITE_IN_PLACE = "write_in_place"


def rewrite_names() -> tuple[str, ...]:
    """Return the names of all rewrites in the order in which they run."""
    return (FOLD_MASKS, *(rewrite.name for rewrite in joint_passes.JOINT_PASSES), WRITE_IN_PLACE)


def required_rewrites() -> dict[str, str]:
    """Return the names of rewrites that no pipeline is right without -> why."""
    return {rewrite.name: rewrite.required for rewrite in joint_passes.JOINT_PASSES if rewrite.required}


def check_known(skip: Collection[str]) -> None:
    """Raise UsageError for a name that is no rewrite's."""
    unknown = [name for name in skip if name not in rewrite_names()]
    if unknown:
        raise UsageError(
            f"no rewrite is called {unknown[0]!r}", needed=", ".join(rewrite_names()), given=unknown[0]
        )


def skipped_from_environment() -> tuple[str, ...]:
    """Return the rewrites that ``ZBCOMPILE_SKIP`` names, in the order in which they run.

    Raises
    ------
    UsageError
        A name is unknown, or one of a rewrite that is required.
    """
    asked = [name.strip() for name in os.environ.get("ZBCOMPILE_SKIP", "").split(",")]
    asked = [name for name in asked if name]
    check_known(asked)
    for name, why in required_rewrites().items():
        if name in asked:
            raise UsageError(f"the rewrite {name} cannot be skipped: {why}", where="ZBCOMPILE_SKIP")
    return tuple(name for name in rewrite_names() if name in asked)
