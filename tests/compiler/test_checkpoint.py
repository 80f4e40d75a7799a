"""What a process saves and loads: its own tensors and its optimizer's, or a refusal that changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from zbcompile.compiler.checkpoint import load_model, load_optimizer, optimizer_state, own_tensors
from zbcompile.errors import ShapeError, UsageError


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of two layers, and an optimizer with a group for each after one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def test_an_optimizer_survives_in_parts_and_under_another_learning_rate() -> None:
    model, optimizer = trained()
    saved: dict[str, Any] = {}
    for layer in ("0.", "1."):
        saved |= optimizer_state(model, {n for n in names(model) if n.startswith(layer)}, optimizer)
    other, fresh = copy.deepcopy(model), torch.optim.SGD
    groups = [{"params": layer.parameters()} for layer in other]  # type: ignore[attr-defined]
    again = fresh(groups, lr=9.0, momentum=0.1)
    load_optimizer(other, names(other), again, saved)
    assert [g["lr"] for g in again.param_groups] == [0.1, 0.2]
    assert [g["momentum"] for g in again.param_groups] == [0.9, 0.9]
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["momentum_buffer"], again.state[theirs]["momentum_buffer"])


def test_groups_that_were_saved_apart_are_not_joined() -> None:
    model, optimizer = trained()
    saved = optimizer_state(model, names(model), optimizer)
    joined = torch.optim.SGD(model.parameters(), lr=9.0)
    before = copy.deepcopy(joined.state_dict())
    with pytest.raises(UsageError, match=r"different options.*\(1\.weight\)"):
        load_optimizer(model, names(model), joined, saved)
    assert joined.state_dict() == before


def test_parameters_of_others_are_left_to_them_and_foreign_ones_refused() -> None:
    model, optimizer = trained()
    own = {"0.weight", "0.bias"}
    saved = optimizer_state(model, own, optimizer)
    assert {key.split(".", 2)[1] for key in saved} == {"0"}
    load_optimizer(model, own, optimizer, saved)
    with pytest.raises(UsageError, match="no options of a parameter"):
        load_optimizer(model, names(model), optimizer, saved)
    with pytest.raises(UsageError, match="not the model's"):
        optimizer_state(nn.Linear(3, 3), own, optimizer)


def test_a_model_is_loaded_whole_or_not_at_all() -> None:
    model, _ = trained()
    own = own_tensors(model, (), (), first=True)
    assert own.keys() == model.state_dict().keys()
    assert not own_tensors(model, (), (), first=False)
    before = copy.deepcopy(model.state_dict())
    state = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    with pytest.raises(UsageError, match=r"lacks a tensor.*\(1\.bias\)"):
        load_model(own, {name: tensor for name, tensor in state.items() if name != "1.bias"})
    with pytest.raises(ShapeError, match=r"another shape.*\(1\.bias\)"):
        load_model(own, {**state, "1.bias": torch.zeros(4)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    load_model(own, state)
    assert not any(tensor.any() for tensor in model.state_dict().values())


def test_tensors_without_values_are_refused() -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(UsageError, match=r"meta device.*\(weight\)\n.*materialize"):
        own_tensors(model, (), (), first=True)


def test_state_that_is_no_tensor_is_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> str:
            return "more"

        def set_extra_state(self, state: object) -> None: ...

    with pytest.raises(UsageError, match=r"no tensor.*_extra_state"):
        own_tensors(nn.Sequential(Extra(2, 2)), (), (), first=True)
