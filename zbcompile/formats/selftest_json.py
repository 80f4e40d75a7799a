"""The report of ``zbcompile selftest`` with every figure, format ``zbcompile.selftest`` version 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zbcompile.formats.records import Document, Field, Record
from zbcompile.formats.shapes import AMOUNT, TEXT, Json, ListOf, Word

__all__ = ["FAILED", "FILE", "PASSED", "SKIPPED", "SectionReport", "SelfTestReport", "dumps", "loads"]

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_MAX_SECTIONS = 100


@dataclass(frozen=True, slots=True)
class SectionReport:
    """What one section found.

    Attributes
    ----------
    name
        Of the section.
    verdict
        `PASSED`, `FAILED`, or `SKIPPED` where the machine has not what it needs.
    reason
        The verdict in words.
    wall_ns, budget_ns
        Time that it took and that it was given.
    figures
        Every number and word that it found, by name; JSON values.
    """

    name: str
    verdict: str
    reason: str
    wall_ns: int
    budget_ns: int
    figures: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """What all sections found.

    Attributes
    ----------
    device
        ``cpu`` or ``cuda``.
    size
        ``full`` or ``tiny``: how large models and batches are.
    versions
        Of Python, torch, CUDA, NCCL and zbcompile, and the name and number of devices; JSON values.
    sections
        In the order in which they ran.
    """

    device: str
    size: str
    versions: Mapping[str, object]
    sections: tuple[SectionReport, ...]

    @property
    def ok(self) -> bool:
        """Whether no section failed."""
        return all(section.verdict != FAILED for section in self.sections)


_SECTION = Record(
    SectionReport,
    (
        Field("name", TEXT, "of the section"),
        Field("verdict", Word("verdict", (PASSED, FAILED, SKIPPED)), "skipped: the machine lacks something"),
        Field("reason", TEXT, "the verdict in words"),
        Field("wall_ns", AMOUNT, "time that it took"),
        Field("budget_ns", AMOUNT, "time that it was given"),
        Field("figures", Json(), "what it found, by name"),
    ),
    "What one section found.",
    name="section",
)

FILE = Document(
    "zbcompile.selftest",
    version=1,
    title="zbcompile self-test report",
    record=Record(
        SelfTestReport,
        (
            Field("device", Word("device", ("cpu", "cuda")), "what was tested"),
            Field("size", Word("size", ("full", "tiny")), "how large models and batches are"),
            Field("versions", Json(), "versions, and the name and number of devices"),
            Field("sections", ListOf(_SECTION, most=_MAX_SECTIONS), "in the order in which they ran"),
        ),
        "What a machine makes of the runtime.",
    ),
)


def dumps(report: SelfTestReport) -> str:
    """Return the text of a report."""
    return FILE.dumps(report)


def loads(text: str, where: str = "self-test report") -> SelfTestReport:
    """Read a report.

    Raises
    ------
    FormatError
        The text is broken, foreign or out of bounds; the message names the field.
    """
    return FILE.loads(text, where)
