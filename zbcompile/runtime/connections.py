"""What gloo itself does not offer: to break a group's connections from any thread, and to see them break."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

__all__ = ["FOREVER", "Tripwire", "break_connections", "leave_group"]

FOREVER = timedelta(days=1000)
"""The limit of a wait that the watchdog ends."""

_BREAK_TAG, _TRIPWIRE_TAG = 1_000_001, 1_000_002


def break_connections(group: ProcessGroup) -> None:
    """Close all connections of a gloo group: every wait on it ends with an error, here and at its peers.

    gloo closes them when a wait on the group lasts too long, so one is begun that lasts too long at once. It
    is begun with every peer: a wait that ends because just this peer has closed leaves the others'
    connections.
    """
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            work = group.recv([torch.empty(1, dtype=torch.uint8)], peer, _BREAK_TAG)
        except RuntimeError:
            continue  # this connection is closed already
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(milliseconds=1))


def leave_group(group: ProcessGroup) -> None:
    """Leave a process group, which may have been destroyed by others already."""
    with contextlib.suppress(Exception):
        dist.destroy_process_group(group)


class Tripwire:
    """A receive from one peer that never comes: it fails when the peer's process ends.

    Parameters
    ----------
    group
        A gloo group.
    peer
        The rank in it that is looked at.
    lost
        Called from the tripwire's thread when the connection has broken.
    """

    def __init__(self, group: ProcessGroup, peer: int, lost: Callable[[int], None]) -> None:
        self._peer, self._lost = peer, lost
        self._work = group.recv([torch.empty(1, dtype=torch.uint8)], peer, _TRIPWIRE_TAG)
        self._thread = threading.Thread(target=self._watch, name="zbcompile tripwire", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Return when the thread has ended: the group's connections must be broken before."""
        self._thread.join(timeout=2.0)

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._work.wait(FOREVER)
        self._lost(self._peer)
