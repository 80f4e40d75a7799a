"""Train a Hugging Face Llama on 2 x 2 processes: two pipeline stages, each layer in two shards.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py [FOLDER]

Processes 0 and 2 are one pipeline, 1 and 3 the other; 0 and 1 share the layers of the first stage, 2 and 3
those of the second. Every process holds half of the heads of each attention and half of each MLP
(Megatron-LM, arXiv 1909.08053, section 3): two sums over the shards per layer in F, two in B, none in W. The
weights are random, so nothing is downloaded. Gradients are clipped by the norm of the whole model's, and the
checkpoint in FOLDER is that of the whole model. More: docs/howto/tensor-parallel.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

import zbcompile

STEPS, BATCH, MICROBATCHES, LENGTH, VOCABULARY, SHARDS = 4, 8, 4, 16, 64, 2
MAX_NORM = 0.5
CUT = {
    **{f"*.{name}.weight": 0 for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")},
    **{f"*.{name}.weight": 1 for name in ("o_proj", "down_proj")},
}
"""Weights of which a process holds some rows (0) or columns (1); all others are whole on every process."""


class CopyToShards(torch.autograd.Function):
    """x as it is; its gradient is summed over the shards."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, group: str) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return wait_tensor(all_reduce(grad.contiguous(), "sum", ctx.group)), None  # type: ignore[attr-defined]


class SumOverShards(torch.autograd.Function):
    """The sum of x over the shards; each of them gets its gradient as it is."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, group: str) -> Tensor:
        return wait_tensor(all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def keep_shard(linear: nn.Linear, dim: int, group: ProcessGroup) -> None:
    """Keep this process's rows (0) or columns (1) of a weight."""
    shard = linear.weight.detach().chunk(group.size(), dim)[group.rank()].clone()
    linear.weight = nn.Parameter(shard)
    linear.out_features, linear.in_features = shard.shape


def shard_llama(model: LlamaForCausalLM, group: ProcessGroup) -> LlamaForCausalLM:
    """Keep this process's shard of every layer, in place; the names of parameters stay.

    The numbers of heads, of keys and values too, and the width of the MLP are multiples of the group's size.
    Embedding, norms and head are whole on every process, and get the same gradients on each.
    """
    name = group.group_name
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            keep_shard(linear, 0, group)
        for linear in (attention.o_proj, mlp.down_proj):
            keep_shard(linear, 1, group)
            linear.register_forward_hook(lambda _, args, made: SumOverShards.apply(made, name))
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(lambda _, args, made: CopyToShards.apply(made, name))
    return model


def build_model() -> LlamaForCausalLM:
    """Return the whole model, with the same random weights in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        use_cache=False,  # a cache of keys and values is for generating
    )
    return LlamaForCausalLM(config)


def batches() -> Iterator[dict[str, Tensor]]:
    """Yield what the model's forward takes; with labels it returns its loss."""
    for step in range(STEPS):
        start = torch.arange(BATCH).unsqueeze(1) + BATCH * step
        tokens = (start + torch.arange(LENGTH)) % VOCABULARY
        yield {"input_ids": tokens, "labels": tokens}


def two_by_two() -> DeviceMesh:
    """Return where all processes stand: ranks of a pipeline along pp, shards of its stages along tp."""
    return dist.init_device_mesh("cpu", (2, SHARDS), mesh_dim_names=("pp", "tp"))


def compile_together(mesh: DeviceMesh) -> zbcompile.Pipeline:
    """Shard the model and compile it, on all processes at the same time."""
    return zbcompile.compile(
        shard_llama(build_model(), mesh.get_group("tp")),
        num_stages=2,
        example_kwargs=next(batches()),
        num_microbatches=MICROBATCHES,
        time_limit=2.0,
        mesh=mesh,
        shards=CUT,
        observer=zbcompile.progress(),  # says on standard error which steps are done
    )


def train(pipeline: zbcompile.Pipeline, folder: str | None = None) -> None:
    """Train as always, and save a checkpoint of the whole model."""
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    for step, batch in enumerate(batches()):
        losses: list[Tensor] = []
        optimizer.zero_grad()
        pipeline.step(**batch, losses=losses, share_losses=True)
        norm = pipeline.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {torch.stack(losses).mean():.6f}, gradient norm {norm:.4f}")
    if folder is not None:
        pipeline.save(folder, optimizer)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with compile_together(two_by_two()) as pipeline:
        train(pipeline, *sys.argv[1:2])
    dist.destroy_process_group()
