"""`benchmarks/training_lines.py`: both variants run and end alike, and the docs give its counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.training_lines import EXAMPLE, WRITTEN, measure, statements
from tests.support.clean_process import in_clean_process
from tests.support.places import ROOT


@pytest.mark.timeout(200)
def test_both_variants_end_in_the_same_weights_and_their_lines_are_those_of_the_docs() -> None:
    counts = in_clean_process(measure)
    text = (ROOT / "docs/howto/checkpoints.md").read_text()
    for name, count in counts.items():
        assert f"| {name} | {count} |" in text, (name, count)


def test_statements_of_the_parallelism_are_those_of_the_results() -> None:
    count = statements(EXAMPLE, WRITTEN)
    results = (ROOT / "benchmarks/RESULTS.md").read_text()
    assert f"| zbcompile, `examples/tensor_parallel.py` | {count} |" in results
    assert f"{count} statements" in (ROOT / "docs/coming-from/torchtitan.md").read_text()
    with pytest.raises(ValueError, match="no .'nothing'"):
        statements(EXAMPLE, ["nothing"])


def test_statements_in_blocks_count_and_texts_do_not(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text('def f():\n    """Text."""\n    for x in y:\n        g(x)\n\n\nA = 1\nB = 2\n')
    assert statements(file, ["f", "A"]) == 3
