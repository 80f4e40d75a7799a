"""What four processes run with examples/tensor_parallel.py: two pipeline stages, each layer in two shards."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.examples import load_example


def trained(rank: int, folder: str) -> dict[str, Any]:
    """Train the example, and its shards in a plain loop; return what both end with, and the collectives."""
    example = load_example("tensor_parallel")
    mesh = example.two_by_two()
    shards = mesh.get_group("tp")
    plain = example.shard_llama(example.build_model(), shards)
    found: dict[str, Any] = {"plain": _plain(example, plain, shards)}
    if rank == 0:
        found["whole"] = _plain(example, example.build_model())
    with example.compile_together(mesh) as pipeline:
        example.train(pipeline, folder)
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


def _plain(
    example: Any, model: torch.nn.Module, shards: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Return the weights after the example's steps without a pipeline."""
    optimizer, count = torch.optim.AdamW(model.parameters(), lr=1e-3), example.MICROBATCHES
    for batch in example.batches():
        optimizer.zero_grad()
        rows = {name: value.chunk(count) for name, value in batch.items()}
        for i in range(count):
            (model(**{name: parts[i] for name, parts in rows.items()}).loss / count).backward()
        norms = [_norm(example, name, p.grad, shards) for name, p in model.named_parameters()]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), example.MAX_NORM, norm)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _norm(example: Any, name: str, grad: Tensor, shards: dist.ProcessGroup | None) -> Tensor:
    """Return the norm of a gradient, of one that is cut that of its parts' norms."""
    norm = torch.linalg.vector_norm(grad)
    if shards is None or not any(fnmatch(name, pattern) for pattern in example.CUT):
        return norm
    parts = [torch.empty_like(norm) for _ in range(shards.size())]
    dist.all_gather(parts, norm, group=shards)
    return torch.linalg.vector_norm(torch.stack(parts))
