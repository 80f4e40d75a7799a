"""Writing what every step of the compiler left, as text.

``ZBCOMPILE_DUMP=directory`` (or `dump_to`) gives::

    00-capture.txt  01-fold_constant_masks.txt  02-partition.txt
    03-split_backward/stage-0/joint/00-traced.txt
    03-split_backward/stage-0/joint/02-simplify.diff    what each rewrite changed of the joint graph
    03-split_backward/stage-0/forward.txt       one file per stage and phase
    04-backend/stage-0/forward.txt              the same with the backend's calls
    05-verify.txt  06-measure.txt  07-plan.txt  08-merge_backward.txt ...
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from torch.fx import GraphModule

from zbcompile.compiler.graph_text import graph_text, joint_text, stage_files
from zbcompile.compiler.observe import Observer, quiet
from zbcompile.formats import profile_json, schedule_json
from zbcompile.formats.files import write_text
from zbcompile.passes.joint.joint_pass import JointStep
from zbcompile.passes.split.stage_graphs import StageGraphs
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.solution import Solution

__all__ = ["dump_to", "observer_from_environment"]


def observer_from_environment() -> Observer:
    """Return the observer that ``ZBCOMPILE_DUMP`` asks for, or `quiet`."""
    directory = os.environ.get("ZBCOMPILE_DUMP")
    return dump_to(directory) if directory else quiet


def dump_to(directory: str | os.PathLike[str]) -> Observer:
    """Return an observer that writes every artifact below a directory, numbered in order.

    Files appear whole (written aside, then renamed).

    Raises
    ------
    UsageError
        By the observer: the place cannot be written.
    """
    folder, count = Path(directory), 0
    folder.mkdir(parents=True, exist_ok=True)
    last: dict[int, str] = {}

    def write(name: str, artifact: object) -> None:
        nonlocal count
        place = folder / f"{count:02d}-{name.partition('.')[0]}"
        if isinstance(artifact, JointStep):
            _write_rewrite(place / f"stage-{artifact.stage}" / "joint", artifact, last)
            return
        count += 1
        stages = [part for part in _parts(artifact) if isinstance(part, StageGraphs)]
        for path, text in stage_files(stages):
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            write_text(place / path, text)
        if not stages:
            write_text(place.with_suffix(".txt"), _as_text(artifact) + "\n")

    return write


def _write_rewrite(place: Path, step: JointStep, last: dict[int, str]) -> None:
    """Write a traced joint graph whole, and what a rewrite made of it as a diff with the graph before.

    ``last`` has the present text of each stage. A stage that is traced again begins anew.
    """
    text = joint_text(step.joint)
    place.mkdir(parents=True, exist_ok=True)
    name = f"{step.position:02d}-{step.name}"
    if step.position == 0:
        write_text(place / f"{name}.txt", text)
    else:
        lines = difflib.unified_diff(last[step.stage].splitlines(), text.splitlines(), lineterm="", n=1)
        write_text(place / f"{name}.diff", "\n".join(lines) + "\n")
    last[step.stage] = text


def _parts(artifact: object) -> tuple[object, ...]:
    return artifact if isinstance(artifact, tuple) else (artifact,)


def _as_text(artifact: object) -> str:
    if isinstance(artifact, tuple):
        return "\n\n".join(map(_as_text, artifact))
    if isinstance(artifact, str | Schedule):
        return str(artifact)
    if isinstance(artifact, Profile):
        return profile_json.dumps(artifact)
    if isinstance(artifact, Solution):
        return schedule_json.dumps(artifact)
    module = getattr(artifact, "module", artifact)
    return graph_text(module) if isinstance(module, GraphModule) else str(artifact)
