"""The table of facts against torch's own list of operators, and a made-up operator that one row teaches."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch

from zbcompile.passes import ops
from zbcompile.passes.ops import facts, namespace

aten = torch.ops.aten


def _lists() -> list[str]:
    rows = (*ops._FLOPS, *ops._FUNCTIONS, *ops._STRIDES, *ops._FORMS, *ops._INTO, *ops._MASKS)
    return [*(names for _, names in rows), *ops._HOLDS.values()]


def test_every_name_of_the_table_is_that_of_an_operator() -> None:
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")]
    known = {s.name[6:] for s in schemas}
    known |= {f"{s.name[6:]}.{s.overload_name or 'default'}" for s in schemas}
    known |= {"zbcompile.lstm_layer", "_assert_async"}
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("_c10d_functional")]
    known |= {s.name.replace("::", ".") for s in schemas}
    for entry in " ".join(_lists()).split():
        assert any(fnmatchcase(name, entry) for name in known), entry


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        (aten.mm.default, {"heavy", "fresh", "dense"}),
        (aten.add.Tensor, {"commutes", "rounds_once"}),
        (aten.silu.default, set()),
        (aten.convolution_backward.default, {"heavy", "own_layout", "any_order"}),
        (aten.index_put_.default, {"gathers", "any_order"}),
        (aten.dropout.default, {"idle_in_eval"}),
        (torch.relu, set()),
        ("placeholder", set()),
        ("copy_", set()),
    ],
)
def test_an_operator_has_the_facts_that_are_written_beside_its_name(target: object, wanted: set[str]) -> None:
    assert {fact for fact in ops._HOLDS if getattr(facts(target), fact)} == wanted


def test_what_has_a_formula_is_heavy() -> None:
    for target in (aten.bmm.default, aten.linear.default, aten._scaled_dot_product_flash_attention.default):
        assert facts(target).flops is not None
        assert facts(target).heavy
    assert facts(aten.add.Tensor).flops is None


def test_libraries() -> None:
    assert namespace(aten.mm.default) == "aten"
    assert namespace(torch.ops.prims.mul.default) == "prims"
    assert namespace(torch.relu) == ""
