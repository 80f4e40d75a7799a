"""Reads an order in any of its forms: JSON, torch's CSV, or the IR's own text."""

from __future__ import annotations

from zbcompile.errors import FormatError
from zbcompile.formats import schedule_json
from zbcompile.formats.fields import guarded
from zbcompile.formats.problem_json import MAX_STAGES
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.schedule.ir import Schedule

__all__ = ["load_schedule"]


def load_schedule(text: str, where: str) -> tuple[ScheduleFile, list[str]]:
    """Read a schedule in any known form.

    Parameters
    ----------
    where
        The name of the file, for messages. A name that ends in ``.json`` makes the text JSON.

    Returns
    -------
    tuple
        The schedule, and remarks for people on what the IR has no place for.

    Raises
    ------
    FormatError
        The text is broken, foreign or out of bounds.

    Notes
    -----
    JSON starts with a brace or a bracket, the text form with the word ``placement``; anything else is CSV.
    """
    head = text.lstrip("\ufeff \t\r\n")
    if head.startswith(("{", "[")) or where.lower().endswith(".json"):
        return schedule_json.loads(text, where), []
    if head.startswith("placement "):
        schedule = guarded(lambda: Schedule.parse(text), where)
        if schedule.num_stages > MAX_STAGES:
            needed = f"at most {MAX_STAGES}"
            raise FormatError("too many stages", where=where, needed=needed, given=schedule.num_stages)
        schedule_json.check_size(schedule, where)
        return ScheduleFile(schedule, origin="imported text"), []
    from zbcompile.formats import torch_csv

    found = torch_csv.loads(text, where)
    remarks = []
    if found.left_out:
        remarks.append(
            f"left out {len(found.left_out)} actions that gather or free parameters again, "
            f"such as {found.left_out[0]}"
        )
    if found.overlapped:
        remarks.append(f"read {found.overlapped} OVERLAP_F_B pairs as their parts, one after the other")
    return ScheduleFile(found.schedule, origin="imported CSV"), remarks
