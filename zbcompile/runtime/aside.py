"""Calls that nothing can interrupt, in a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["run_aside"]

T = TypeVar("T")


def run_aside(function: Callable[[], T], name: str) -> Future[T]:
    """Call ``function()`` in a thread that does not keep the process alive; return its future at once."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
