"""examples/tensor_parallel.py on 2 x 2 processes: the bits of eager tensor parallelism, no sum in W."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support import llama_workers
from zbcompile.runtime.launch import spawn


@pytest.mark.timeout(260)
def test_a_sharded_llama_trains_as_its_shards_do_in_a_plain_loop(tmp_path: Path) -> None:
    """To the bit, clipped; the shards together train what the whole model would, but for the order of sums.

    The checkpoint is that of the whole model: torch alone reads it.
    """
    found = spawn(llama_workers.trained, 4, (str(tmp_path / "saved"),), timeout_s=250)
    saved = {name: torch.empty_like(whole) for name, whole in found[0]["whole"].items()}
    dcp.load({"model": saved}, checkpoint_id=tmp_path / "saved")
    for rank, seen in enumerate(found):
        assert seen["ours"]
        for name, value in seen["ours"].items():
            assert torch.equal(value, seen["plain"][name]), (rank, name)
        first, second = seen["sums"]
        assert first["forward"] + second["forward"] == 8  # two per layer
        assert first["full_backward"] + second["full_backward"] == 8
        assert second["backward_input"] == second["full_backward"] > 0
        assert second["backward_weight"] == 0
        assert first["backward_input"] == 0  # nobody wants the gradient of token numbers: all of it is W
    assert set(found[0]["ours"]) | set(found[2]["ours"]) == set(found[0]["whole"])
    assert len({seen["cost"] for seen in found}) == 1  # one plan, with what rank 0 measured
    for name, whole in found[0]["whole"].items():
        one, other = found[0]["plain"][name], found[1]["plain"][name]
        dim = next((d for d in range(one.ndim) if one.shape[d] != whole.shape[d]), None)
        joined = one if dim is None else torch.cat([one, other], dim)
        torch.testing.assert_close(joined, whole, rtol=1e-4, atol=1e-5, msg=name)
        assert torch.equal(saved[name], joined), name
