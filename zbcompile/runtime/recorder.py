"""When every action of a step began and ended, and its span in a profiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from zbcompile.runtime import torch_private
from zbcompile.schedule.ir import Action, Kind

__all__ = ["Recorder"]

T = TypeVar("T")
_Entry = tuple[Kind, int, int, int | None, Any, Any]


class Recorder:
    """Times of one rank's actions. On CUDA they are events on the stream: the host does not wait.

    Every action is also a span of the torch profiler, while one is running.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._entries: list[_Entry] = []
        self._zero: tuple[int, Any] | None = None

    def clear(self) -> None:
        """Forget the last step."""
        self._entries = []
        self._zero = (time.perf_counter_ns(), self._event()) if self.device.type == "cuda" else None

    def run(self, kind: Kind, stage: int, microbatch: int, call: Callable[..., T], *args: Any) -> T:
        """Call and note when it ran."""
        if torch_private.profiler_enabled():
            with torch.profiler.record_function(f"{stage}{kind.letter}{microbatch}"):
                return self._run(kind, stage, microbatch, call, *args)
        return self._run(kind, stage, microbatch, call, *args)

    def _run(self, kind: Kind, stage: int, microbatch: int, call: Callable[..., T], *args: Any) -> T:
        begin = time.perf_counter_ns() if self._zero is None else self._event()
        result = call(*args)
        end = time.perf_counter_ns() if self._zero is None else self._event()
        self._entries.append((kind, stage, microbatch, None, begin, end))
        return result

    def note(self, kind: Kind, stage: int, microbatch: int, peer: int, begin: int, end: int) -> None:
        """A send or receive: from its post to when the host saw it done."""
        self._entries.append((kind, stage, microbatch, peer, begin, end))

    def actions(self) -> list[tuple[Action, int, int]]:
        """(action, start, end) in ns of this machine's monotonic clock, by start."""
        rows = [(Action(k, s, m, p), self._ns(a), self._ns(b)) for k, s, m, p, a, b in self._entries]
        return sorted(rows, key=lambda row: row[1])

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _ns(self, mark: Any) -> int:
        if isinstance(mark, int):
            return mark
        assert self._zero is not None
        mark.synchronize()
        return self._zero[0] + int(self._zero[1].elapsed_time(mark) * 1e6)
