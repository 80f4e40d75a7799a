"""Run the sections one after the other, each in processes of its own and within its own time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import cast

from zbcompile.errors import UsageError
from zbcompile.formats.fields import readable
from zbcompile.formats.selftest_json import FAILED, PASSED, SKIPPED, SectionReport, SelfTestReport
from zbcompile.runtime.launch import Outcome, spawn_outcomes
from zbcompile.selftest import bits, overlap, phases, steps
from zbcompile.selftest.machine import versions
from zbcompile.selftest.settings import Found, Settings

__all__ = ["SECTIONS", "Section", "run"]

_START_S = 60.0
_ALL_S = 300.0
_LAST_LINES = 12


@dataclass(frozen=True)
class Section:
    """One thing that is tested.

    Attributes
    ----------
    name
        One word, for ``--only``.
    title
        What it tests.
    function
        What every process of it runs.
    processes
        How many.
    budget_s
        Seconds after which it is ended, of the 300 for all; more or less in proportion.
    """

    name: str
    title: str
    function: Callable[[int, Settings], Found]
    processes: int
    budget_s: float


SECTIONS = (
    Section("bits", "gradients of four stages in one process", bits.in_one_process, 1, 45),
    Section("gloo", "two processes on one device over gloo", bits.on_two_processes, 2, 35),
    Section("phases", "time of F, B and W beside autograd", phases.times, 1, 95),
    Section("held", "bytes held, predicted and allocated", phases.bytes_held, 1, 25),
    Section("overlap", "copies that overlap with compute", overlap.copies_and_compute, 1, 15),
    Section("steps", "a step, planned and measured", steps.planned_against_measured, 1, 25),
    Section("nccl", "two devices, beside torch's schedules", steps.beside_torch, 2, 60),
)
"""In the order in which they run: what matters most comes first."""


def run(
    settings: Settings,
    *,
    only: Collection[str] = (),
    time_limit_s: float = _ALL_S,
    tell: Callable[[SelfTestReport], None] = lambda report: None,
    sections: Sequence[Section] = SECTIONS,
) -> SelfTestReport:
    """Run the self-test.

    A section that fails, or does not end in time, is reported and the next one runs.

    Parameters
    ----------
    settings
        What is run where.
    only
        Names of sections to run; all if empty.
    time_limit_s
        Seconds for all of them together.
    tell
        Called after each section with the report so far.
    sections
        What there is to run.

    Raises
    ------
    UsageError
        A section's name is not known.
    """
    names = [section.name for section in sections]
    for name in only:
        if name not in names:
            raise UsageError(f"no section is called {name[:40]!r}", needed=" or ".join(names))
    end = time.monotonic() + time_limit_s
    found = spawn_outcomes(_versions, 1, (settings.device,), timeout_s=min(_START_S, time_limit_s))[0]
    about = cast("dict[str, object]", found.value) if found.exit_code == 0 else _broken(found).figures
    reports: list[SectionReport] = []
    for section in sections:
        if not only or section.name in only:
            budget_s = min(section.budget_s * time_limit_s / _ALL_S, end - time.monotonic())
            reports.append(_report(section, settings, budget_s))
            tell(SelfTestReport(settings.device, settings.size, about, tuple(reports)))
    return SelfTestReport(settings.device, settings.size, about, tuple(reports))


def _versions(rank: int, device: str) -> dict[str, object]:
    return versions(device)


def _report(section: Section, settings: Settings, budget_s: float) -> SectionReport:
    """Run one section within its time."""
    begin = time.monotonic_ns()
    if budget_s <= 1:
        found = Found(verdict=FAILED, reasons=["no time was left"])
    else:
        found = _joined(
            spawn_outcomes(section.function, section.processes, (settings,), timeout_s=budget_s), budget_s
        )
    reason = "; ".join(found.reasons) or section.title
    wall_ns = time.monotonic_ns() - begin
    budget_ns = int(max(budget_s, 0) * 1e9)
    return SectionReport(section.name, found.verdict, readable(reason), wall_ns, budget_ns, found.figures)


def _joined(outcomes: Sequence[Outcome], budget_s: float) -> Found:
    """Return what all processes of a section found together: the worst verdict, and all figures."""
    parts = [
        cast("Found", outcome.value)
        if outcome.exit_code == 0
        else _broken(outcome, f"did not end within {budget_s:.0f} s")
        for outcome in outcomes
    ]
    verdicts = [part.verdict for part in parts]
    verdict = next((word for word in (FAILED, PASSED, SKIPPED) if word in verdicts), PASSED)
    figures = {name: value for part in reversed(parts) for name, value in part.figures.items()}
    reasons = dict.fromkeys(reason for part in parts for reason in part.reasons)
    return Found(figures, verdict, list(reasons))


def _broken(outcome: Outcome, late: str = "did not end in time") -> Found:
    """Return what is said of a process that did not return."""
    where = f"process {outcome.rank}"
    if outcome.exit_code is None:
        return Found(verdict=FAILED, reasons=[f"{where} {late}"])
    lines = [readable(line) for line in (outcome.error or "").splitlines()]
    last = lines[-1] if lines else f"ended with code {outcome.exit_code}"
    return Found({f"{where}: traceback": lines[-_LAST_LINES:]}, FAILED, [f"{where}: {last}"])
