"""What is alive: the objects that a user made before, found by their class, and what may go."""

from __future__ import annotations

import gc
from typing import Any

__all__ = ["collect_circles", "live_objects"]


def live_objects() -> list[Any]:
    """Return all objects that the garbage collector knows, those that ``gc.freeze()`` hid included.

    What was frozen is frozen again, and with it what has been made since: only circles of objects that nobody
    holds any more stay for it, and the collector's walks stay as short as the user wanted them.
    """
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    found = gc.get_objects()
    if frozen:
        gc.freeze()
    return found


def collect_circles() -> None:
    """Collect circles of objects that nobody holds any more, those that ``gc.freeze()`` hid included.

    What was frozen is frozen again, as in `live_objects`.
    """
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
