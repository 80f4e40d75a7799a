"""The watchdog: one error on all ranks when one fails, and who waits for whom when they stand still.

Every rank has a thread that reads the news of all ranks (`zbcompile.runtime.news`) ten times a second. The
first rank that fails writes why; the others read it, close their connections so that nobody waits for them,
and end the call that they are in. The first rank whose wait passes the limit names its root
(`zbcompile.runtime.doing`). The store itself is asked by another thread, so that the limit holds when the
process that keeps it stands still.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import CodeType, FrameType
from typing import NoReturn, TypeVar

from torch.distributed.distributed_c10d import Store

from zbcompile.runtime.doing import (
    ANY_RANK,
    CLOSED,
    NOBODY,
    Doing,
    State,
    chain_of_waits,
    publish,
    read_states,
)
from zbcompile.runtime.news import Event, read_news, tell
from zbcompile.runtime.store_thread import StoreError, StoreThread

__all__ = ["SILENT", "Ended", "Watchdog", "shielded"]

POLL_S = 0.1
"""Seconds between two looks at the news."""

_GRACE_S = 0.6
"""Seconds that a rank whose connection broke waits for another rank's reason."""

_ANSWER_S = 2.0
"""Seconds that a failing rank waits for the store."""

_SILENT_S = 1.0
"""Seconds after which a store that does not answer is not asked for details."""

_GENTLE_S = 2.0
"""Seconds that a rank which traces or plans has to come to the end of that step by itself."""

_LINGER_S = 1.5
"""Seconds that the keeper of the store stays after a failure, so that all ranks can read why."""

_AGAIN_S = 0.5
"""Seconds between two interrupts of a call that does not end."""

_SIGNAL = signal.SIGURG

_GONE = (
    "the key-value store of the process group is gone, and with it the process that kept it "
    "(rank 0, or the launcher)"
)
SILENT = (
    "the key-value store of the process group does not answer: the process that keeps it "
    "(rank 0, or the launcher) stands still or cannot be reached"
)
"""What is said of a store that does not answer."""

_SHIELDED: set[CodeType] = set()

F = TypeVar("F", bound=Callable[..., object])


def shielded(function: F) -> F:
    """Let no interrupt of the watchdog end this function."""
    _SHIELDED.add(function.__code__)
    return function


class Ended(BaseException):
    """Raised in a main thread whose call is over, because of what this or another rank has told."""


class Watchdog:
    """One rank's watchdog, and where this rank stands in the calls that all ranks make alike.

    Parameters
    ----------
    store
        The key-value store that the ranks share.
    rank, size
        This rank, and the number of ranks.
    limit_s
        Seconds that a wait may last before it is ended on all ranks.

    Attributes
    ----------
    doing
        What the main thread does, where no runner knows better (`watch`); None outside of calls.
    failed
        Why the pipeline has failed, or None.
    refused
        A refusal that is not settled yet and concerns this rank: of the call that it is in, or of one that it
        had finished.
    told
        Whether this rank has raised because of it.
    call
        Number of the call that this rank is in, or was in last.
    settled
        Refusals of calls up to this one are settled.
    inside
        Whether a call may be ended: the rank has not passed its end yet.
    ended
        Whether the call has been ended.
    gentle
        Whether an interrupt waits a moment, because the rank traces or plans.
    needs_all
        Whether the call fails at once when a rank is lost, even before this rank waits for it.
    dirty
        Whether messages may be left in the channels.
    on_end
        Called with True for a failure and False for a refusal: they close connections.
    """

    def __init__(self, store: Store, rank: int, size: int, limit_s: float) -> None:
        self.rank, self.size, self.limit_s = rank, size, limit_s
        self.doing: Doing | None = None
        self.failed: str | None = None
        self.refused: Event | None = None
        self.told = False
        self.call = self.settled = 0
        self.inside = self.ended = self.gentle = self.dirty = self.needs_all = False
        self.on_end: list[Callable[[bool], None]] = []
        self.lock = threading.Lock()
        self.store = StoreThread(store)
        self._runner_doing: Callable[[], Doing | None] | None = None
        self._later: list[Event] = []
        self._news_read = 0
        self._poll: Future[list[Event]] | None = None
        self._published = ""
        self._seen: Doing | None = None
        self._age = self._silent_s = self._ended_s = 0.0
        self._main: int | None = None
        self._old_handler: object = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zbcompile watchdog", daemon=True)
        self._thread.start()

    # For the main thread: where it stands.

    def enter(self, words: str, counted: bool) -> None:
        """Begin a call on this thread, which can be interrupted from now on."""
        with self.lock:
            self.call += counted
            self.inside, self.ended, self.gentle = True, self.failed is not None, False
            self._ended_s = 0.0
            self.doing, self._runner_doing = Doing(words, NOBODY, time.monotonic()), None
            later, self._later = self._later, []
            for event in later:
                self._refuse(event)
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(_SIGNAL, self._interrupt)
            self._main = threading.get_ident()

    def begin_messages(self) -> None:
        """Note that messages will be under way. Raises `Ended` if the call has been ended."""
        with self.lock:
            self.check()
            self.dirty = True

    def finish(self) -> None:
        """Pass the end of the call: it is done on this rank. Raises `Ended` if it has been ended."""
        with self.lock:
            self.check()
            self.inside = self.dirty = False

    def leave(self) -> None:
        """Leave the call."""
        with self.lock:
            self.inside = self.gentle = self.needs_all = False
            self.doing = self._runner_doing = None
        if self._main is not None:
            self._main = None
            signal.signal(_SIGNAL, self._old_handler)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raise `Ended` if the call has been ended."""
        if self.ended:
            raise Ended

    def watch(self, doing: Callable[[], Doing | None]) -> None:
        """Ask ``doing`` what the main thread does, until the call is left."""
        self._runner_doing = doing

    def now_doing(self) -> Doing | None:
        """Return what the main thread does now."""
        ask = self._runner_doing
        return (None if ask is None else ask()) or self.doing

    def settle(self) -> None:
        """Go on after a refusal: all ranks have met and are in the same call."""
        with self.lock:
            self.settled, self.refused, self.told, self.dirty = self.call - 1, None, False, False

    # What went wrong.

    def fail(self, reason: str) -> None:
        """Tell all ranks why the pipeline has failed. ``failed`` is then the first reason, alike on all."""
        event = Event(True, self.rank, self.call, reason)
        self._end(self._tell(event) or reason)

    def look(self) -> None:
        """Read now, and not at the next tick, whether the pipeline has failed.

        A store that does not answer says nothing here: the ticks end the call for that.
        """
        start = self._news_read
        with contextlib.suppress(StoreError):
            news = self.store.ask(lambda store: read_news(store, start), _ANSWER_S)
            for event in news:
                if event.fatal:
                    self._end(event.reason)

    def refuse(self, reason: str, *, told: bool) -> None:
        """Tell all ranks, unless they know, that this one has refused its call before its first message."""
        event = Event(False, self.rank, self.call, reason)
        with self.lock:
            self.refused, self.told = self.refused or event, True
        first = None if told else self._tell(event)
        if first is not None:
            self._end(first)

    def broken(self, peer: int, words: str) -> NoReturn:
        """End the call because the connection to ``peer``, or to some rank, broke.

        The reason is that of another rank, or after a moment the broken connection.

        Raises
        ------
        Ended
            Always.
        """
        deadline = time.monotonic() + _GRACE_S
        while not self.ended and time.monotonic() < deadline:
            time.sleep(0.02)
        if not self.ended:
            try:
                peer = self._lost_rank() if peer == ANY_RANK else peer
                state = self._states().get(peer)
            except StoreError:
                self._end_without_store()
            else:
                gone = CLOSED if state is not None and state[2] == CLOSED else "is gone"
                name = "a rank" if peer == ANY_RANK else f"rank {peer}"
                self.fail(f"{name} {gone}: its connection closed while rank {self.rank} {words}")
        raise Ended

    def _lost_rank(self) -> int:
        """Return a rank whose process is known to have ended, or `ANY_RANK`."""

        def question(store: Store) -> int:
            return next((r for r in range(self.size) if store.check([f"lost/{r}"])), ANY_RANK)

        return self.store.ask(question, _ANSWER_S)

    def linger(self) -> None:
        """Wait a moment after a failure until the others know, because this process may keep the store."""
        deadline = time.monotonic() + _LINGER_S
        with contextlib.suppress(StoreError):
            while not self.store.ask(self._all_know, _LINGER_S) and time.monotonic() < deadline:
                time.sleep(0.02)

    def _all_know(self, store: Store) -> bool:
        ranks = (rank for rank in range(self.size) if rank != self.rank)
        return all(store.check([f"knows/{rank}"]) or store.check([f"lost/{rank}"]) for rank in ranks)

    def lose(self, peer: int) -> None:
        """Note, on the thread that saw it, that the process of a rank has ended."""
        self.store.submit(lambda store: store.set(f"lost/{peer}", "1"))
        deadline = time.monotonic() + _GRACE_S
        while self.needs_all and not self.ended and not self._stop.wait(0.02):
            if time.monotonic() > deadline:
                self.fail(f"rank {peer} is gone: its connection to rank {self.rank} closed")

    def lost_store(self) -> NoReturn:
        """End the call because the store has failed. Raises `Ended`."""
        self._end_without_store()
        raise Ended

    @property
    def stopped(self) -> bool:
        """Whether this rank is gone on purpose."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Say that this rank is gone on purpose, and end the threads."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)
        if not self.store.gone and self.store.asked_at is None:
            question = publish(self.rank, f"{NOBODY}|0|{CLOSED}")
            with contextlib.suppress(StoreError):
                self.store.ask(question, _ANSWER_S)
        self.store.stop()

    def _tell(self, event: Event) -> str | None:
        """Write an event; return the reason of the first failure, if there is one."""
        start = self._news_read
        try:
            first = self.store.ask(lambda store: tell(store, start, event), _ANSWER_S)
        except StoreError:
            return self._store_fault()
        return None if first is None else first.reason

    def _end_without_store(self) -> None:
        """End the pipeline here; the others are told when the store answers again."""
        reason = self._store_fault()
        start, event = self._news_read, Event(True, self.rank, self.call, reason)
        self.store.submit(lambda store: tell(store, start, event))
        self._end(reason)

    def _store_fault(self) -> str:
        return _GONE if self.store.gone else SILENT

    def _refuse(self, event: Event) -> bool:
        """Note a refusal, with the lock held; return whether it ends the call that this rank is in."""
        if event.call <= self.settled or self.refused is not None:
            return False
        if event.call > self.call:
            self._later.append(event)
            return False
        self.refused, self.told = event, False
        self.ended = self.ended or self.inside
        return self.inside

    def _end(self, reason: str) -> None:
        with self.lock:
            first = self.failed is None
            if first:
                self.failed = reason
            self.ended = self.inside
        if first:
            self.store.submit(lambda store: store.set(f"knows/{self.rank}", "1"))
            self._close_connections(True)
            self._interrupt_main()

    def _close_connections(self, fatal: bool) -> None:
        for call in list(self.on_end):
            call(fatal)

    # The thread.

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(POLL_S):
            now = time.monotonic()
            # A process that stood still itself does not take that time for a wait of others.
            self._tick(min(now - before, 1.0))
            before = now

    def _tick(self, passed_s: float) -> None:
        self._read_news(passed_s)
        if self.ended and self.inside:
            self._insist(passed_s)
        if self.failed is not None:
            return
        doing = self.now_doing()
        if doing is None or self._seen is None or doing.since != self._seen.since:
            self._age = 0.0 if doing is None else min(passed_s, time.monotonic() - doing.since)
        else:
            self._age += passed_s
        self._seen = doing
        self._publish_doing(doing)
        waits = doing is not None and doing.peer != NOBODY
        if doing is not None and waits and self._age > self.limit_s + doing.extra_s:
            try:
                reason = chain_of_waits(self.rank, doing, self._age, self.size, self._states())
            except StoreError:
                self._end_without_store()
            else:
                self.fail(reason)
        elif self._silent_s > self.limit_s and self.inside:
            self._end_without_store()

    def _read_news(self, passed_s: float) -> None:
        """Ask for news, and act on those that have come."""
        poll = self._poll
        if poll is not None and not poll.done():
            self._silent_s += passed_s
            return
        self._silent_s, self._poll = 0.0, None
        if poll is not None and poll.exception() is None:
            for event in poll.result():
                self._news_read += 1
                self.learn(event)
        if not self.store.gone:
            start = self._news_read
            self._poll = self.store.submit(lambda store: read_news(store, start))

    def learn(self, event: Event) -> None:
        """Act on what another rank has told."""
        if event.fatal:
            self._end(event.reason)
            return
        with self.lock:
            ends = self._refuse(event)
            dirty = self.dirty
        if ends:
            if dirty:
                self._close_connections(False)
            self._interrupt_main()

    def _insist(self, passed_s: float) -> None:
        """Interrupt a call that has not ended since it was told to."""
        self._ended_s += passed_s
        if self._ended_s // _AGAIN_S != (self._ended_s - passed_s) // _AGAIN_S:
            self._interrupt_main()

    def _interrupt_main(self) -> None:
        with self.lock:
            if self.inside and self._main not in (None, threading.get_ident()):
                signal.pthread_kill(self._main, _SIGNAL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal, in the main thread."""
        if not self.ended and callable(self._old_handler):
            self._old_handler(number, frame)  # of a call around this one
        if not (self.ended and self.inside) or (self.gentle and self._ended_s < _GENTLE_S):
            return
        while frame is not None:
            if frame.f_code in _SHIELDED:
                return
            frame = frame.f_back
        raise Ended

    def _publish_doing(self, doing: Doing | None) -> None:
        slow = doing is not None and self._age >= min(1.0, self.limit_s / 4)
        text = doing.text(self._age) if doing is not None and slow else ""
        if text != self._published and not self.store.gone and self._silent_s == 0.0:
            self._published = text
            self.store.submit(publish(self.rank, text or "-"))

    def _states(self) -> dict[int, State]:
        """Return what the ranks have published: rank -> (rank waited for, seconds, words)."""
        if self._silent_s >= _SILENT_S:
            raise StoreError("it has been silent for a while")
        return self.store.ask(lambda store: read_states(store, self.size), _ANSWER_S)
