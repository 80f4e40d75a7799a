"""The schedule CSV of torch.distributed.pipelining, in its compute-only and its compute+communication form.

The file has one line per rank and one cell per action; an empty cell is a pause. torch's letters differ from
ours: its ``I`` is our B (gradient of the inputs), its ``B`` our BW (full backward). Messages go between
neighbouring stages: ``2SEND_F0`` to stage 3, ``2RECV_F0`` from stage 1, ``2SEND_B0`` to stage 1, ``2RECV_B0``
from stage 3.

``2UNSHARD``, ``2RESHARD`` and ``2REDUCE_GRAD`` belong to a stage and to no microbatch. torch may gather a
stage several times in a step; of such a stage the first UNSHARD and the last RESHARD are kept.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

from zbcompile.errors import FormatError, UsageError
from zbcompile.formats.fields import guarded
from zbcompile.formats.problem_json import MAX_STAGES
from zbcompile.formats.schedule_json import check_size
from zbcompile.schedule.ir import MAX_COUNT, Action, Kind, Placement, Schedule

__all__ = ["CsvSchedule", "dumps", "loads"]

_WORDS = {
    "F": Kind.FORWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
    "B": Kind.FULL_BACKWARD,
    "SEND_F": Kind.SEND_F,
    "RECV_F": Kind.RECV_F,
    "SEND_B": Kind.SEND_B,
    "RECV_B": Kind.RECV_B,
    "UNSHARD": Kind.UNSHARD,
    "RESHARD": Kind.RESHARD,
    "REDUCE_GRAD": Kind.REDUCE_GRAD,
}
_NAMES = {kind: word for word, kind in _WORDS.items()}
_STEP = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}
_CELL = re.compile(r"([0-9]{1,7})(F|I|B|W|SEND_F|RECV_F|SEND_B|RECV_B)([0-9]{1,7})")
_OF_STAGE = re.compile("([0-9]{1,7})(UNSHARD|RESHARD|REDUCE_GRAD)")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class CsvSchedule:
    """A schedule read from CSV, and what the IR has no place for.

    Attributes
    ----------
    schedule
        The order.
    left_out
        What gathers or frees a stage's parameters again (UNSHARD, RESHARD), in the file's order.
    overlapped
        Number of OVERLAP_F_B pairs, which are read as their parts in the order given.
    """

    schedule: Schedule
    left_out: tuple[str, ...] = ()
    overlapped: int = 0


def dumps(schedule: Schedule, *, communication: bool = True) -> str:
    """Return the CSV text that torch's ``_load_csv`` reads.

    Parameters
    ----------
    communication
        Keep sends, receives and actions of stages as a whole (torch's format ``compute_comms``); False writes
        ``compute_only``, to which torch adds its own.

    Raises
    ------
    UsageError
        A message goes between stages that are not neighbours, which torch cannot express.
    """
    rows = schedule if communication else schedule.compute_only()
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for rank, row in enumerate(rows.order):
        writer.writerow([_cell(rank, action) for action in row])
    return buffer.getvalue()


def loads(text: str, where: str = "CSV") -> CsvSchedule:
    """Read either form. The placement follows from the line on which each stage's actions stand.

    Raises
    ------
    FormatError
        The text is not such CSV; the message names the cell.
    """
    left_out: list[str] = []
    overlapped, order = 0, []
    try:
        for line, cells in enumerate(csv.reader(io.StringIO(text), strict=True), 1):
            row: list[Action] = []
            for column, cell in enumerate(cells, 1):
                place = f"{where}, line {line}, cell {column}"
                for word in _words(cell, place):
                    row.append(_action(word, place))
                overlapped += "OVERLAP_F_B" in cell
            order.append(_once(row, left_out))
            if len(order) > MAX_STAGES:
                raise FormatError("too many lines", where=where, needed=f"at most {MAX_STAGES}, one per rank")
    except csv.Error as error:
        raise FormatError(f"not CSV: {error}", where=where) from None
    while order and not order[-1]:
        order.pop()
    if not order:
        raise FormatError("the CSV has no action", where=where)
    schedule = Schedule.of(
        _placement(order, where), 1 + max(a.microbatch for row in order for a in row), order
    )
    guarded(schedule.check_names, where)
    check_size(schedule, where)
    return CsvSchedule(schedule, tuple(left_out), overlapped)


def _once(row: list[Action], left_out: list[str]) -> list[Action]:
    """Keep the first UNSHARD, the last RESHARD and the last REDUCE_GRAD of every stage."""
    kept: dict[tuple[Kind, int], int] = {}
    for k, action in enumerate(row):
        key = (action.kind, action.stage)
        if action.kind.is_of_stage and (action.kind is not Kind.UNSHARD or key not in kept):
            kept[key] = k
    result = []
    for k, action in enumerate(row):
        if kept.get((action.kind, action.stage), k) == k:
            result.append(action)
        else:
            left_out.append(str(action))
    return result


def _cell(rank: int, action: Action) -> str:
    step = _STEP.get(action.kind)
    if step is not None and action.peer != action.stage + step:
        raise UsageError(
            f"torch's CSV has no message {action}: its stages are not neighbours",
            where=f"rank {rank}",
            fix="export the compute order alone, or cut the model so that values only pass to the next stage",
        )
    if action.kind.is_of_stage:
        return str(action)
    return f"{action.stage}{_NAMES[action.kind]}{action.microbatch}"


def _words(cell: str, where: str) -> Iterator[str]:
    text = cell.strip()
    pair = _PAIR.fullmatch(text)
    if pair is None:
        return iter([text] if text else [])
    parts = [part.strip() for part in pair.group(1).split(";")]
    if len(parts) != 2:
        raise FormatError("OVERLAP_F_B joins two actions", where=where, given=ascii(text[:40]))
    return iter(parts)


def _action(word: str, where: str) -> Action:
    match, whole = _CELL.fullmatch(word), _OF_STAGE.fullmatch(word)
    if whole is not None and int(whole.group(1)) < MAX_STAGES:
        return Action(_WORDS[whole.group(2)], int(whole.group(1)), 0)
    if match is None:
        raise FormatError(
            f"{ascii(word[:40])} is not an action",
            where=where,
            fix="torch writes stage, letter, microbatch, as 2F0 or 2SEND_F0; letters are F I B W SEND_F ...",
        )
    stage, kind, microbatch = int(match.group(1)), _WORDS[match.group(2)], int(match.group(3))
    if stage >= MAX_STAGES or microbatch >= MAX_COUNT:
        raise FormatError("number out of range", where=where, given=word[:40])
    if not kind.is_message:
        return Action(kind, stage, microbatch)
    peer = stage + _STEP[kind]
    if peer < 0:
        raise FormatError(f"{word[:40]!r} speaks to stage -1", where=where)
    return Action(kind, stage, microbatch, peer)


def _placement(order: list[list[Action]], where: str) -> Placement:
    home: dict[int, int] = {}
    for rank, row in enumerate(order):
        for action in row:
            if home.setdefault(action.stage, rank) != rank:
                raise FormatError(
                    f"stage {action.stage} stands on rank {home[action.stage]} and on rank {rank}",
                    where=where,
                )
    missing = next((s for s in range(max(home) + 1) if s not in home), None)
    if missing is not None:
        raise FormatError(f"stage {missing} has no action", where=where, needed=f"stages 0 to {max(home)}")
    return guarded(lambda: Placement(tuple(home[s] for s in range(len(home)))), where)
