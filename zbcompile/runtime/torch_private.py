"""Every private torch name that the runtime uses, and nothing else. Checked on torch 2.13 and 2.14."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["default_store", "profiler_enabled"]


def profiler_enabled() -> bool:
    """Whether a torch profiler is recording."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def default_store() -> Any:
    """The key-value store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
