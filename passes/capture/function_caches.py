"""Forget what cached functions of a model returned while it was traced.

``@functools.lru_cache`` on a function that makes tensors would hand a fake tensor to the next eager call.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType

from torch import nn

__all__ = ["function_caches_kept"]

_DEPTH = 3
"""How many functions a cached one may stand behind: a decorator holds it in its closure."""


@contextlib.contextmanager
def function_caches_kept(root: nn.Module) -> Iterator[None]:
    """Empty the caches that the block adds to, of functions in the classes and files of the modules."""
    files = {kind.__module__ for module in root.modules() for kind in type(module).__mro__}
    files = {name for name in files if not name.startswith(("torch.", "builtins"))}
    classes = {kind for module in root.modules() for kind in type(module).__mro__ if kind.__module__ in files}
    owners = [*classes, *(sys.modules[name] for name in files if name in sys.modules)]
    found = {id(cache): cache for owner in owners for cache in _caches([*vars(owner).values()], _DEPTH)}
    before = {key: cache.cache_info().misses for key, cache in found.items()}
    try:
        yield
    finally:
        for key, cache in found.items():
            if cache.cache_info().misses != before[key]:
                cache.cache_clear()


def _caches(values: Iterable[object], depth: int) -> Iterator[functools._lru_cache_wrapper[object]]:
    """Yield the cached functions among values, and behind those that are functions."""
    for value in values:
        if isinstance(value, functools._lru_cache_wrapper):
            yield value
        elif isinstance(value, staticmethod | classmethod):
            yield from _caches((value.__func__,), depth)
        elif isinstance(value, property):
            yield from _caches((value.fget,), depth)
        elif isinstance(value, FunctionType) and depth > 0:
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            yield from _caches(cells, depth - 1)


def _is_filled(cell: object) -> bool:
    return hasattr(cell, "cell_contents")
