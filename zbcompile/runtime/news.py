"""What the ranks of a pipeline tell each other when something goes wrong: a list in the key-value store.

All ranks see the same entries in the same order, so all agree on what happened first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

__all__ = ["Event", "read_news", "tell"]


@dataclass(frozen=True, slots=True)
class Event:
    """An entry of the list.

    Attributes
    ----------
    fatal
        Whether the pipeline has failed; else a rank has refused a call before it sent a message of it.
    rank
        The rank that tells it.
    call
        The number of the call that it is in.
    reason
        What happened, in words.
    """

    fatal: bool
    rank: int
    call: int
    reason: str

    def text(self) -> str:
        """Return the entry as text."""
        return json.dumps([self.fatal, self.rank, self.call, self.reason])

    @staticmethod
    def parse(text: str) -> Event:
        """Return the entry of a text."""
        fatal, rank, call, reason = json.loads(text)
        return Event(bool(fatal), int(rank), int(call), str(reason))


def tell(store: Store, start: int, event: Event) -> Event | None:
    """Add an entry behind those from ``start`` on, unless one of them says that the pipeline has failed.

    Returns
    -------
    Event or None
        The first failure among the entries from ``start`` on, the new one included.
    """
    text, place = event.text(), start
    while True:
        found = store.compare_set(_key(place), "", text)
        there = Event.parse(found.decode() if isinstance(found, bytes) else str(found))
        if there.fatal:
            return there
        if there == event:
            return None
        place += 1


def read_news(store: Store, start: int) -> list[Event]:
    """Return the entries from ``start`` on."""
    found: list[Event] = []
    while store.check([_key(start + len(found))]):
        found.append(Event.parse(store.get(_key(start + len(found))).decode()))
    return found


def _key(place: int) -> str:
    return f"news/{place}"
