"""Texts of any length in the ranks' key-value store: written, looked for, read."""

from __future__ import annotations

import base64
import time
import zlib
from collections.abc import Callable, Sequence

from torch.distributed.distributed_c10d import Store

__all__ = ["LONGEST_PAUSE_S", "pause_s", "put_text", "reader"]

_PART = 4 << 20
"""Characters of one value in the store; `torch.distributed.TCPStore` refuses values above 8 MiB."""

_SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05
"""Bounds of a pause between two looks for what is not there yet."""


def pause_s(begin: float) -> float:
    """Return the pause before the next look for what was not there yet: an eighth of the time waited.

    ``begin`` is when the wait began, on the monotonic clock.
    """
    return min(LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, (time.monotonic() - begin) / 8))


def put_text(store: Store, key: str, text: str) -> None:
    """Write a text of any length, its first part last."""
    data = base64.b64encode(zlib.compress(text.encode(), 1)).decode()
    parts = [data[k : k + _PART] for k in range(0, len(data), _PART)]
    for k, part in enumerate(parts[1:]):
        store.set(f"{key}#{k}", part)
    store.set(key, f"{len(parts) - 1} {parts[0]}")


def _get(store: Store, key: str) -> str:
    head, _, data = store.get(key).decode().partition(" ")
    rest = [store.get(f"{key}#{k}").decode() for k in range(int(head))]
    return zlib.decompress(base64.b64decode(data + "".join(rest))).decode()


def reader(wanted: Sequence[tuple[str, int]]) -> Callable[[Store], tuple[list[str], bool]]:
    """Return a question for the values that are there, and for whether the rank of the next one is lost."""

    def question(store: Store) -> tuple[list[str], bool]:
        found: list[str] = []
        for key, rank in wanted:
            if not store.check([key]):
                return found, bool(store.check([f"lost/{rank}"]))
            found.append(_get(store, key))
        return found, False

    return question
