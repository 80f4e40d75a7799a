"""What stages really keep between their phases: storages of tensors, added up per rank while a step runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from zbcompile.passes.split.stage_graphs import StageGraphs

__all__ = ["kept_bytes"]


@contextlib.contextmanager
def kept_bytes(rank_of: Sequence[int], always: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the most bytes per rank that F has left for B, and B for W, at any time so far.

    Parameters
    ----------
    rank_of
        The rank of every stage.
    always
        Tensors that are alive anyway (parameters, buffers, the batch): their storages are not counted.
    """
    free = {tensor.untyped_storage().data_ptr() for tensor in always}
    most = [0] * (max(rank_of) + 1)
    now = [0] * len(most)

    def size(saved: Sequence[object]) -> int:
        kept = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in saved
            if isinstance(t, Tensor)
        }
        return sum(count for place, count in kept.items() if place not in free)

    def watched(name: str, takes: bool, leaves: bool) -> Any:
        real: Callable[..., Any] = getattr(StageGraphs, name)

        def run(stage: StageGraphs, *args: Any) -> Any:
            rank = rank_of[stage.index]
            before = size(args[0]) if takes else 0
            results = real(stage, *args)
            now[rank] += (size(results[1]) if leaves else 0) - before
            most[rank] = max(most[rank], now[rank])
            return results

        return mock.patch.object(StageGraphs, name, run)

    with (
        watched("run_forward", False, True),
        watched("run_backward_input", True, True),
        watched("run_backward_weight", True, False),
        watched("run_full_backward", True, False),
    ):
        yield most
