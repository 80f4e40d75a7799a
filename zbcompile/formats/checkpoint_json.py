"""What a checkpoint says beside its tensors and its plan, format ``zbcompile.checkpoint`` version 1.

A checkpoint is a folder: this file, the plan as a schedule file, and the tensors as
``torch.distributed.checkpoint`` writes them. None of the names here depends on ranks or stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbcompile.formats.records import Document, Field, Record
from zbcompile.formats.shapes import AMOUNT, Json

__all__ = ["FILE", "PLAN_FILE", "TRAINING_FILE", "CheckpointFile", "dumps", "loads"]

TRAINING_FILE, PLAN_FILE = "training.json", "plan.json"


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """Where training stands.

    Attributes
    ----------
    step_number
        Number of the next step.
    seed
        Of the random streams; with the step's number it chooses the dropout masks.
    extra
        The user's own: any JSON value.
    """

    step_number: int
    seed: int
    extra: object = None


FILE = Document(
    "zbcompile.checkpoint",
    version=1,
    title="zbcompile checkpoint",
    record=Record(
        CheckpointFile,
        (
            Field("step", AMOUNT, "number of the next step", key="step_number"),
            Field(
                "seed", AMOUNT, "of the random streams; with the step's number it chooses the dropout masks"
            ),
            Field("extra", Json(), "the user's own, any JSON value"),
        ),
        "Where training stands: training.json of a checkpoint's folder.",
    ),
)


def dumps(content: CheckpointFile) -> str:
    """Return the text of the file.

    Raises
    ------
    FormatError
        ``extra`` is no JSON value, or too deep; the message says what of it.
    """
    return FILE.dumps(content)


def loads(text: str, where: str = TRAINING_FILE) -> CheckpointFile:
    """Read what `dumps` wrote.

    Raises
    ------
    FormatError
        The text is broken, foreign or out of bounds; the message names the field.
    """
    return FILE.loads(text, where)
