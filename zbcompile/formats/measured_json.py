"""Measured timelines as JSON, format ``zbcompile.measured`` version 1: when every action began and ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zbcompile.errors import FormatError
from zbcompile.formats.fields import integer
from zbcompile.formats.problem_json import MAX_STAGES
from zbcompile.formats.records import Document, Field, Record
from zbcompile.formats.schedule_json import ACTION, action_to
from zbcompile.formats.shapes import AMOUNT, TEXT, ListOf, Schema, Shape, row_schema
from zbcompile.schedule.ir import MAX_COUNT, Action, Kind

__all__ = ["FILE", "Measured", "dumps", "loads"]


@dataclass(frozen=True, slots=True)
class Measured:
    """The times of one step that ran.

    Attributes
    ----------
    ranks
        Per rank, (action, start_ns, end_ns) in the order executed, on one clock for all ranks; its zero is
        the first start.
    source
        Where the step was measured, for people.
    """

    ranks: tuple[tuple[tuple[Action, int, int], ...], ...]
    source: str = ""

    @staticmethod
    def of(ranks: Sequence[Iterable[tuple[Action, int, int]]], source: str = "") -> Measured:
        """Build from times in ns on any common clock; the first start becomes zero."""
        rows = [list(row) for row in ranks]
        zero = min((start for row in rows for _, start, _ in row), default=0)
        return Measured(
            tuple(tuple((action, start - zero, end - zero) for action, start, end in row) for row in rows),
            source,
        )

    @property
    def makespan_ns(self) -> int:
        """Last end of anything but a message, in ns."""
        return max((end for row in self.ranks for a, _, end in row if not a.kind.is_message), default=0)

    @property
    def bubble(self) -> float:
        """1 - work of the busiest rank / makespan; 0 where nothing was measured."""
        busiest = max(map(self.busy_ns, range(len(self.ranks))), default=0)
        return 1 - busiest / self.makespan_ns if self.makespan_ns else 0.0

    def busy_ns(self, rank: int) -> int:
        """Return the time of the rank's compute actions."""
        return sum(end - start for action, start, end in self.ranks[rank] if action.kind.is_compute)


class _Event(Shape[tuple[Action, int, int]]):
    """``[action, start_ns, end_ns]``; the end is not before the start."""

    def read(self, value: object, where: str) -> tuple[Action, int, int]:
        if not isinstance(value, list) or len(value) != 3:
            raise FormatError("expected [action, start_ns, end_ns]", where=where)
        action, start = ACTION.read(value[0], where), integer(value[1], f"{where} (start_ns)")
        return action, start, integer(value[2], f"{where} (end_ns)", low=start)

    def write(self, value: tuple[Action, int, int]) -> list[object]:
        action, start, end = value
        return [action_to(action), start, end]

    def schema(self, definitions: Schema) -> Schema:
        return row_schema(definitions, ACTION, AMOUNT, AMOUNT)


FILE = Document(
    "zbcompile.measured",
    version=1,
    title="zbcompile measured timeline",
    record=Record(
        Measured,
        (
            Field("source", TEXT, "where it was measured", default=""),
            Field(
                "ranks",
                ListOf(ListOf(_Event(), most=len(Kind) * MAX_COUNT), most=MAX_STAGES),
                "per rank, in the order executed: [action, start_ns, end_ns] on one clock, "
                "whose zero is the first start",
            ),
        ),
        "When every action of one step began and ended.",
    ),
)


def dumps(measured: Measured) -> str:
    """Return the text of a measured timeline."""
    return FILE.dumps(measured)


def loads(text: str, where: str = "measured timeline") -> Measured:
    """Read a measured timeline.

    Raises
    ------
    FormatError
        The text is broken, foreign or out of bounds; the message names the entry.
    """
    return FILE.loads(text, where)
