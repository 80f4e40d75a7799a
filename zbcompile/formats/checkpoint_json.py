"""What a checkpoint says beside its tensors and its plan, format ``zbcompile.checkpoint`` version 1.

A checkpoint is a folder: this file, the plan as a schedule file, and the tensors as
``torch.distributed.checkpoint`` writes them. None of the names here depends on ranks or stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbcompile.errors import FormatError
from zbcompile.formats.fields import Fields, format_json, parse_json, plain

__all__ = ["NAME", "PLAN_FILE", "TRAINING_FILE", "CheckpointFile", "dumps", "loads"]

NAME = "zbcompile.checkpoint"
VERSION = 1
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


def dumps(content: CheckpointFile) -> str:
    """Return the text of the file.

    Raises
    ------
    FormatError
        ``extra`` is no JSON value, or too deep; the message says what of it.
    """
    document = {
        "format": NAME,
        "version": VERSION,
        "step": content.step_number,
        "seed": content.seed,
        "extra": plain(content.extra, "extra"),
    }
    return format_json(document)


def loads(text: str, where: str = TRAINING_FILE) -> CheckpointFile:
    """Read what `dumps` wrote.

    Raises
    ------
    FormatError
        The text is broken, foreign or out of bounds; the message names the field.
    """
    fields = Fields(parse_json(text, where), where)
    fields.header(NAME, VERSION)
    if not fields.has("extra"):
        raise FormatError("field 'extra' is missing", where=where)
    step, seed = fields.integer("step"), fields.integer("seed")
    extra = plain(fields.optional("extra"), fields.at("extra"))
    fields.done()
    return CheckpointFile(step, seed, extra)
