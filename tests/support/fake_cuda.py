"""torch.cuda without a GPU: streams and events that do at once what they are asked for, on the CPU."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

__all__ = ["FakePair", "install"]


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.when = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self.when = time.perf_counter()

    def wait(self, stream: _Stream | None = None) -> None:
        assert self.when

    def query(self) -> bool:
        return bool(self.when)

    def synchronize(self) -> None:
        assert self.when

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other.when - self.when)


class _Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.waited_for: list[_Stream] = []

    def wait_stream(self, other: _Stream) -> None:
        self.waited_for.append(other)


def install(monkeypatch: pytest.MonkeyPatch, devices: int = 1) -> SimpleNamespace:
    """Replace what the project calls of torch.cuda; return the streams that tensors were held for."""
    seen = SimpleNamespace(recorded=[], current=[_Stream()], synchronized=0)

    @contextlib.contextmanager
    def stream(new: _Stream) -> Iterator[None]:
        seen.current.append(new)
        yield
        seen.current.pop()

    def synchronize(device: torch.device | None = None) -> None:
        seen.synchronized += 1

    empty = torch.empty
    replaced = {
        "Event": _Event,
        "Stream": _Stream,
        "stream": stream,
        "current_stream": lambda device=None: seen.current[-1],
        "synchronize": synchronize,
        "device_count": lambda: devices,
        "set_device": lambda device: None,
        "current_device": lambda: 0,
        "memory_allocated": lambda device=None: 512,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "default_generators": tuple(torch.Generator() for _ in range(devices)),
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="a fake",
            total_memory=1 << 30,
            multi_processor_count=2,
            uuid=f"GPU-{device}",
        ),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: seen.recorded.append(stream))
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    return seen


class _Work:
    def __init__(self) -> None:
        self.done = False

    def wait(self) -> None:
        assert self.done, "nobody sent this"

    def is_completed(self) -> bool:
        return self.done


class FakePair:
    """A communicator of two ranks in one process: a receive is done when its message is sent, or before."""

    def __init__(self) -> None:
        self._sent: dict[int, deque[tuple[Tensor, _Work]]] = defaultdict(deque)
        self._wanted: dict[int, deque[tuple[Tensor, _Work]]] = defaultdict(deque)
        self.aborted = False

    def end(self, rank: int) -> FakeEnd:
        """Return what one of the two ranks has of it."""
        return FakeEnd(self, rank)

    def match(self) -> None:
        """Deliver what is both sent and wanted."""
        for target, wanted in self._wanted.items():
            while wanted and self._sent[target]:
                (buffer, receive), (message, send) = wanted.popleft(), self._sent[target].popleft()
                buffer.copy_(message)
                receive.done = send.done = True


class FakeEnd:
    def __init__(self, pair: FakePair, rank: int) -> None:
        self._pair, self._rank = pair, rank

    def send(self, tensors: list[Tensor], other: int, tag: int) -> _Work:
        work = _Work()
        self._pair._sent[other].append((tensors[0].clone(), work))
        self._pair.match()
        return work

    def recv(self, tensors: list[Tensor], other: int, tag: int) -> _Work:
        work = _Work()
        self._pair._wanted[self._rank].append((tensors[0], work))
        self._pair.match()
        return work

    def abort(self) -> None:
        self._pair.aborted = True
