"""What a rank's main thread does, as the other ranks can read it, and who waits for whom.

A rank that does the same for longer than a moment writes it to the key-value store. The rank whose wait lasts
too long reads what all have written, and follows the chain of waits to its root.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

__all__ = ["ANY_RANK", "CLOSED", "NOBODY", "Doing", "State", "chain_of_waits", "publish", "read_states"]

ANY_RANK, NOBODY = -2, -1
"""The peer of a wait for no rank in particular, and of what is no wait."""

CLOSED = "has closed the pipeline"
"""What a rank that has closed its pipeline does."""

State = tuple[int, str, str]
"""What a rank has written: the rank waited for, since how many seconds, words."""


@dataclass(frozen=True, slots=True)
class Doing:
    """What a rank's main thread does.

    Attributes
    ----------
    words
        The action or the wait, in words.
    peer
        The rank waited for; `ANY_RANK`; or `NOBODY`.
    since
        When it began, in seconds of the monotonic clock.
    extra_s
        Seconds beyond the stall limit that it may take.
    """

    words: str
    peer: int
    since: float
    extra_s: float = 0.0

    def text(self, age_s: float) -> str:
        """Return the line for the store."""
        return f"{self.peer}|{age_s:.1f}|{self.words}"


def publish(rank: int, text: str) -> Callable[[Store], None]:
    """Return a question that writes what a rank does; "-" for nothing in particular."""

    def question(store: Store) -> None:
        store.set(f"doing/{rank}", text)

    return question


def read_states(store: Store, size: int) -> dict[int, State]:
    """Return by rank what has been written."""
    found: dict[int, State] = {}
    for rank in range(size):
        key = f"doing/{rank}"
        if store.check([key]):
            parts = store.get(key).decode().split("|", 2)
            if len(parts) == 3:
                found[rank] = (int(parts[0]), parts[1], parts[2])
    return found


def chain_of_waits(rank: int, doing: Doing, age_s: float, size: int, states: Mapping[int, State]) -> str:
    """Return in words who waits for whom, from a rank to one that does not wait.

    Parameters
    ----------
    rank, doing, age_s
        Who has waited too long, for what, and for how many seconds.
    size
        Number of ranks.
    states
        What the ranks have written.
    """
    chain, peer, root = [rank], doing.peer, ""
    while not root:
        if peer == ANY_RANK:
            peer = next((r for r in range(size) if r not in states and r != rank), rank)
        if peer in chain:
            root = f"a circle, closed by rank {peer}"
            break
        chain.append(peer)
        state = states.get(peer)
        if state is None:
            root = f"rank {peer} is in no action that it knows of (outside a step, ended, or not reachable)"
        elif state[0] != NOBODY:
            peer = state[0]
        else:
            root = f"rank {peer} {state[2]} for {state[1]} s"
    path = " -> ".join(map(str, chain))
    return f"stalled: rank {rank} {doing.words} for {age_s:.1f} s; chain {path}; root: {root}"
