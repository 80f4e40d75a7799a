"""Optimizers without a barrier on a mesh: two replicas of two ranks, equal to the way with a barrier."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.mesh_update_workers import DIMS, update_on_meshes
from tests.support.update_workers import POISONED
from zbcompile.runtime.launch import spawn

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    return spawn(update_on_meshes, 4, timeout_s=250)


@pytest.mark.parametrize("dim", DIMS)
def test_replicas_that_do_not_wait_train_as_with_a_barrier(found: list[dict[Any, Any]], dim: str) -> None:
    """With steps that clip, one that is left out, and neither: weights, moments and losses to the bit."""
    for seen in found:
        wanted, given = seen[dim, False], seen[dim, True]
        assert given["decided"] == wanted["decided"]
        assert given["decided"] == found[0][dim, True]["decided"]
        for what in ("state", "moments"):
            assert given[what].keys() == wanted[what].keys()
            assert all(torch.equal(t, wanted[what][name]) for name, t in given[what].items()), what
        assert all(map(torch.equal, given["losses"], wanted["losses"]))
        assert len(given["losses"]) == len(wanted["losses"])
    decided = found[0][dim, True]["decided"]
    assert [k for k, (_, _, skipped) in enumerate(decided) if skipped] == [POISONED]
    assert {clipped for _, clipped, skipped in decided if not skipped} == {False, True}


def test_a_parameter_whose_memory_was_replaced_is_refused(found: list[dict[Any, Any]]) -> None:
    for seen in found:
        assert "a parameter was changed while" in seen["replaced"]


def test_stages_with_collectives_are_refused_by_name(found: list[dict[Any, Any]]) -> None:
    for seen in found:
        assert "post_validation leaves out the rest of a step that is undone" in seen["tensor"]
        assert "collective of stage 0 in it" in seen["tensor"]
