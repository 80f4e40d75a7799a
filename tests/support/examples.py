"""The scripts of ``examples/`` as modules."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

from tests.support.places import EXAMPLES

__all__ = ["load_example"]


@cache
def load_example(name: str) -> ModuleType:
    """Import ``examples/NAME.py`` without running its main part."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
