"""Send modes: what a send does to its rank. This page says all of it; everything else asks these objects.

A rank posts its sends and receives and goes on. A mode says for which of these posts the rank waits until the
message has arrived, and before which of its actions::

    mode        waits for            before                 so that
    async       nothing              -                      a send never holds up its rank
    rendezvous  sends                its next action        one send holds the rank until it is received
    batched     sends and receives   its next compute       all between two compute actions is one exchange

Actions of a stage as a whole (`zbcompile.schedule.stage_actions`) use a channel of their own and wait for
none of them. The event graph adds these waits, the planner's clock and the emitted program do them, and
whether there are any decides which bounds, proofs and searches serve. A mode is data: a new one is one more
object in `SEND_MODES`, from which formats, schemas and commands take the names.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbcompile.errors import UsageError
from zbcompile.schedule.ir import Kind

__all__ = ["ASYNC", "BATCHED", "RECEIVE_DEPTH", "RENDEZVOUS", "SEND_MODES", "SendMode", "send_mode"]

RECEIVE_DEPTH = 2
"""Receives posted ahead per channel. Two cost no time against unbounded buffers.

See docs/reference/send-modes.md.
"""

_ALL = frozenset(kind for kind in Kind if not kind.is_of_stage)
_COMPUTE = frozenset(kind for kind in Kind if kind.is_compute)
_SENDS = frozenset(kind for kind in Kind if kind.is_send)


@dataclass(frozen=True, slots=True)
class SendMode:
    """What a send does to its rank.

    Attributes
    ----------
    name
        The name in files, commands and ``transport=``.
    meaning
        What a send does, in words.
    awaited
        Kinds of posts that the rank waits for. Empty: it never waits, and its messages leave by themselves.
    waits_before
        Kinds of actions before which it waits for them.
    under_way
        Posts, the newest ones, that it leaves open when it goes on.
    receive_depth
        Receives posted ahead per channel. 0: every receive joins an exchange, the one right before its use;
        that of an activation moves back, across W's, to the one that sends a gradient.
    receives_first
        Whether receives are posted before the sends at the same place, so that a rank that a send holds up is
        already open for its peers.
    settle_verb
        The verb of the runtime that waits for posts.
    starts_as
        The mode whose orders start a search where ranks have several stages; None: none are worth their time.
    """

    name: str
    meaning: str
    awaited: frozenset[Kind] = frozenset()
    waits_before: frozenset[Kind] = frozenset()
    under_way: int = 0
    receive_depth: int = RECEIVE_DEPTH
    receives_first: bool = False
    settle_verb: str = ""
    starts_as: SendMode | None = None

    @property
    def holds_rank(self) -> bool:
        """Whether a send can hold up its rank.

        If not, an order is timed without its sends and receives, the compiled scorer, the crossing models
        and the longer searches serve, and a program needs send slots to bound what is on its way.
        """
        return bool(self.awaited)

    @property
    def joins_exchange(self) -> bool:
        """Whether receives join an exchange instead of being posted ahead."""
        return self.receive_depth == 0

    @property
    def travel_is_work(self) -> bool:
        """Whether a rank computes again only after all that it sent has arrived.

        Then the travel time counts as work of the rank, which carries over all bounds
        (`zbcompile.planner.bounds.blocking_send`). Without it the bounds hold as they are.
        """
        return not self.under_way and self.awaited >= _SENDS and self.waits_before >= _COMPUTE

    def due(self, open_posts: list[int]) -> tuple[list[int], list[int]]:
        """Return which of its open posts a rank waits for where it waits, and which stay open.

        Parameters
        ----------
        open_posts
            The posts of awaited kinds that the rank has not waited for, oldest first.
        """
        if not self.under_way:
            return open_posts, []
        return open_posts[: -self.under_way], open_posts[-self.under_way :]


ASYNC = SendMode("async", "never holds up its rank")
RENDEZVOUS = SendMode(
    "rendezvous",
    "holds its rank until it is received",
    awaited=_SENDS,
    waits_before=_ALL,
    receives_first=True,
    settle_verb="settle_sends",
    starts_as=ASYNC,
)
BATCHED = SendMode(
    "batched",
    "is one exchange with the receives up to the next compute action",
    awaited=_ALL - _COMPUTE,
    waits_before=_COMPUTE,
    receive_depth=0,
    settle_verb="settle",
    starts_as=ASYNC,
)

SEND_MODES: tuple[SendMode, ...] = (ASYNC, RENDEZVOUS, BATCHED)
"""All modes; the first is the one that is taken if none is named."""


def send_mode(name: str) -> SendMode:
    """Return the mode of a name.

    Raises
    ------
    UsageError
        There is none.
    """
    for mode in SEND_MODES:
        if mode.name == name:
            return mode
    raise UsageError(f"unknown transport {name!r}", needed=" or ".join(mode.name for mode in SEND_MODES))
