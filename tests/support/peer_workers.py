"""What four processes run whose stages exchange data beside the pipeline: two ranks, each with two shards.

Processes 0 and 2 are one pipeline, 1 and 3 the other; 0 and 1 share the layers of the first stage, 2 and 3
those of the second (Megatron's tensor parallelism, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_gather_tensor as all_gather
from torch.distributed._functional_collectives import all_reduce, reduce_scatter_tensor, wait_tensor

import zbcompile
from zbcompile.errors import ZBCompileError
from zbcompile.schedule.devices import device_named
from zbcompile.schedule.simulate import simulate

WIDTH, SHARDS = 8, 2
NUM_MICROBATCHES = 4


def _copy(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return x; its gradient is summed over the shards."""

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:
            return given.view_as(given)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return wait_tensor(all_reduce(grad.contiguous(), "sum", group))

    return Copy.apply(x)  # type: ignore[no-any-return]


def _reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over the shards; its gradient goes to each of them."""

    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:
            return wait_tensor(all_reduce(given.contiguous(), "sum", group))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    return Reduce.apply(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Two products, the first one's columns and the second one's rows on one shard."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + _reduce(self.down(torch.relu(self.up(_copy(x, self.group)))), self.group)


class GatheredBlock(Block):
    """The same between layers that hold half of the rows each (sequence parallelism)."""

    def forward(self, x: Tensor) -> Tensor:
        rows = all_gather(x, 0, self.group)
        made: Tensor = reduce_scatter_tensor(self.down(torch.relu(self.up(rows))), "sum", 0, self.group)
        return x + made


BLOCKS: dict[str, type[Block]] = {"tensor": Block, "sequence": GatheredBlock}


def whole_weights(seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the weights of all blocks as one process would hold them."""
    torch.manual_seed(seed)
    wide = SHARDS * WIDTH
    return [(torch.randn(wide, WIDTH) / 3, torch.randn(wide), torch.randn(WIDTH, wide) / 4) for _ in range(4)]


def model(kind: str, group: ProcessGroup, shard: int) -> nn.Sequential:
    """Return the blocks with one shard's weights."""
    blocks = nn.Sequential(*(BLOCKS[kind](group) for _ in range(4)))
    mine = slice(shard * WIDTH, (shard + 1) * WIDTH)
    with torch.no_grad():
        for block, (up, bias, down) in zip(blocks, whole_weights(), strict=True):
            block.up.weight.copy_(up[mine])
            block.up.bias.copy_(bias[mine])
            block.down.weight.copy_(down[:, mine])
    return blocks


def batch() -> tuple[Tensor, Tensor]:
    """Return a batch and its targets."""
    torch.manual_seed(1)
    return torch.randn(16, WIDTH), torch.randn(16, WIDTH)


def tried(call: Callable[[], object]) -> str:
    """Return the words of the error that a call raises, or nothing."""
    try:
        call()
    except ZBCompileError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def two_by_two(rank: int) -> dict[str, Any]:
    """Train one step of each kind of model, measured and counted; then what is refused."""
    dist.barrier()
    lines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    line, shard = lines[rank % 2], shards[rank // 2]
    x, y = batch()
    form = {"loss_fn": nn.functional.mse_loss, "num_microbatches": NUM_MICROBATCHES, "time_limit": 0.5}
    example = {"example_args": (x,), "example_target": y, "stall_limit": 60.0}
    together = {"group": line, "plan_group": dist.group.WORLD}
    found: dict[str, Any] = {"equal": {}}
    for kind in BLOCKS:
        plain = model(kind, shard, rank % 2)
        for xs, ys in zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True):
            (nn.functional.mse_loss(plain(xs), ys) / NUM_MICROBATCHES).backward()
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        for profile in (None, device_named("CPU"))[: 2 if kind == "tensor" else 1]:
            mine = model(kind, shard, rank % 2)
            pipeline = zbcompile.compile(mine, 2, profile=profile, **together, **form, **example)
            pipeline.step(x, target=y)
            got = {name: p.grad for name, p in pipeline.named_parameters()}
            same = {name: torch.equal(grad, wanted[name]) for name, grad in got.items()}
            found["equal"][kind, profile is None] = same
            result = pipeline.eval(x)  # None but on the last rank
            rows = torch.cat([plain(xs) for xs in x.chunk(NUM_MICROBATCHES)])
            found["eval", kind] = rank < 2 if result is None else torch.equal(result, rows)
            found["replan"] = tried(pipeline.replan)
            found["norm"], found["scaler"] = tried(pipeline.grad_norm), tried(pipeline.scaler)
            found["other rows"] = tried(lambda: pipeline.step(x[:8], target=y[:8]))  # noqa: B023
            pipeline.close()
    alone = model("tensor", shard, rank % 2)
    found["own plan"] = tried(lambda: zbcompile.compile(alone, 2, group=line, **form, **example))
    crossed = model("tensor", line, rank // 2)
    found["own ranks"] = tried(
        lambda: zbcompile.compile(crossed, 2, verify=False, **together, **form, **example)
    )
    return found


def on_both(rank: int, kind: str, num_stages: int, **options: Any) -> zbcompile.Pipeline:
    """Compile on two processes that share every layer, each of them a pipeline of its own."""
    pair, alone = dist.new_group([0, 1]), [dist.new_group([0]), dist.new_group([1])]
    x, y = batch()
    return zbcompile.compile(
        model(kind, pair, rank),
        num_stages,
        group=alone[rank],
        plan_group=pair,
        example_args=(x,),
        example_target=y,
        loss_fn=nn.functional.mse_loss,
        num_microbatches=NUM_MICROBATCHES,
        time_limit=0.5,
        **options,
    )


def gathered_again(rank: int) -> dict[Any, Any]:
    """Return per level the collectives and the bytes of the second of two stages, and the gradients."""
    dist.barrier()
    x, y = batch()
    found: dict[Any, Any] = {"cap": None}
    for level in ("none", "regather", "auto"):
        cap = found["cap"] if level == "auto" else None
        pipeline = on_both(
            rank, "sequence", 2, recompute=level, profile=device_named("CPU"), memory_limit=cap
        )
        assert pipeline._compiled is not None
        staged = pipeline._compiled.staged
        stage = staged.stages[1]
        if level == "none":
            found["cap"] = simulate(pipeline.schedule, pipeline.solution.problem).peak_bytes[0] - 1
        found[level, "gathers"] = {
            name: sum("all_gather" in str(node.target) for node in getattr(stage.graphs, name).graph.nodes)
            for name in ("forward", "backward_input", "backward_weight", "full_backward")
        }
        found[level, "bytes"] = stage.saved_bytes, stage.saved_for_weight_bytes
        found[level, "levels"] = staged.levels
        offered = pipeline.solution.offered
        if level == "auto" and offered is not None:
            found["offered"] = [{way.name for way in cost.variants} for cost in offered.stages]
        pipeline.step(x, target=y)
        found[level, "grad"] = {name: p.grad for name, p in pipeline.named_parameters()}
        pipeline.close()
    return found


def overlapped(rank: int) -> dict[str, Any]:
    """Return the calls of each graph of a stage, with and without the reordering."""
    dist.barrier()
    x, y = batch()
    found: dict[str, Any] = {}
    for skip in ("", "overlap_collectives"):
        os.environ["ZBCOMPILE_SKIP"] = skip
        pipeline = on_both(rank, "tensor", 1)
        assert pipeline._compiled is not None
        graphs = pipeline._compiled.staged.stages[0].graphs
        found[skip] = [str(n.target) for n in graphs.full_backward.graph.nodes if n.op == "call_function"]
        pipeline.step(x, target=y)
        found[skip, "grad"] = {name: p.grad for name, p in pipeline.named_parameters()}
        pipeline.close()
    return found
