"""When every action of a step began and ended, and its span in a profiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import torch

from zbcompile.runtime import torch_private
from zbcompile.schedule.ir import Action, Kind

__all__ = ["Recorder", "TimedAction"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TimedAction = tuple[Action, int, int]
"""(action, start, end), in ns of one monotonic clock."""

_Mark = int | torch.cuda.Event
"""A moment: ns of the host's monotonic clock, or an event on the stream."""

_Entry = tuple[Kind, int, int, int | None, _Mark, _Mark]
"""The fields of an action, its start and its end."""


class Recorder:
    """Times of one rank's actions. On CUDA they are events on the stream, so the host does not wait.

    While a torch profiler is recording, every action is also a span of it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._entries: list[_Entry] = []
        self._zero: tuple[int, torch.cuda.Event] | None = None

    def clear(self) -> None:
        """Forget the last step."""
        self._entries = []
        self._zero = (time.perf_counter_ns(), self._event()) if self.device.type == "cuda" else None

    def run(self, kind: Kind, stage: int, microbatch: int, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function and note when it ran."""
        if torch_private.profiler_enabled():
            with torch.profiler.record_function(f"{stage}{kind.letter}{microbatch}"):
                return self._run(kind, stage, microbatch, call, *args)
        return self._run(kind, stage, microbatch, call, *args)

    def _run(self, kind: Kind, stage: int, microbatch: int, call: Callable[[*Ts], T], *args: *Ts) -> T:
        begin = self._mark()
        result = call(*args)
        self._entries.append((kind, stage, microbatch, None, begin, self._mark()))
        return result

    def note(self, kind: Kind, stage: int, microbatch: int, peer: int | None, begin: int, end: int) -> None:
        """Note what ran beside the rank: from its post to when the host saw it done, in ns."""
        self._entries.append((kind, stage, microbatch, peer, begin, end))

    def actions(self) -> list[TimedAction]:
        """Return the actions of the last step by start, in ns of this machine's monotonic clock."""
        rows = [(Action(k, s, m, p), self._ns(a), self._ns(b)) for k, s, m, p, a, b in self._entries]
        return sorted(rows, key=lambda row: row[1])

    def _mark(self) -> _Mark:
        return time.perf_counter_ns() if self._zero is None else self._event()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _ns(self, mark: _Mark) -> int:
        if isinstance(mark, int):
            return mark
        assert self._zero is not None
        mark.synchronize()
        return self._zero[0] + int(self._zero[1].elapsed_time(mark) * 1e6)
