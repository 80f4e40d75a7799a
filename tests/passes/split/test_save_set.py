"""What is held between F, B and W: predicted bytes against live tensors, and the theoretical figures."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from tests.support.frontend_helpers import state_of
from tests.support.model_zoo import PLAIN, TRANSFORMERS, Case
from zbcompile.passes.capture.capture import capture
from zbcompile.passes.capture.nested_values import flatten
from zbcompile.passes.partition.partition import partition
from zbcompile.passes.split.save_set import Phase, cut, leaves
from zbcompile.passes.split.split_backward import TracedStages
from zbcompile.passes.split.stage_graphs import StageGraphs

MEASURED = [
    "gpt2", "llama", "phi3", "bert with labels", "t5", "resnet", "deepseek_v3", "LSTM", "U-Net", "LoRA",
    "CNN with BatchNorm", "first layers frozen", "custom Function", "autocast bf16 over half",
]  # fmt: skip


def _held(saved: list[Any], alive: list[Tensor]) -> int:
    """Bytes of the storages in ``saved`` that nothing else keeps alive."""
    known = {tensor.untyped_storage().data_ptr() for tensor in alive}
    storages = {t.untyped_storage().data_ptr(): t for t in saved if isinstance(t, Tensor)}
    numbers = sum(8 for value in saved if isinstance(value, int | float))
    return numbers + sum(t.untyped_storage().nbytes() for key, t in storages.items() if key not in known)


def measured_bytes(
    stages: Sequence[StageGraphs], model: nn.Module, flat: list[Tensor]
) -> list[tuple[int, int]]:
    """(held between F and B, held between B and W) of every stage, from the live tensors."""
    state, values, amounts, saves = state_of(model), {}, [], []
    alive = [*state.values(), *flat]
    with torch.no_grad():
        for stage in stages:
            inputs = [flat[p.source[1]] if p.source[0] == "batch" else values[p.name] for p in stage.inputs]
            outs, saved = stage.run_forward(state, inputs)
            values |= {port.name: out for port, out in zip(stage.outputs, outs, strict=True)}
            saves.append(saved)
        for stage, saved in zip(stages, saves, strict=True):
            known = [*alive, *stage.constants]
            before = _held(saved, known)
            grads: list[Tensor | None] = [
                torch.randn(p.shape).to(p.dtype) if p.has_gradient else None for p in stage.outputs
            ]
            _, after = stage.run_backward_input(saved, grads)
            amounts.append((before, _held(after, known)))
    return amounts


@pytest.mark.parametrize("name", MEASURED)
def test_predicted_bytes_are_held(name: str) -> None:
    case: Case = {**PLAIN, **TRANSFORMERS}[name]
    torch.manual_seed(0)
    model = case.build().train(case.train)
    args, kwargs, target = case.batch()
    captured = capture(model, args, kwargs, target=target, loss_fn=case.loss)
    flat = flatten((args, kwargs, target))[0]
    traced = TracedStages(captured, partition(captured, 3))
    for recompute in ("none", "min_memory"):
        stages = traced.split([recompute] * 3)
        predicted = [(stage.saved_bytes, stage.saved_for_weight_bytes) for stage in stages]
        assert measured_bytes(stages, model, flat) == predicted, recompute


def _gpt2_without_dropout() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=6, n_embd=128, n_head=2, vocab_size=61, n_positions=256, bos_token_id=1, eos_token_id=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )
    )  # fmt: skip


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=256, use_cache=False,
        )
    )  # fmt: skip


FIGURES = {
    "gpt2": (_gpt2_without_dropout, "transformer.h", 16.0, 16.1),
    "llama": (_llama, "model.layers", 15.25, 15.8),
}
"""Elements held per layer, in units of one sequence x batch x hidden tensor: in theory after B, and at most
after F with min_memory. After B a layer holds the input and the output gradient of each of its matmuls.
GPT-2: 1 + 1 + 1 + 4 and 3 + 1 + 4 + 1, the 32sbh bytes at two bytes each of Qi et al. 2024. Llama with
feed-forward width 2.75 and half as many key-value heads: 1 + 1 + 1 + 2.75 and 2 + 1 + 2 * 2.75 + 1."""


@pytest.mark.parametrize("name", FIGURES)
def test_theoretical_memory_per_layer(name: str) -> None:
    build, prefix, after_b, after_f = FIGURES[name]
    torch.manual_seed(0)
    ids = torch.randint(61, (4, 256))
    kwargs = {"input_ids": ids, "labels": ids}
    points = [f"{prefix}.2", f"{prefix}.4"]
    layers_units = 2 * 4 * 256 * 128 * 4
    model = build().train()
    captured = capture(model, (), kwargs)
    traced = TracedStages(captured, partition(captured, 3, split_points=points))
    plain, small = (traced.split([level] * 3)[1] for level in ("none", "min_memory"))
    assert plain.saved_for_weight_bytes / layers_units == pytest.approx(after_b, abs=0.02)
    assert small.saved_for_weight_bytes / layers_units == pytest.approx(after_b, abs=0.02)
    assert small.saved_bytes / layers_units <= after_f
    assert small.saved_bytes < plain.saved_bytes


def test_price_lies_between_none_and_full() -> None:
    case = TRANSFORMERS["gpt2"]
    torch.manual_seed(0)
    model, (args, kwargs, _) = case.build(), case.batch()

    captured = capture(model, args, kwargs)
    traced = TracedStages(captured, partition(captured, 2))
    levels: list[str | float] = ["full", 1e6, 1e9, 1e14, "none"]
    *amounts, none = (traced.split([level] * 2)[1].saved_bytes for level in levels)
    assert amounts == sorted(amounts)
    assert amounts[0] < amounts[-1] == none


def _random_phase(seed: int) -> tuple[Phase, list[Node], dict[Node, int]]:
    """A small graph: arguments, calls of the earlier phase, calls of the later one."""
    rng = random.Random(seed)
    graph = Graph()
    nodes: list[Node] = [graph.placeholder(f"x{i}") for i in range(2)]
    early: list[Node] = []
    for i in range(4):
        early.append(
            graph.call_function(torch.add, tuple(rng.sample(nodes, min(2, len(nodes)))), name=f"f{i}")
        )
        nodes.append(early[-1])
    late = []
    for i in range(2):
        late.append(graph.call_function(torch.mul, (rng.choice(early), rng.choice(nodes)), name=f"b{i}"))
    nodes += late
    size = {node: rng.randrange(1, 10) for node in nodes}
    price = {node: rng.choice([0, 1, 3, None]) for node in nodes}
    phase = Phase(nodes, late, late, early, {nodes[0]}, size.__getitem__, price.__getitem__)
    return phase, early, size


def _cost(phase: Phase, kept: set[Node]) -> int | None:
    """Bytes kept plus the price of what is computed again; None if that is not possible."""
    read, again = leaves(phase.needed, kept)
    total = sum(phase.size(node) or 0 for node in read if node not in phase.free)
    for node in again:
        if node in phase.early:
            price = phase.price(node)
            if price is None:
                return None
            total += price
    return total


@pytest.mark.parametrize("seed", range(30))
def test_cut_is_optimal_by_brute_force(seed: int) -> None:
    phase, early, _ = _random_phase(seed)
    subsets = itertools.chain.from_iterable(itertools.combinations(early, k) for k in range(len(early) + 1))
    costs = [_cost(phase, set(kept)) for kept in subsets]
    assert _cost(phase, cut(phase)) == min(cost for cost in costs if cost is not None)
