"""What is alive: the objects that a user made before, found by their class, and what may go."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, TypeVar

__all__ = ["collect_circles", "live_instances", "live_objects"]

_Kind = TypeVar("_Kind")


def live_objects() -> list[Any]:
    """Return all objects that the garbage collector knows, those that ``gc.freeze()`` hid included."""
    with _thawed():
        return gc.get_objects()


def live_instances(kind: type[_Kind]) -> list[_Kind]:
    """Return those of one class alone, found by their reference to it in a third of the time.

    ``kind`` : a class that was made at run time: an instance of such a class tells the collector of it, one
    of a class that is built in does not.
    """
    with _thawed():
        return [found for found in gc.get_referrers(kind) if type(found) is kind]


def collect_circles() -> None:
    """Collect circles of objects that nobody holds any more, those that ``gc.freeze()`` hid included."""
    with _thawed():
        gc.collect()


@contextlib.contextmanager
def _thawed() -> Iterator[None]:
    """Have the collector know what was frozen.

    It is frozen again, and with it what has been made since: only circles of objects that nobody holds any
    more stay for it, and the collector's walks stay as short as the user wanted them.
    """
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()
