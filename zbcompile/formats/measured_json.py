"""Measured timelines as JSON, format ``zbcompile.measured`` version 1: when every action began and ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zbcompile.errors import FormatError
from zbcompile.formats.fields import Fields, format_json, integer, items, parse_json, readable
from zbcompile.formats.profile_json import MAX_STAGES
from zbcompile.formats.schedule_json import action_from, action_to
from zbcompile.schedule.ir import MAX_COUNT, Action, Kind
from zbcompile.schedule.limits import MAX_AMOUNT

__all__ = ["NAME", "Measured", "dumps", "loads"]

NAME = "zbcompile.measured"
VERSION = 1


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
        """Last end of a compute action, in ns."""
        return max((end for row in self.ranks for a, _, end in row if a.kind.is_compute), default=0)

    @property
    def bubble(self) -> float:
        """1 - work of the busiest rank / makespan; 0 where nothing was measured."""
        busiest = max(map(self.busy_ns, range(len(self.ranks))), default=0)
        return 1 - busiest / self.makespan_ns if self.makespan_ns else 0.0

    def busy_ns(self, rank: int) -> int:
        """Return the time of the rank's compute actions."""
        return sum(end - start for action, start, end in self.ranks[rank] if action.kind.is_compute)


def dumps(measured: Measured) -> str:
    """Return the text of a measured timeline."""
    rows = [[[action_to(action), start, end] for action, start, end in row] for row in measured.ranks]
    return format_json(
        {"format": NAME, "version": VERSION, "source": readable(measured.source), "ranks": rows}
    )


def loads(text: str, where: str = "measured timeline") -> Measured:
    """Read a measured timeline.

    Raises
    ------
    FormatError
        The text is broken, foreign or out of bounds; the message names the entry.
    """
    fields = Fields(parse_json(text, where), where)
    fields.header(NAME, VERSION)
    rows = items(fields.take("ranks"), fields.at("ranks"), high=MAX_STAGES)
    ranks = []
    for rank, row in enumerate(rows):
        place = f"{fields.at('ranks')}[{rank}]"
        entries = items(row, place, high=len(Kind) * MAX_COUNT)
        ranks.append(tuple(_event(entry, f"{place}[{k}]") for k, entry in enumerate(entries)))
    result = Measured(tuple(ranks), fields.text("source", ""))
    fields.done()
    return result


def _event(value: object, where: str) -> tuple[Action, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        raise FormatError("expected [action, start_ns, end_ns]", where=where)
    action = action_from(value[0], where, MAX_STAGES, MAX_COUNT)
    start = integer(value[1], f"{where} (start_ns)")
    return action, start, integer(value[2], f"{where} (end_ns)", low=start, high=MAX_AMOUNT)
