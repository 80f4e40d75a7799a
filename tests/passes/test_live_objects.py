"""Objects that were there before are found, whether or not the user froze them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from zbcompile.passes.live_objects import live_instances


class Table:
    """Something that only the collector can tell of."""


class LongTable(Table):
    """Another class of it."""


class LongestTable(LongTable):
    """And one of that."""


@pytest.fixture
def frozen() -> Iterator[Table]:
    """An object that ``gc.freeze`` hides."""
    held = Table()
    gc.freeze()
    assert all(found is not held for found in gc.get_objects())
    yield held
    gc.unfreeze()


def test_frozen_objects_are_found_and_stay_frozen(frozen: Table) -> None:
    before = gc.get_freeze_count()
    assert live_instances(Table) == [frozen]
    assert gc.get_freeze_count() >= before
    assert all(found is not frozen for found in gc.get_objects())


def test_nothing_is_frozen_that_was_not() -> None:
    assert gc.get_freeze_count() == 0
    assert not live_instances(Table)
    assert gc.get_freeze_count() == 0


def test_objects_of_classes_that_inherit_are_found_too() -> None:
    held = [Table(), LongTable(), LongestTable(), LongestTable()]
    found = live_instances(Table)
    assert len(found) == len(held)
    assert {id(one) for one in found} == {id(one) for one in held}
    assert {type(one) for one in live_instances(LongTable)} == {LongTable, LongestTable}


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float32)


class WithTable(nn.Module):
    """Keeps a table in a function's cache, which was there before it was frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + table(4))


def test_no_tensor_of_a_trace_stays_in_a_frozen_cache(frozen: Table) -> None:
    assert frozen
    table.cache_clear()
    batch = torch.ones(2, 4)
    with zbcompile.compile(WithTable(), 2, num_microbatches=2, example_args=(batch,)) as pipeline:
        assert pipeline is not None
        assert type(table(4)) is Tensor
        assert WithTable()(batch).shape == (2, 4)
