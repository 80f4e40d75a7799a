"""Caches of functions (``functools.lru_cache``): no tensor of a trace stays in them.

A model that keeps tables in such a cache would find the trace's tensors there afterwards, which have no data;
the trace itself finds none of another trace.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator

from torch import Tensor, nn

from zbcompile.passes.live_objects import live_instances

__all__ = ["caches_kept"]

_WITHOUT_TABLES = ("torch", "sympy", "mpmath", "numpy", "zbcompile", "importlib", "inspect", "typing", "re")
"""Packages whose caches hold no tensors of a model."""
_DEPTH = 6
"""How deep a tensor is looked for: the entries of a cache, a list or dict of tuples in one of them."""
_CACHE = type(functools.lru_cache(lambda: None))


@contextlib.contextmanager
def caches_kept() -> Iterator[None]:
    """Empty every function's cache that holds a tensor of the trace inside, when it ends."""
    try:
        yield
    finally:
        for cache in live_instances(_CACHE):
            if cache.cache_info().currsize and _may_have_tables(cache) and _holds_traced(cache):
                cache.cache_clear()


def _may_have_tables(cache: object) -> bool:
    return str(getattr(cache, "__module__", "")).partition(".")[0] not in _WITHOUT_TABLES


def _holds_traced(cache: object) -> bool:
    """Return whether a tensor of a trace is among the entries: one of another class than torch's own two."""
    level, seen = [cache], {id(cache)}
    for _ in range(_DEPTH):
        inside: list[object] = []
        for holder in level:
            for entry in gc.get_referents(holder):
                if isinstance(entry, Tensor):
                    if type(entry) not in (Tensor, nn.Parameter):
                        return True
                elif id(entry) not in seen and _is_part(entry):
                    seen.add(id(entry))
                    inside.append(entry)
        level = inside
    return False


def _is_part(entry: object) -> bool:
    """Return whether an entry is a container, or what C code links the entries of a cache with."""
    return isinstance(entry, dict | list | tuple) or type(entry).__name__ == "_lru_list_elem"
