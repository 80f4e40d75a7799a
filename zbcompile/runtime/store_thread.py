"""Calls of a process group's key-value store from a thread of their own: a store may never answer.

`torch.distributed.TCPStore` blocks without a limit when the process that keeps it stands still. Nobody but
this thread therefore asks the store; everybody else waits for the thread, with a limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

from zbcompile.runtime.aside import run_aside

__all__ = ["StoreError", "StoreThread", "connect"]

T = TypeVar("T")


class StoreError(Exception):
    """The store did not answer in time, or its connection is closed."""


def connect(make: Callable[[], Store], limit_s: float) -> Store:
    """Return ``make()``, which opens a connection to a store.

    Raises
    ------
    StoreError
        It lasts longer than ``limit_s`` seconds: the store's process stands still, or is gone.
    """
    try:
        return run_aside(make, "zbcompile connects").result(limit_s)
    except TimeoutError as error:
        raise StoreError(f"no connection within {limit_s:g} s") from error


class StoreThread:
    """Asks a store, one question after the other.

    Parameters
    ----------
    store
        The store, through a connection that nobody else uses.

    Attributes
    ----------
    gone
        Whether a call has failed: the connection is closed, and with it the store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = SimpleQueue()
        self._asked_at: float | None = None
        self.gone = False
        self._thread = threading.Thread(target=self._work, name="zbcompile store", daemon=True)
        self._thread.start()

    def submit(self, question: Callable[[Store], T]) -> Future[T]:
        """Have the thread call ``question(store)``; return at once."""
        future: Future[T] = Future()
        self._queue.put((question, future))
        return future

    def ask(self, question: Callable[[Store], T], limit_s: float) -> T:
        """Return ``question(store)``. Raises `StoreError` if it fails or lasts longer than ``limit_s``."""
        future = self.submit(question)
        try:
            return future.result(limit_s)
        except TimeoutError as error:
            raise StoreError(f"no answer within {limit_s:g} s") from error

    @property
    def asked_at(self) -> float | None:
        """When the question without an answer was asked, on the monotonic clock; None: there is none."""
        return self._asked_at

    def stop(self) -> None:
        """End the thread once it has answered what it was asked."""
        self._queue.put(None)
        self._thread.join(timeout=0.5)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            question, future = item
            if self.gone:
                future.set_exception(StoreError("the store is gone"))
                continue
            self._asked_at = time.monotonic()
            try:
                answer = question(self._store)
            except Exception as error:
                self.gone = True
                future.set_exception(StoreError(str(error)))
            else:
                future.set_result(answer)
            self._asked_at = None
