"""Meetings that hold nobody: every rank leaves a text and goes on, and asks later for the texts of all.

Rank 0 collects them in a thread of its own, so no rank waits for the main thread of another.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from zbcompile.runtime.aside import run_aside
from zbcompile.runtime.doing import ANY_RANK
from zbcompile.runtime.meetings import Meetings
from zbcompile.runtime.store_texts import LONGEST_PAUSE_S, pause_s, put_text, reader
from zbcompile.runtime.store_thread import StoreError
from zbcompile.runtime.watchdog import Watchdog

__all__ = ["LateMeeting"]

T = TypeVar("T")


class _Lost(Exception):
    """The process of a rank ended before it had left its text."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank}")
        self.rank = rank


class LateMeeting:
    """One meeting of all ranks, each of which makes this object for the same ``what`` and ``number``.

    Parameters
    ----------
    watchdog, meetings
        Of the rank.
    what
        What the ranks meet for, in words.
    number
        Counts such meetings, from 1 on. A rank that begins one has read the texts of the one before.
    text
        This rank's text.
    """

    def __init__(self, watchdog: Watchdog, meetings: Meetings, what: str, number: int, text: str) -> None:
        self._watchdog, self._meetings, self._what, self._number = watchdog, meetings, what, number
        self._texts: Future[list[str]] = run_aside(lambda: self._collect(text), "zbcompile late meeting")

    def done(self) -> bool:
        """Return whether `texts` has not to wait."""
        return self._texts.done()

    def texts(self) -> list[str]:
        """Return the texts of all ranks, by rank; wait for those that have not come. Called within a call.

        Raises
        ------
        Ended
            The call has been ended, here or by another rank, or because a rank is lost that left no text.
        """
        words = f"waits for the other ranks to come to {self._what}"
        with self._meetings.waiting(words, ANY_RANK):
            try:
                return self._meetings.result(self._texts)
            except _Lost as lost:
                self._watchdog.broken(lost.rank, words)
            except StoreError:
                self._watchdog.lost_store()

    def _collect(self, text: str) -> list[str]:
        """Leave the text; return those of all, which rank 0 fetches and leaves as one."""
        rank = self._watchdog.rank
        if rank != 0:
            self._ask(lambda store: put_text(store, self._key(rank), text))
            return [str(found) for found in json.loads(self._fetch([0])[0])]
        found = [text, *self._fetch(range(1, self._watchdog.size))]
        self._ask(lambda store: put_text(store, self._key(0), json.dumps(found)))
        self._watchdog.store.submit(self._forget_last)
        return found

    def _fetch(self, ranks: Sequence[int]) -> list[str]:
        wanted = [(self._key(rank), rank) for rank in ranks]
        found: list[str] = []
        begin = time.monotonic()
        while True:
            found += self._ask(reader(wanted[len(found) :]))[0]
            if len(found) == len(wanted):
                return found
            pause = pause_s(begin)
            lost = self._ask(self._lost) if pause >= LONGEST_PAUSE_S else None
            if lost is not None:
                raise _Lost(lost)
            time.sleep(pause)

    def _lost(self, store: Store) -> int | None:
        """Return a rank whose process has ended and that left no text, or None."""
        ended = (rank for rank in range(self._watchdog.size) if store.check([f"lost/{rank}"]))
        return next((rank for rank in ended if not store.check([self._key(rank)])), None)

    def _ask(self, question: Callable[[Store], T]) -> T:
        """Ask the store; raise `StoreError` once the watchdog has stopped, after which it answers nothing."""
        future = self._watchdog.store.submit(question)
        while True:
            try:
                return future.result(1.0)
            except TimeoutError:
                if self._watchdog.stopped:
                    raise StoreError("the pipeline is closed") from None

    def _key(self, rank: int, ago: int = 0) -> str:
        return f"late/{self._number - ago}/{rank}"

    def _forget_last(self, store: Store) -> None:
        """Delete the texts of the meeting before this one, which everybody has read."""
        with contextlib.suppress(Exception):  # not every kind of store can
            for rank in range(self._watchdog.size):
                store.delete_key(self._key(rank, 1))
