"""What four processes run with examples/tensor_parallel.py: two pipeline stages, each layer in two shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.examples import load_example


def trained(rank: int) -> dict[str, Any]:
    """Train the example, and its shards in a plain loop; return what both end with, and the collectives."""
    example = load_example("tensor_parallel")
    dist.barrier()
    line, shards = example.two_by_two()
    found: dict[str, Any] = {"plain": _plain(example, example.shard_llama(example.build_model(), shards))}
    if rank == 0:
        found["whole"] = _plain(example, example.build_model())
    with example.compile_together(line, shards) as pipeline:
        example.train(pipeline)
        found["ours"] = {name: p.detach() for name, p in pipeline.named_parameters()}
        found["sums"] = [
            {
                name: sum(
                    "all_reduce" in str(node.target) for node in getattr(stage.graphs, name).graph.nodes
                )
                for name in ("forward", "backward_input", "backward_weight", "full_backward")
            }
            for stage in pipeline._compiled.staged.stages
        ]
        found["cost"] = pipeline.profile.stages[1]
    return found


def _plain(example: Any, model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights after the example's steps without a pipeline."""
    optimizer, count = torch.optim.AdamW(model.parameters(), lr=1e-3), example.MICROBATCHES
    for batch in example.batches():
        optimizer.zero_grad()
        rows = {name: value.chunk(count) for name, value in batch.items()}
        for i in range(count):
            (model(**{name: parts[i] for name, parts in rows.items()}).loss / count).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}
