"""`Wrappers` beside what tests with real processes show (`pipeline/test_mesh.py`)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
from torch import nn

from zbcompile.compiler import wrapped
from zbcompile.errors import UsageError


@pytest.mark.timeout(60)
def test_the_hook_of_all_modules_goes_with_its_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = []

    class Handle:
        def remove(self) -> None:
            removed.append(True)

    def register(hook: Callable[..., None]) -> Handle:
        return Handle()

    monkeypatch.setattr(wrapped, "register_module_module_registration_hook", register)
    wrappers = wrapped.Wrappers()
    assert not removed
    del wrappers
    gc.collect()
    assert removed


class Wrapper(nn.parallel.DistributedDataParallel):
    """One that needs no processes; it stands in a circle, as torch's does."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.circle = [self]


@pytest.fixture
def thawed() -> Iterator[None]:
    """Lets go of what a test froze."""
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize("made_before", [True, False])
def test_a_wrapper_that_was_dropped_is_not_refused_where_objects_are_frozen(made_before: bool) -> None:
    model = nn.Linear(2, 2)
    wrapper: Wrapper | None = Wrapper(model) if made_before else None
    gc.freeze()
    wrapper = wrapper or Wrapper(model)
    wrappers = wrapped.Wrappers()
    with pytest.raises(UsageError, match="holds the model"):
        wrappers.refuse(model)
    del wrapper
    wrappers.refuse(model)
    assert gc.get_freeze_count() > 0
