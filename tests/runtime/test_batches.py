"""Batches over processes: given where they are used, of changing shape, refused where they differ."""

from __future__ import annotations

import pytest
import torch

from tests.support import batch_workers
from tests.support.batch_workers import CASES, NUM_RANKS
from zbcompile.runtime.launch import spawn


@pytest.mark.timeout(200)
def test_ranks_run_batches_that_change_with_what_their_stages_take_and_refuse_those_that_differ() -> None:
    there = spawn(batch_workers.run, NUM_RANKS, (), timeout_s=150)
    here = batch_workers.trained(batch_workers.compiled(), None)
    for record in there:
        for mine, wanted in zip(record["losses"], here["losses"], strict=True):
            assert len(mine) == len(wanted)
            assert all(map(torch.equal, mine, wanted))
        for found, expected in zip(record["metrics"], here["metrics"], strict=True):
            assert torch.equal(found["right"], expected["right"])
        for name, grad in record["grads"].items():
            assert torch.equal(grad, here["grads"][name]), name
        assert len(record["after"]) == 4
        words = "the ranks are in different meetings: rank 0 in the step; rank 3 in the evaluation"
        assert words in record["apart"]
        for text in record["evaluated"]:
            assert "the batch differs from that of rank 0 (args[0])" in text, text
    assert {name for record in there for name in record["grads"]} == set(here["grads"])
    for case, (_, culprits, words) in enumerate(CASES):
        for rank, record in enumerate(there):
            text = record["refused"][case]
            assert words in text, (case, rank, text)
            refused = any(f"rank {culprit} refused step" in text for culprit in culprits)
            assert rank in culprits or refused, (case, rank, text)
