"""`benchmarks/training_lines.py`: both variants run and end alike, and the docs give its counts."""

from __future__ import annotations

import pytest

from benchmarks.training_lines import measure
from tests.support.clean_process import in_clean_process
from tests.support.places import ROOT


@pytest.mark.timeout(200)
def test_both_variants_end_in_the_same_weights_and_their_lines_are_those_of_the_docs() -> None:
    counts = in_clean_process(measure)
    text = (ROOT / "docs/howto/checkpoints.md").read_text()
    for name, count in counts.items():
        assert f"| {name} | {count} |" in text, (name, count)
