"""What a program yields where it has to wait."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from zbcompile.runtime.channels.channel import Ticket
from zbcompile.schedule.ir import Kind

__all__ = ["Wait", "Waits"]


@dataclass(slots=True)
class Wait:
    """A wait for messages: the program goes on when all tickets are done.

    Attributes
    ----------
    tickets
        Sends and receives waited for.
    kind, stage, microbatch
        The action that comes next; ``kind`` is None where the wait belongs to no single action.
    """

    tickets: Sequence[Ticket]
    kind: Kind | None = None
    stage: int = -1
    microbatch: int = -1

    def __str__(self) -> str:
        return (
            "the end of the step" if self.kind is None else f"{self.stage}{self.kind.letter}{self.microbatch}"
        )


Waits = Generator[Wait, None, None]
"""A program, or a verb of it, that may have to wait."""
