"""The watchdog: who waits for whom when a step stands still, and one error on all ranks when one fails.

Every rank has a thread that looks at the key-value store of the process group. The first rank that fails
writes why; all others read it, leave the pipeline's groups so that nobody waits for them, and raise the same
error. A rank that stands still for longer than a moment publishes what it does; the first one that passes the
limit follows the chain of waits and names its root.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from torch.distributed.distributed_c10d import Store

from zbcompile.errors import PipelineError

__all__ = ["Doing", "Watchdog"]

POLL_S = 0.1
"""Seconds between two looks at the store."""

_GRACE_S = 0.6
"""Seconds that a rank whose connection broke waits for another rank's reason."""

_SIGNAL = signal.SIGURG

_NO_STORE = (
    "the key-value store of the process group is gone, and with it the process that kept it "
    "(rank 0, or the launcher)"
)


@dataclass(frozen=True, slots=True)
class Doing:
    """What a rank's main thread does.

    Attributes
    ----------
    words
        The action or the wait, in words.
    peer
        The rank waited for, or -1.
    since
        When it began, in seconds of the monotonic clock.
    """

    words: str
    peer: int
    since: float

    def text(self) -> str:
        """Return one line for the store."""
        return f"{self.peer}|{time.monotonic() - self.since:.1f}|{self.words}"


class Interrupted(BaseException):
    """Raised in a main thread that computes while another rank has failed."""


class Watchdog:
    """One rank's watchdog. As a context manager it surrounds a step.

    Parameters
    ----------
    store
        The key-value store that the ranks of one runner share.
    rank
        This rank.
    limit_s
        Seconds that a wait may last before the step is ended.
    doing
        Returns what the main thread does; None between steps.
    abandon
        Leaves the process groups.

    Attributes
    ----------
    reason
        Why the pipeline failed, or None.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        limit_s: float,
        doing: Callable[[], Doing | None],
        abandon: Callable[[], None],
    ) -> None:
        self.store, self.rank, self.limit_s = store, rank, limit_s
        self._doing, self._abandon = doing, abandon
        self.reason: str | None = None
        self._step_thread: int | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="zbcompile watchdog", daemon=True)
        self._thread.start()

    def error(self) -> PipelineError | None:
        """Return the failure of the pipeline, if there is one."""
        return None if self.reason is None else PipelineError(self.reason)

    def fail(self, reason: str) -> PipelineError:
        """Tell all ranks why the step failed; return the error of the first failure, which all raise."""
        try:
            found = self.store.compare_set("failed", "", reason)
            first = (found.decode() if isinstance(found, bytes) else str(found)) or reason
        except Exception:
            # The store went down with the process that kept it, which is then the first to have failed.
            first = _NO_STORE
        self._end(first)
        return PipelineError(self.reason or first)

    def broken(self, reason: str) -> PipelineError:
        """Return the error of a broken connection: another rank's reason, or after a moment this one."""
        deadline = time.monotonic() + _GRACE_S
        while self.reason is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.error() or self.fail(reason)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=2.0)

    def __enter__(self) -> Watchdog:
        """Begin a step on this thread, which can be interrupted while it computes."""
        if threading.current_thread() is threading.main_thread():
            self._old = signal.signal(_SIGNAL, self._interrupt)
            self._step_thread = threading.get_ident()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._step_thread is not None:
            self._step_thread = None
            signal.signal(_SIGNAL, self._old)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        doing = self._doing()
        if self.reason is not None and doing is not None and doing.peer < 0:
            raise Interrupted

    def _end(self, reason: str) -> None:
        with self._lock:
            first = self.reason is None
            if first:
                self.reason = reason
        if first:
            self._abandon()
            thread = self._step_thread
            if thread is not None and thread != threading.get_ident():
                signal.pthread_kill(thread, _SIGNAL)

    def _watch(self) -> None:
        published = ""
        while not self._stop.wait(POLL_S):
            if self.reason is not None:
                return
            try:
                if self.store.check(["failed"]):
                    self._end(self.store.get("failed").decode())
                    return
                doing = self._doing()
                age = 0.0 if doing is None else time.monotonic() - doing.since
                text = "" if doing is None or age < min(1.0, self.limit_s / 4) else doing.text()
                if text != published:
                    self.store.set(f"doing/{self.rank}", text or "-")
                    published = text
                if doing is not None and doing.peer >= 0 and age > self.limit_s:
                    self.fail(self._diagnose(doing))
                    return
            except Exception:
                # The store is gone with the process that kept it; broken connections tell the rest.
                return

    def _diagnose(self, doing: Doing) -> str:
        """Return in words who waits for whom, from this rank to a rank that does not wait."""
        age = time.monotonic() - doing.since
        chain, words, peer = [self.rank], doing.words, doing.peer
        root = ""
        while not root:
            if peer in chain:
                root = f"a circle, closed by rank {peer}"
                break
            chain.append(peer)
            state = self._state_of(peer)
            if state is None:
                root = (
                    f"rank {peer} is in no action that it knows of (outside a step, ended, or not reachable)"
                )
            elif state[0] >= 0:
                peer = state[0]
            else:
                root = f"rank {peer} {state[2]} for {state[1]} s"
        path = " -> ".join(map(str, chain))
        return f"stalled: rank {self.rank} {words} for {age:.1f} s; chain {path}; root: {root}"

    def _state_of(self, rank: int) -> tuple[int, str, str] | None:
        """Return what a rank has published: (rank waited for, seconds, words), or None."""
        key = f"doing/{rank}"
        if not self.store.check([key]):
            return None
        parts = self.store.get(key).decode().split("|", 2)
        return (int(parts[0]), parts[1], parts[2]) if len(parts) == 3 else None
