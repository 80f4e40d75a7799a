"""What notebooks show, without a notebook and without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from tests.show.test_show import drawn, example
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.solution import Solution


class Printer:
    """Collects what is printed, as IPython's does."""

    def __init__(self) -> None:
        self.written = ""

    def text(self, text: str) -> None:
        self.written += text


def solution() -> Solution:
    file = example()
    return Solution(file.problem, file.schedule, file.certificate, origin="<b>ZB-H1</b>")


def test_a_solution_draws_itself() -> None:
    shown = solution()._repr_html_()
    assert shown.startswith("<pre")
    assert "13.6 % shorter than 1F1B" in shown
    assert "<b>" not in shown
    assert "<script" not in shown
    printer = Printer()
    solution()._repr_pretty_(printer, False)
    assert printer.written + "\n" == drawn(replace(example(), origin="<b>ZB-H1</b>"), 120)


def test_a_schedule_alone_is_timed_by_units() -> None:
    assert "no profile: F = B = W = 1 unit" in example().schedule.compute_only()._repr_html_()


def test_an_order_that_deadlocks_is_shown_as_text() -> None:
    file = example()
    order = [row[::-1] for row in file.schedule.order]
    broken = Schedule.of(file.schedule.placement, 8, order)
    shown = broken._repr_html_()
    assert shown.startswith("<pre>no picture: deadlock")
    assert "rank 0: " in shown
    printer = Printer()
    broken._repr_pretty_(printer, False)
    assert "no picture: deadlock" in printer.written


def test_no_torch_is_imported_for_it() -> None:
    code = (
        "import sys; from zbcompile.schedule.ir import Placement, Schedule;"
        "print(len(Schedule.parse('placement 0\\nmicrobatches 1\\nrank 0: 0F0 0BW0\\n')._repr_html_()));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
