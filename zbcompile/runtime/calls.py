"""The calls of a pipeline - its build, steps, evaluations and meetings - and how each of them may end.

All ranks make the same calls in the same order, without meeting between them. A call ends in one of these:

=================  ========================================  ===========================================
what happened      on this rank                              on every other rank that is still in the call
=================  ========================================  ===========================================
it returned        its result                                goes on
it was refused     the rank's own error                      `PipelineError` that names the rank
anything else      its error, or `PipelineError`             the same `PipelineError`; no further call runs
=================  ========================================  ===========================================

A rank that had finished the call raises in its next one instead. After a refusal all ranks meet at the
beginning of the next call; ranks that are one call behind raise once more, until all are in the same call.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from zbcompile.errors import PipelineError, ZBCompileError
from zbcompile.runtime.meetings import Meetings
from zbcompile.runtime.watchdog import Ended, Watchdog, shielded
from zbcompile.signals import deferred_signals

__all__ = ["Call", "DistributedCall", "DistributedCalls", "LocalCall"]

_NO_MORE = "\n  no further step of this pipeline can run"
_GOES_ON = "\n  nothing of it was kept; the next step can run"
_LATE = (
    "\n  this rank had finished that call, and its gradients are in param.grad; this call does not run, "
    "on any rank; the next step can run"
)


class Call(Protocol):
    """A call that this process is in. As a context manager it surrounds what the call does."""

    def checks(self) -> AbstractContextManager[None]:
        """Surround what a rank does before its first message: an error in it refuses the call."""

    def finish(self, action: Callable[[], None]) -> None:
        """Let the call take effect: ``action`` runs as a whole or not at all."""

    def __enter__(self) -> Call: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LocalCall:
    """A call of a pipeline whose ranks all run in this process: every error is the caller's own."""

    def checks(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()

    def finish(self, action: Callable[[], None]) -> None:
        """Run ``action``; signals that arrive meanwhile are handled at its end."""
        with deferred_signals():
            action()

    def __enter__(self) -> LocalCall:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class DistributedCalls:
    """The calls of one rank.

    Parameters
    ----------
    watchdog, meetings
        Of the rank.
    may_keep_store
        Whether the key-value store may live in this process, and end with it.

    Attributes
    ----------
    renewals
        How often the ranks have gone on after a refusal that left messages in the channels.
    own_state
        Returns what a rank tells the others when they go on after a refusal.
    on_settled
        Gets what all ranks told, by rank.
    """

    def __init__(self, watchdog: Watchdog, meetings: Meetings, may_keep_store: bool) -> None:
        self.watchdog, self.meetings, self.may_keep_store = watchdog, meetings, may_keep_store
        self.renewals = 0
        self.own_state: Callable[[], str] = str
        self.on_settled: Callable[[list[str]], None] = len  # type: ignore[assignment]
        self.known_to_all: BaseException | None = None
        self._round = 0
        self._note = ""

    def call(self, words: str) -> DistributedCall:
        """Return a step or an evaluation, to be entered."""
        return DistributedCall(self, words)

    def meeting(self, words: str) -> DistributedCall:
        """Return a meeting between two calls, to be entered."""
        return DistributedCall(self, words, counted=False)

    def waiting_alone(self, words: str) -> DistributedCall:
        """Return a wait of this rank between two calls, in which it meets nobody, to be entered."""
        return DistributedCall(self, words, counted=False, alone=True)

    def building(self, words: str, around: DistributedCall | None = None) -> DistributedCall:
        """Return a part of the build, to be entered: the rank that fails raises its own error.

        Where a build of more ranks is ``around`` it, that one is told of an error first, and what is known
        there is raised: it names ranks by their numbers among all.
        """
        return DistributedCall(self, words, own_error=True, around=around)

    def common(self, error: PipelineError) -> PipelineError:
        """Return the error, marked as one that every rank raises by itself."""
        self.known_to_all = error
        return error

    def error(self, *, built: bool = True) -> PipelineError:
        """Return the error of the failure, or of the refusal, that ended the call of this rank."""
        watchdog = self.watchdog
        if watchdog.failed is not None or watchdog.refused is None:
            failed = watchdog.failed or "the call was interrupted"
            return PipelineError(failed + _NO_MORE if built else failed)
        late = watchdog.refused.call < watchdog.call and not watchdog.told
        note, self._note, watchdog.told = self._note, "", True
        return PipelineError(watchdog.refused.reason + (_LATE if late else note + _GOES_ON))

    def settle(self) -> None:
        """Meet all ranks after a refusal, and bring them to the same call.

        Raises
        ------
        Ended
            Another rank is in a later call already.
        """
        watchdog = self.watchdog
        while True:
            key = f"settle/{watchdog.settled}/{self._round}"
            self._round += 1
            mine = json.dumps([watchdog.call, watchdog.dirty, self.own_state()])
            told = self.meetings.meet("its next call after a refused one", mine, key=key)
            rows = [json.loads(text) for text in json.loads(told)]
            calls = [int(row[0]) for row in rows]
            if watchdog.call < max(calls):
                ahead = calls.index(max(calls))
                self._note = f"\n  rank {ahead} learned that only in this call, which no rank runs therefore"
                watchdog.ended = True
                raise Ended
            if min(calls) == max(calls):
                break
        self._round = 0
        self.renewals += any(row[1] for row in rows)
        watchdog.settle()
        self.on_settled([str(row[2]) for row in rows])


class DistributedCall:
    """One call of one rank; see the module's text for how it may end.

    Parameters
    ----------
    calls
        All calls of the rank.
    words
        What it is: ``step 3``.
    counted
        Whether the ranks count it; a meeting between two calls belongs to the call before it.
    own_error
        Whether the rank that fails raises its own error and not a `PipelineError`.
    alone
        Whether no other rank takes part: a refusal that this rank has raised for does not concern the call,
        and is settled later.
    around
        The build of more ranks that this one is a part of.
    """

    def __init__(
        self,
        calls: DistributedCalls,
        words: str,
        *,
        counted: bool = True,
        own_error: bool = False,
        alone: bool = False,
        around: DistributedCall | None = None,
    ) -> None:
        self._calls, self._watchdog, self._words = calls, calls.watchdog, words
        self._counted, self._own_error, self._alone = counted, own_error, alone
        self._around = around
        self._told_before: BaseException | None = None
        self._open = self._finished = False
        self._refused: BaseException | None = None

    @shielded
    def __enter__(self) -> DistributedCall:
        watchdog = self._watchdog
        if watchdog.failed is None and watchdog.inside:
            watchdog.fail(f"rank {watchdog.rank} left a call before it had ended")
        if watchdog.failed is not None:
            raise self._calls.error()
        self._open = True
        try:
            watchdog.enter(self._words, self._counted)
            self._take_up()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _take_up(self) -> None:
        """Go on after a refusal, or raise for one that this rank has not raised for."""
        watchdog = self._watchdog
        watchdog.gentle = watchdog.needs_all = self._own_error
        if watchdog.refused is None or (self._alone and watchdog.told):
            watchdog.check()
        elif watchdog.told and self._counted:
            self._calls.settle()
        elif watchdog.told or watchdog.refused.call < watchdog.call or not self._counted:
            watchdog.ended = True
            raise Ended

    @contextlib.contextmanager
    def checks(self) -> Iterator[None]:
        """Surround what this rank does before its first message: an error in it refuses the call."""
        watchdog = self._watchdog
        watchdog.gentle = True
        try:
            yield
        except Exception as error:
            if watchdog.failed is None:
                text = str(error) if isinstance(error, ZBCompileError) else f"{type(error).__name__}: {error}"
                reason = f"rank {watchdog.rank} refused {self._words}: {text}"
                watchdog.refuse(reason, told=error is self._calls.known_to_all)
                self._refused = error
            raise
        watchdog.check()
        watchdog.gentle = False

    @shielded
    def finish(self, action: Callable[[], None]) -> None:
        """Let the call take effect: ``action`` runs as a whole, or not at all if the call has been ended."""
        with deferred_signals():
            self._pass_end()
            self._finished = True
            action()

    def _pass_end(self) -> None:
        dirty = self._watchdog.dirty
        self._watchdog.finish()
        self._watchdog.dirty = dirty and self._alone

    @shielded
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        try:
            if error is None and not self._finished:
                try:
                    self._pass_end()
                except Ended as ended:
                    error = ended
            instead = None if error is None else self._instead_of(error)
            if self._watchdog.failed is not None and self._calls.may_keep_store:
                self._watchdog.linger()
        finally:
            self._open = False
            self._watchdog.leave()
        if instead is not None:
            raise instead from (None if isinstance(error, Ended) else error)

    def _instead_of(self, error: BaseException) -> PipelineError | None:
        """Tell the other ranks of an error, if they do not know; return what is raised instead, or None."""
        watchdog, rank = self._watchdog, self._watchdog.rank
        known = [self._refused, self._calls.known_to_all]
        if self._around is not None:
            self._around._hear_first(error)
            known.append(self._around._calls.known_to_all)
        if error is self._told_before:
            return None
        if isinstance(error, Ended):
            return self._calls.error(built=not self._own_error)
        name = type(error).__name__
        if not isinstance(error, Exception):
            doing = watchdog.now_doing()
            where = self._words if doing is None else doing.words
            watchdog.fail(f"{name}{f': {error}' if str(error) else ''} (rank {rank}, {where})")
            return None
        if watchdog.failed is None and error in known:
            return None
        if not watchdog.ended:
            if self._own_error:
                watchdog.fail(f"rank {rank} failed in {self._words}: {name}: {error}")
                return None
            watchdog.fail(
                str(error) if isinstance(error, PipelineError) else f"{name}: {error} (rank {rank})"
            )
        return self._calls.error(built=not self._own_error)

    def _hear_first(self, error: BaseException) -> None:
        """Hear of an error in a part of this build before the ranks of that part do."""
        if isinstance(error, Ended):
            self._watchdog.look()
        elif self._instead_of(error) is None:
            self._told_before = error
