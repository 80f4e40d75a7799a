"""The rewrites of joint graphs, in the order in which they run.

A new rewrite is one file with the function and one row here: its name, then in `ZBCOMPILE_SKIP`, in dumps,
in ``zbcompile bisect`` and in the errors of a pass that breaks a graph.
"""

from __future__ import annotations

from zbcompile.passes.joint.cheaper_calls import use_cheaper_calls
from zbcompile.passes.joint.flexible_views import flexible_views
from zbcompile.passes.joint.gradient_layouts import remove_layout_copies
from zbcompile.passes.joint.joint_pass import JointPass
from zbcompile.passes.joint.overlap import overlap_collectives
from zbcompile.passes.joint.recurrent import keep_workspaces
from zbcompile.passes.joint.separate_gradients import (
    drop_checks,
    drop_running_statistics,
    own_gradients,
    separate_convolutions,
)
from zbcompile.passes.joint.simplify import simplify

__all__ = ["JOINT_PASSES"]

JOINT_PASSES: tuple[JointPass, ...] = (
    JointPass("remove_layout_copies", lambda joint, facts: remove_layout_copies(joint, facts.layouts)),
    JointPass("simplify", lambda joint, _: simplify(joint)),
    JointPass("cheaper_calls", lambda joint, _: use_cheaper_calls(joint)),
    JointPass("simplify_again", lambda joint, _: simplify(joint)),
    JointPass(
        "keep_workspaces",
        lambda joint, _: keep_workspaces(joint),
        required="the backward of an LSTM reads a workspace that its forward would not make",
    ),
    JointPass("drop_checks", lambda joint, _: drop_checks(joint)),
    JointPass("separate_convolutions", lambda joint, _: separate_convolutions(joint)),
    JointPass("drop_running_statistics", lambda joint, _: drop_running_statistics(joint)),
    JointPass(
        "own_gradients",
        lambda joint, facts: own_gradients(joint, facts.state),
        required="parameters whose gradients share storage would add up each other's",
    ),
    JointPass("overlap_collectives", lambda joint, _: overlap_collectives(joint)),
    JointPass(
        "flexible_views",
        lambda joint, _: flexible_views(joint.module.graph),
        required="a view of a value whose layout torch foretells wrongly fails when it runs",
    ),
)
"""What `trace_stage` runs between the trace and the split."""
