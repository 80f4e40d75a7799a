"""Stages that exchange data with processes beside their pipeline: tensor and sequence parallelism, 2 x 2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support import peer_workers
from tests.support.peer_workers import BLOCKS, WIDTH, batch, overlapped, two_by_two
from zbcompile.runtime.launch import spawn


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    return spawn(two_by_two, 4, timeout_s=250)


@pytest.mark.timeout(260)
def test_gradients_equal_the_plain_loop_over_the_same_shards(found: list[dict[Any, Any]]) -> None:
    """To the bit: the same collectives over the same values in the same order."""
    for rank, seen in enumerate(found):
        for case, same in seen["equal"].items():
            assert same, (rank, case)
            assert all(same.values()), (rank, case, same)
        assert all(seen["eval", kind] for kind in BLOCKS)
    names = [set(seen["equal"]["tensor", True]) for seen in found]
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert len(names[0] | names[2]) == 12


def test_shards_train_what_one_process_would() -> None:
    """The plain loop over shards that the others are held against is itself that of the whole model.

    Not to the bit: one process sums over all columns of a product at once.
    """
    record = spawn(whole_and_shards, 2, timeout_s=100)
    assert all(error < 1e-6 for _, errors in enumerate(record) for error in errors.values()), record


def whole_and_shards(rank: int) -> dict[str, float]:
    """Return how far the gradients of this rank's shards are from those of the whole model (relative)."""
    group = torch.distributed.group.WORLD
    assert group is not None
    mine = peer_workers.model("tensor", group, rank)
    x, y = batch()
    nn.functional.mse_loss(mine(x), y).backward()
    weights = [tuple(w.clone().requires_grad_() for w in row) for row in peer_workers.whole_weights()]
    hidden = x
    for up, bias, down in weights:
        hidden = hidden + torch.relu(hidden @ up.t() + bias) @ down.t()
    nn.functional.mse_loss(hidden, y).backward()
    part, errors = slice(rank * WIDTH, (rank + 1) * WIDTH), {}
    for k, (block, (up, bias, down)) in enumerate(zip(mine, weights, strict=True)):
        pairs = {
            "up": (block.up.weight.grad, up.grad[part]),
            "bias": (block.up.bias.grad, bias.grad[part]),
            "down": (block.down.weight.grad, down.grad[:, part]),
        }
        errors |= {
            f"{k}.{name}": float((got - want).norm() / want.norm()) for name, (got, want) in pairs.items()
        }
    return errors


def test_what_would_hang_is_refused(found: list[dict[Any, Any]]) -> None:
    for seen in found:
        assert "collective with processes that run another plan" in seen["own plan"]
        assert "plan_group=" in seen["own plan"]
        assert "collective with other ranks of its own pipeline" in seen["own ranks"]
        assert "a batch of another shape" in seen["other rows"]
        assert "replan() plans for one pipeline alone" in seen["replan"]
        assert "exchanges data with the processes" in seen["norm"]
        assert "scaler() decides for these ranks alone" in seen["scaler"]


def test_a_fused_backward_waits_behind_the_weights_products() -> None:
    """Between a collective of BW and its wait stand products of weights, and the gradients are the same."""
    for record in spawn(overlapped, 2, timeout_s=100):
        plain, moved = record["overlap_collectives"], record[""]
        assert sorted(plain) == sorted(moved)
        assert _most_products_on_the_way(plain) == 0
        assert _most_products_on_the_way(moved) >= 2
        for name, grad in record["overlap_collectives", "grad"].items():
            assert torch.equal(grad, record["", "grad"][name]), name


def test_what_was_gathered_is_kept_or_gathered_again() -> None:
    """A level of recompute of its own: fewer bytes, and the same bits.

    W gathers both factors of a product again, BW only the activation: its gradient is at hand.
    """
    for record in spawn(peer_workers.gathered_again, 2, timeout_s=100):
        kept, again = record["none", "gathers"], record["regather", "gathers"]
        assert kept == {"forward": 1, "backward_input": 2, "backward_weight": 0, "full_backward": 2}
        assert again == {"forward": 1, "backward_input": 2, "backward_weight": 2, "full_backward": 3}
        for before, after in zip(record["none", "bytes"], record["regather", "bytes"], strict=True):
            assert after < before
        for stage, names in enumerate(record["offered"]):
            assert f"stage {stage}, recompute=regather" in names
        assert record["regather", "levels"] == ("regather", "regather")
        for level in ("regather", "auto"):
            for name, grad in record[level, "grad"].items():
                assert torch.equal(grad, record["none", "grad"][name]), (level, name)


def _most_products_on_the_way(calls: list[str]) -> int:
    """Return the most products between a collective and the next wait."""
    most, now, started = 0, 0, False
    for call in calls:
        if "all_reduce" in call:
            now, started = 0, True
        elif "wait_tensor" in call:
            most, started = max(most, now), False
        else:
            now += started and "mm" in call
    return most
