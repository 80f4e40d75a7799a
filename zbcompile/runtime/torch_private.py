"""Every private torch name that the runtime uses, and nothing else. Checked on torch 2.13 and 2.14."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["own_store", "profiler_enabled"]


def profiler_enabled() -> bool:
    """Whether a torch profiler is recording."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def own_store() -> Any:
    """The key-value store of the default process group, through a connection of its own where it has one.

    A thread may then use it while another thread waits in the store.
    """
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store
