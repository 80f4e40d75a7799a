"""Models without weights: captured, cut, split, counted and planned on the meta device, and built later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zbcompile.compiler.stages import build_stages
from zbcompile.errors import CaptureError, UsageError
from zbcompile.passes.capture.capture import capture


def llama(layers: int = 2, **changes: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    } | changes
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))


def on_meta(build=llama, **changes: int) -> nn.Module:
    with torch.device("meta"):
        return build(**changes)


def tokens(device: str = "cpu", length: int = 16) -> dict[str, Tensor]:
    ids = torch.arange(2 * length, device=device).reshape(2, length) % 61
    return {"input_ids": ids, "labels": ids}


def test_stages_of_a_model_without_weights_equal_those_of_the_model() -> None:
    real = build_stages(llama(), 2, (), tokens())
    meta = build_stages(on_meta(), 2, (), tokens("meta"))
    for one, other in zip(real.stages, meta.stages, strict=True):
        assert (one.inputs, one.outputs, one.call_layout) == (other.inputs, other.outputs, other.call_layout)
        assert one.saved_bytes == other.saved_bytes
        assert one.saved_for_weight_bytes == other.saved_for_weight_bytes
        assert one.signature_hash() == other.signature_hash()
    targets = {str(n.target) for s in meta.stages for n in s.graphs.forward.graph.nodes}
    assert any("flash_attention" in target for target in targets)
    assert not any("_softmax." in target and "log" not in target for target in targets)


def test_the_model_is_left_on_meta_with_its_own_tensors() -> None:
    model = on_meta()
    before = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    capture(model, (), tokens("cpu"))
    after = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


class AsksForMeta(nn.Module):
    """Remembers the device it was built on, and makes tensors on the default device."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.where = self.lin.weight.device

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x) + torch.ones(8, device=self.where) + torch.arange(8)
        return self.lin(x.to(self.where)) + torch.zeros(8, device=str(self.where))


def test_calls_that_ask_for_the_meta_device_get_the_planned_one() -> None:
    with torch.device("meta"):
        model = nn.Sequential(AsksForMeta(), AsksForMeta())
        captured = capture(model, (torch.zeros(2, 8),), device="cpu")
    devices = {n.meta["val"].device.type for n in captured.module.graph.nodes if "val" in n.meta}
    assert devices == {"cpu"}
    assert "meta" not in captured.module.code


class PlainTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.factor = nn.Linear(8, 8), torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.factor


def test_a_lost_tensor_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), PlainTensor())
    with pytest.raises(CaptureError, match=r"factor is a plain tensor.*\n?.*1\.factor"):
        capture(model, (torch.zeros(2, 8),))


@pytest.mark.parametrize("device", ["meta", "hpu"])
def test_a_device_that_cannot_be_traced_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match="no stages can be traced"):
        capture(on_meta(layers=2), (), tokens("meta"), device=device)


def test_tied_parameters_stay_one() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False))
        model[2].weight = model[0].weight
        return model

    built = build_stages(on_meta(tied), 2, (torch.zeros(2, 3, dtype=torch.long),), split_points=["1"])
    assert built.stages[0].parameters == ("0.weight",)
    assert "0.weight" in built.stages[1].parameters
