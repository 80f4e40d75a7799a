"""``zbcompile selftest``: what this machine, and above all its GPU, makes of the runtime.

torch is imported when the command runs.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from zbcompile.cli.inputs import check_directory
from zbcompile.cli.shared_options import output, seconds, words
from zbcompile.errors import UsageError
from zbcompile.formats import selftest_json
from zbcompile.formats.streams import check_output, say, write_output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zbcompile.formats.selftest_json import SectionReport, SelfTestReport

__all__ = ["add_options", "run"]

_TIME_LIMIT_S = 300.0
_ON_A_CPU = "on a CPU: times and their ratios say nothing about a GPU; only that every line runs is tested"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = (
        "exit codes: 0 nothing failed; 1 a section failed or ran out of time; 2 usage, or no such device"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what to test (cuda where there is one)")
    parser.add_argument(
        "--size",
        choices=("full", "tiny"),
        help="of models and batches: full needs a GPU with 24 GB, tiny takes seconds on a CPU "
        "(full on cuda, tiny on cpu)",
    )
    parser.add_argument(
        "--only", type=words, nargs="+", metavar="NAME", default=[], help="run these sections alone"
    )
    parser.add_argument(
        "--time-limit", type=seconds, default=_TIME_LIMIT_S, help="seconds for all sections (300)"
    )
    parser.add_argument(
        "-o", "--output", type=output, metavar="FILE", help="write the report here, anew after every section"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the self-test; return 1 where a section failed."""
    check_directory()
    to_output = arguments.output is not None and arguments.output.name == "-"
    if not to_output:
        check_output()
    import torch

    from zbcompile.selftest.run import run as run_sections
    from zbcompile.selftest.settings import SIZES

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device", needed="a GPU that torch sees", fix="give --device cpu")
    size = arguments.size or ("full" if device == "cuda" else "tiny")
    settings = replace(SIZES[size], device=device)

    def tell(report: SelfTestReport) -> None:
        last = report.sections[-1]
        if device == "cpu" and len(report.sections) == 1:
            say(_ON_A_CPU)
        say(f"{last.name}: {last.verdict} in {last.wall_ns / 1e9:.1f} s")
        if arguments.output is not None and not to_output:
            arguments.output.write(selftest_json.dumps(report))

    report = run_sections(settings, only=arguments.only, time_limit_s=arguments.time_limit, tell=tell)
    write_output(selftest_json.dumps(report) if to_output else "\n".join(_lines(report)) + "\n")
    return 0 if report.ok else 1


def _lines(report: SelfTestReport) -> Iterator[str]:
    """Yield the report for people: the machine, the sections with their figures, the verdicts."""
    yield f"self-test on {report.device}, {report.size} size"
    if report.device == "cpu":
        yield _ON_A_CPU
    yield from (f"  {name}: {value}" for name, value in report.versions.items())
    for section in report.sections:
        yield ""
        yield f"{section.name}: {section.reason}"
        yield from _figures(section)
    yield ""
    wide = max((len(section.name) for section in report.sections), default=0)
    for section in report.sections:
        seconds_taken = f"{section.wall_ns / 1e9:6.1f} of {section.budget_ns / 1e9:5.1f} s"
        yield f"{section.name:<{wide}}  {section.verdict:<7}  {seconds_taken}"


def _figures(section: SectionReport) -> Iterator[str]:
    wide = max(map(len, section.figures), default=0)
    for name, value in section.figures.items():
        if isinstance(value, list):
            yield f"  {name}"
            yield from (f"    {line}" for line in value)
        elif isinstance(value, dict):
            yield f"  {name}"
            yield from (f"    {key}: {number}" for key, number in value.items())
        else:
            shown = f"{value:,}" if isinstance(value, int) else value
            yield f"  {name:<{wide}}  {shown}"
