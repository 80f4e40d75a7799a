"""The messages of a step. Each carries an activation or a gradient of one microbatch to another rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zbcompile.schedule.costs import Edge
from zbcompile.schedule.ir import Action, Kind
from zbcompile.schedule.problem import Problem

__all__ = ["Message", "messages_of"]


class Message(NamedTuple):
    """One message of a step.

    Attributes
    ----------
    backward
        False for an activation, True for its gradient.
    source, target
        Stages that send and receive it. Of an activation the source is the earlier stage, of a gradient the
        later one.
    """

    backward: bool
    source: int
    target: int
    microbatch: int

    @property
    def send(self) -> Action:
        """The action that sends it, on the rank of ``source``."""
        kind = Kind.SEND_B if self.backward else Kind.SEND_F
        return Action(kind, self.source, self.microbatch, self.target)

    @property
    def recv(self) -> Action:
        """The action that posts its receive, on the rank of ``target``."""
        kind = Kind.RECV_B if self.backward else Kind.RECV_F
        return Action(kind, self.target, self.microbatch, self.source)

    @staticmethod
    def of(action: Action) -> Message:
        """Return the message that a send or receive belongs to."""
        backward = action.kind in (Kind.SEND_B, Kind.RECV_B)
        assert action.peer is not None
        if action.kind.is_send:
            return Message(backward, action.stage, action.peer, action.microbatch)
        return Message(backward, action.peer, action.stage, action.microbatch)

    def __str__(self) -> str:
        what = "gradient" if self.backward else "activation"
        return f"the {what} of microbatch {self.microbatch} from stage {self.source} to stage {self.target}"


def messages_of(problem: Problem) -> Iterator[tuple[Edge, Message]]:
    """Yield every message that a step needs between different ranks, with the edge that it travels along."""
    rank_of = problem.placement.rank_of
    for edge in problem.profile.edges:
        if rank_of[edge.source] == rank_of[edge.target]:
            continue
        for microbatch in range(problem.num_microbatches):
            yield edge, Message(False, edge.source, edge.target, microbatch)
            if edge.has_gradient:
                yield edge, Message(True, edge.target, edge.source, microbatch)
