"""Meetings: all ranks exchange small texts through the key-value store.

Unlike a collective of a process group, a meeting can be left: a rank whose call is ended while it waits for
the others goes, and nothing that it has posted meets what comes later. Meetings are named by the call that
they belong to, which all ranks count alike.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from zbcompile.errors import PipelineError
from zbcompile.runtime.aside import run_aside
from zbcompile.runtime.doing import Doing
from zbcompile.runtime.store_texts import pause_s, put_text, reader
from zbcompile.runtime.store_thread import StoreError
from zbcompile.runtime.watchdog import Watchdog

__all__ = ["Meetings"]

T = TypeVar("T")


class Meetings:
    """The meetings of one rank.

    Parameters
    ----------
    watchdog
        Ends the waits; its store carries the texts.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog, self._store = watchdog, watchdog.store
        self._rank, self._size = watchdog.rank, watchdog.size
        self._call, self._count = -1, 0
        self._last: list[str] = []
        self._said: list[tuple[int, str]] = []

    def meet(
        self,
        what: str,
        text: str = "",
        answer: Callable[[list[str]], str] = json.dumps,
        *,
        key: str = "",
        extra_s: float = 0.0,
    ) -> str:
        """Give every rank the answer that rank 0 makes from the texts of all.

        Parameters
        ----------
        what
            What the ranks meet for, in words: the same on all of them.
        text
            This rank's text.
        answer
            What rank 0 makes of the texts, by rank.
        key
            Name of the meeting; default: the number of the call and of the meeting in it.
        extra_s
            Seconds beyond the stall limit that rank 0 may take to come.

        Raises
        ------
        Ended
            The call has been ended, here or by another rank.
        PipelineError
            The ranks meet for different things; the same on all of them.
        """
        key = key or self._next_key()
        mine = json.dumps([what, text])
        theirs = [(f"{key}/{rank}", rank) for rank in range(1, self._size)]
        everyone = (f"{key}/all", 0)
        if self._rank == 0:
            rows = [json.loads(row) for row in (mine, *self._fetch(theirs, what, 0.0))]
            apart = _apart({rank: str(row[0]) for rank, row in enumerate(rows)})
            told = json.dumps([apart, "" if apart else answer([str(row[1]) for row in rows])])
            self._ask(lambda store: put_text(store, everyone[0], told))
            self._forget([name for name, _ in theirs] + [everyone[0]])
        else:
            self._ask(lambda store: put_text(store, f"{key}/{self._rank}", mine))
            told = self._fetch([everyone], what, extra_s)[0]
        apart, found = map(str, json.loads(told))
        if apart:
            raise PipelineError(apart, fix="make the same calls in the same order on every rank")
        return found

    def announce(self, what: str, text: str | None, source: int, among: str = "") -> str:
        """Return the text of rank ``source``, which does not wait for the others, on every rank.

        Parameters
        ----------
        what
            What the text is, in words.
        text
            On rank ``source`` its text; not read on the others.
        among
            Whom the text is for, where other ranks hear another source at the same time; "": for all ranks.

        Raises
        ------
        Ended
            The call has been ended, here or by another rank.
        PipelineError
            Rank ``source`` says something else here.
        """
        key = f"{self._next_key()}/{among}"
        if self._rank != source:
            theirs, said = json.loads(self._fetch([(key, source)], what, 0.0)[0])
            if theirs != what:
                raise PipelineError(
                    _apart({source: str(theirs), self._rank: what}),
                    fix="make the same calls in the same order on every rank",
                )
            return str(said)
        said = text or ""
        self._ask(lambda store: put_text(store, key, json.dumps([what, said])))
        self._said.append((self._call, key))
        # A rank is behind by no more calls than there are ranks: their messages hold the others back.
        old = [k for call, k in self._said if call < self._call - 2 * self._size]
        if old:
            self._said = self._said[len(old) :]
            self._delete(old)
        return said

    def alone(self, function: Callable[[], T], words: str, peer: int, extra_s: float = 0.0) -> T:
        """Wait for a function that runs in a thread of its own, because nothing can interrupt it.

        Parameters
        ----------
        function
            What to run.
        words, peer, extra_s
            What this rank waits for, as in `Doing`.
        """
        with self.waiting(words, peer, extra_s):
            return self.result(run_aside(function, "zbcompile waits"))

    @contextlib.contextmanager
    def waiting(self, words: str, peer: int, extra_s: float = 0.0) -> Iterator[None]:
        """Let the watchdog know that this rank waits."""
        watchdog = self._watchdog
        before = watchdog.doing
        watchdog.doing = Doing(words, peer, time.monotonic(), extra_s)
        try:
            yield
        finally:
            watchdog.doing = before

    def _next_key(self) -> str:
        call = self._watchdog.call
        if call != self._call:
            self._call, self._count = call, 0
        self._count += 1
        return f"meet/{call}/{self._count}"

    def _fetch(self, wanted: Sequence[tuple[str, int]], what: str, extra_s: float) -> list[str]:
        """Return the values of keys, in order; wait for the ranks that write them."""
        found: list[str] = []
        watchdog, begin = self._watchdog, time.monotonic()
        with self.waiting("", wanted[0][1]):
            while True:
                rank = wanted[len(found)][1]
                words = f"waits for rank {rank} to come to {what}"
                watchdog.doing = Doing(words, rank, begin, extra_s)
                there, lost = self._ask(reader(wanted[len(found) :]))
                found += there
                if len(found) == len(wanted):
                    return found
                if lost and not there:
                    watchdog.broken(rank, words)
                time.sleep(pause_s(begin))
                watchdog.check()

    def _ask(self, question: Callable[[Store], T]) -> T:
        try:
            return self.result(self._store.submit(question))
        except StoreError:
            self._watchdog.lost_store()

    def result(self, future: Future[T]) -> T:
        """Return what a future brings. Raises `Ended` if the call is ended before."""
        while True:
            try:
                return future.result(0.05)
            except TimeoutError:
                if future.done():
                    return future.result()
            self._watchdog.check()

    def _forget(self, keys: list[str]) -> None:
        """Delete the texts of the meeting before this one, which everybody has read."""
        last, self._last = self._last, keys
        self._delete(last)

    def _delete(self, keys: Sequence[str]) -> None:
        def question(store: Store) -> None:
            with contextlib.suppress(Exception):  # not every kind of store can
                for key in keys:
                    store.delete_key(key)

        self._store.submit(question)


def _apart(whats: Mapping[int, str]) -> str:
    """Return which ranks meet for what, or nothing where all meet for the same; ``whats`` is by rank."""
    if len(set(whats.values())) == 1:
        return ""
    ranks = {what: [str(r) for r, other in whats.items() if other == what] for what in whats.values()}
    words = (f"rank{'s' * (len(r) > 1)} {', '.join(r)} in {what}" for what, r in ranks.items())
    return f"the ranks are in different meetings: {'; '.join(words)}"
