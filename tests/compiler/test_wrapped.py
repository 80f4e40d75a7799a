"""`Wrappers` beside what tests with real processes show (`pipeline/test_mesh.py`)."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from zbcompile.compiler import wrapped


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
