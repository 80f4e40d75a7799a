"""The short examples and the notebook run, and say what they promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import load_example
from tests.support.places import EXAMPLES
from zbcompile.formats import schedule_json
from zbcompile.runtime.launch import spawn


def test_a_plan_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    solution = load_example("plan_only").main(str(file))
    assert schedule_json.loads(file.read_text()).solution() == solution
    shown = capsys.readouterr().out
    assert "3 GiB a rank: span 312.0 ms" in shown
    assert "OPTIMAL" in shown


def test_an_order_of_ones_own_is_judged_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_example("own_schedule").main() == 0
    shown = capsys.readouterr().out
    assert "refused: 0BW2 stands before its 0F2" in shown
    assert "def program(rank):" in shown


def test_two_stages_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_example("two_stages").main() == 0
    assert capsys.readouterr().out.count("equals autograd's") == 6


def two_stages(rank: int) -> int:
    return int(load_example("two_stages").main())


@pytest.mark.timeout(300)
def test_two_stages_in_two_processes() -> None:
    assert spawn(two_stages, 2, timeout_s=280) == [0, 0]


def test_the_cells_of_the_notebook_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    assert notebook["nbformat"] == 4
    space: dict[str, Any] = {}
    shown = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == []
        *first, last = "".join(cell["source"]).split("\n")
        exec(compile("\n".join(first), f"cell {number}", "exec"), space)  # noqa: S102
        try:
            value = eval(last, space)  # noqa: S307
        except SyntaxError:
            exec(compile(last, f"cell {number}", "exec"), space)  # noqa: S102
            continue
        if value is not None:
            shown.append(value._repr_html_())
    assert len(shown) == 2
    assert all("rank" in page for page in shown)
    assert "8 of 8 gradients equal" in capsys.readouterr().out
