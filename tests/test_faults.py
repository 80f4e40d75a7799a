"""Every test that `tests/data/faults-2.md` names for a fault exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def test_the_tests_of_every_fault_exist() -> None:
    rows = [line for line in (TESTS / "data" / "faults-2.md").read_text().splitlines() if line[:2] == "| "]
    rows = [row for row in rows if not row.startswith("| kind |")]
    assert len(rows) == 48
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named or "to come" in row, row
        for file, test in named:
            assert f"def {test}(" in (TESTS / file).read_text(), (file, test)
