"""Replicas some of which share weights and some of which copy them (HSDP), equal to one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.hybrid_workers import MICROBATCHES, REPLICAS, hybrid
from tests.support.mesh_workers import gone_on
from zbcompile.runtime.launch import spawn

pytestmark = [pytest.mark.timeout(300)]


def test_two_copies_of_two_shards_of_two_ranks_train_as_the_plain_loop(tmp_path: Path) -> None:
    """Gradients and weights after AdamW have the reference's bits; norms are within rounding of torch's."""
    records = spawn(hybrid, 8, (str(tmp_path),), timeout_s=250)
    for rank, record in enumerate(records):
        assert record["differ"] == [], rank
        assert record["extra"] == {"at": 2}
        assert record["timeline"] == ["0UNSHARD", "0REDUCE_GRAD", "1UNSHARD", "1REDUCE_GRAD"]
        assert set(map(tuple, record["parts"].values())) == {(4, 8), (4,)}
        ours, again, theirs = record["norms"]
        assert torch.equal(ours, again)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
        assert record["unequal"] < 1e-5  # clipped by norms that differ in rounding
        assert record["skipped"]
        # Gathers and sums were measured on all ranks, and are in the plan.
        assert record["once"] == records[0]["once"]
        assert min(ns for pair in record["once"] for ns in pair) > 1_000
        names = ("UNSHARD", "REDUCE_GRAD", "RESHARD")
        assert record["planned"] == [f"{stage}{name}" for stage in range(2) for name in names]

    # Only the first copy writes, and one process goes on with what it wrote.
    files = [file for file in (tmp_path / "saved").iterdir() if file.suffix == ".distcp"]
    assert {file.name.split("_")[2] for file in files if file.stat().st_size} == {"0", "1", "2", "3"}
    gone_on(tmp_path, REPLICAS * MICROBATCHES)
