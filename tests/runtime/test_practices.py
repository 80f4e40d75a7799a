"""What training scripts do around a step has the bits of the plain loop, in one process and on four ranks."""

from __future__ import annotations

import pytest
import torch

from tests.support import practice_workers
from tests.support.practice_workers import HALF, PRACTICES, Piped, Plain, State, practised
from zbcompile.runtime.launch import spawn

MODES = ((False, tuple(PRACTICES)), (True, HALF))


@pytest.mark.timeout(200)
def test_four_ranks_train_as_the_plain_loop() -> None:
    there = spawn(practice_workers.run, 4, (), timeout_s=150)
    for half, names in MODES:
        for name, state in practised(Plain(half), names).items():
            parts = [record[half][name] for record in there]
            assert {key for part in parts for key in part} == state.keys(), name
            for part in parts:
                same(part, state, name)


def test_one_process_trains_as_the_plain_loop() -> None:
    seen = []
    for half, names in MODES:
        found, wanted = practised(Piped(half), names), practised(Plain(half), names)
        for name, state in wanted.items():
            assert found[name].keys() == state.keys()
            same(found[name], state, name)
            seen.append(float(state["last.weight"].sum()))
    assert len(set(seen)) == len(seen)  # none of them leaves out what it is about


def same(found: State, wanted: State, name: str) -> None:
    for key, value in found.items():
        assert torch.equal(value, wanted[key]), (name, key)
