"""The figures at the right of every rank: how long it is idle or held by sends, and its peak of memory."""

from __future__ import annotations

from dataclasses import dataclass

from zbcompile.formats.measured_json import Measured
from zbcompile.show.boxes import held_times
from zbcompile.show.summary import Summary
from zbcompile.show.units import bytes_unit, percent

__all__ = ["Notes"]


@dataclass(frozen=True, slots=True)
class Notes:
    """A small table beside the lanes.

    Attributes
    ----------
    title
        Names of its columns.
    rows
        Per rank, its line.
    """

    title: str
    rows: tuple[str, ...]

    @staticmethod
    def of(summary: Summary) -> Notes:
        """Collect the figures of a timed order."""
        timeline = summary.timeline
        ranks, whole = range(timeline.schedule.num_ranks), max(1, timeline.value_ns)
        holds = [sum(end - start for _, start, end in held_times(timeline, rank)) for rank in ranks]
        idle = [timeline.value_ns - timeline.busy_ns(rank) for rank in ranks]
        columns = [("idle", [percent(ns / whole) for ns in idle])]
        if any(holds):
            columns.append(("held", [percent(ns / whole) for ns in holds]))
        if summary.has_profile:
            caps = timeline.problem.caps
            unit = bytes_unit(max([*timeline.peak_bytes, *(cap for cap in caps if cap is not None)]))
            peaks = [unit.number(peak) for peak in timeline.peak_bytes]
            if len(set(caps)) > 1:
                limits = ["-" if cap is None else unit.number(cap) for cap in caps]
                columns.append((f"{unit.name} of", [f"{a}/{b}" for a, b in zip(peaks, limits, strict=True)]))
            else:
                columns.append((unit.name, peaks))
        texts = [_column(name, values) for name, values in columns]
        lines = ["".join(row) for row in zip(*texts, strict=True)]
        return Notes(lines[0], tuple(lines[1:]))

    @property
    def width(self) -> int:
        """Columns that it takes."""
        return len(self.title)

    def planned(self, rank: int) -> str:
        """Return a rank's line."""
        return self.rows[rank]

    @staticmethod
    def measured(measured: Measured, rank: int) -> str:
        """Return the idle share of a rank as it ran."""
        whole = measured.makespan_ns
        return "  " + percent(1.0 - measured.busy_ns(rank) / whole) if whole else ""


def _column(name: str, values: list[str]) -> list[str]:
    width = max(map(len, [name, *values]))
    return ["  " + text.rjust(width) for text in (name, *values)]
