"""Send modes that the package does not have. A new one needs an object like these and no other file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from zbcompile.schedule import semantics
from zbcompile.schedule.ir import Kind
from zbcompile.schedule.semantics import SEND_MODES, SendMode

_SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})

BUFFERED = SendMode(
    "buffered",
    "holds its rank at the next action while more than two are on their way",
    awaited=_SENDS,
    waits_before=frozenset(Kind),
    under_way=2,
    receives_first=True,
    settle_verb="settle_sends",
)
DRAINED = SendMode(
    "drained",
    "holds its rank at the next compute action",
    awaited=_SENDS,
    waits_before=frozenset(kind for kind in Kind if kind.is_compute),
    receive_depth=1,
    settle_verb="settle_sends",
    starts_as=BUFFERED,
)

OTHER_MODES = (BUFFERED, DRAINED)


@contextmanager
def other_send_modes() -> Iterator[None]:
    """Let problems name these modes, within the block."""
    with mock.patch.object(semantics, "SEND_MODES", (*SEND_MODES, *OTHER_MODES)):
        yield
