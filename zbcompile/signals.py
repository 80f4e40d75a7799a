"""A moment in which no signal handler of Python runs, so that what must happen as a whole does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["deferred_signals"]

_Handler = Callable[[int, FrameType | None], object]


class deferred_signals:  # noqa: N801 - used as a function
    """Handle signals that arrive in the body at its end, in their order.

    Only the main thread runs handlers; in another thread this does nothing.

    Parameters
    ----------
    numbers
        Which signals; default: all.
    """

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers or tuple(range(1, signal.NSIG))
        self._handlers: list[tuple[int, _Handler]] = []
        self._arrived: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in self._numbers:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers.append((number, handler))
                    signal.signal(number, self._note)
        except BaseException:
            self._restore()
            raise

    def __exit__(self, *exc: object) -> None:
        handlers = dict(self._handlers)
        self._restore()
        while self._arrived:
            number, frame = self._arrived.pop(0)
            handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))

    def _restore(self) -> None:
        """Put the handlers back, however often one of them raises meanwhile."""
        try:
            while self._handlers:
                signal.signal(*self._handlers[-1])
                self._handlers.pop()
        finally:
            if self._handlers:
                self._restore()
