"""Messages between ranks: what they are called, and what every kind of channels offers.

A channel is a directed pair of ranks, first in, first out. Posting a send or a receive returns a `Ticket` at
once; a rank waits only when it asks the ticket. The k-th send of a channel meets the k-th receive:
`zbcompile.schedule.check` has proved that both are the same message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from zbcompile.runtime.wire_format import WireFormat

__all__ = ["Channels", "Key", "MessageKey", "ReducedKey", "Ticket", "TiedKey", "describe"]

MessageKey = tuple[bool, int, int, int]
"""A message between stages: (backward, source stage, target stage, microbatch)."""

TiedKey = tuple[str, str, int]
"""One stage's gradient of a tied parameter: ("tied", parameter name, stage)."""

ReducedKey = tuple[int, str]
"""A stage's gradients, or that of the tied parameter that is named, summed over replicas: (stage, name). Or a
stage's ``unshard`` or ``reshard``."""

Key = MessageKey | TiedKey | ReducedKey
"""What a message is."""


class Ticket(Protocol):
    """A posted send or receive.

    Attributes
    ----------
    key
        What the message is.
    peer
        The rank at the other end, among all ranks that make the same calls.
    """

    key: Key
    peer: int

    def ready(self) -> bool:
        """Whether `wait` would return at once. Called only when all ranks share one process."""

    def wait(self) -> None:
        """Return when the message has arrived. Called only with one process per rank."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors that arrived, once. Called only on receives."""


class Channels(Protocol):
    """One rank's end of all its channels."""

    def post_send(
        self, peer: int, key: Key, wire_formats: Sequence[WireFormat], tensors: list[Tensor]
    ) -> Ticket:
        """Hand over a message, whose tensors the channel keeps until it has arrived."""

    def post_recv(self, peer: int, key: Key, wire_formats: Sequence[WireFormat]) -> Ticket:
        """Make room for the next message from ``peer``."""


def describe(key: Key) -> str:
    """Return a message, or a sum over replicas, in words."""
    if len(key) == 2:
        stage, name = key
        if name in ("unshard", "reshard"):
            return f"the {name} of stage {stage}"
        what = f"the tied parameter {name}" if name else f"stage {stage}"
        return f"the gradients of {what}, summed over the replicas,"
    if len(key) == 3:
        _, name, stage = key
        return f"stage {stage}'s gradient of the tied parameter {name}"
    backward, source, target, microbatch = key
    what = "gradient" if backward else "activation"
    return f"the {what} of microbatch {microbatch} from stage {source} to stage {target}"
