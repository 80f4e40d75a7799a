"""The runner for one process per rank: runs its own rank's program and waits where the program yields."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from zbcompile.runtime.calls import Call
from zbcompile.runtime.channels.channel import Ticket, describe
from zbcompile.runtime.channels.choice import make_channels
from zbcompile.runtime.channels.gloo import BrokenChannelError, GlooChannels
from zbcompile.runtime.channels.nccl import NcclChannels
from zbcompile.runtime.channels.replicas import Replicas
from zbcompile.runtime.channels.sharded import StageCalls
from zbcompile.runtime.doing import NOBODY, Doing
from zbcompile.runtime.executor import failure
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.program import Program
from zbcompile.runtime.recorder import TimedAction
from zbcompile.runtime.runner import Runner
from zbcompile.runtime.spec import PipelineSpec, Step
from zbcompile.runtime.verbs import Rank
from zbcompile.runtime.wait import Wait
from zbcompile.schedule.ir import Action

__all__ = ["DistributedRunner"]


class DistributedRunner(Runner):
    """Runs the program of this process's rank.

    Its channels are made at the first step, and anew when a refused step has left messages in them.

    Parameters
    ----------
    group
        The processes of the pipeline. All of them make their runners in the same order.
    spec
        The pipeline.
    text
        The text of this rank's program.
    device
        Where its stages run; decides between gloo and NCCL.

    Attributes
    ----------
    sharded
        Its stages whose weights replicas share, which whoever made them sets here; None if there are none.
    """

    def __init__(self, group: PipelineGroup, spec: PipelineSpec, text: str, device: torch.device) -> None:
        self.group = group
        self.rank = group.pipeline_rank
        self.program = Program.load(text, self.rank)
        self._spec, self._device = spec, device
        self._channels: GlooChannels | NcclChannels | None = None
        self._replicas: Replicas | None = None
        self._made_at = -1
        self.end: Rank | None = None
        self.sharded: StageCalls | None = None
        self._waiting: tuple[Wait, Ticket, float] | None = None
        group.watchdog.on_end.append(self._abandon)

    def call(self, words: str) -> Call:
        """Return a step or an evaluation of all ranks, to be entered."""
        return self.group.calls.call(words)

    def connect(self) -> None:
        """Make the channels, unless there are some that can be used. All ranks come here in the same call."""
        if self._channels is not None and self._made_at == self.group.calls.renewals:
            return
        self._leave()
        if len(self.group.pipeline) < self.group.size:
            # A rank that refuses the call never comes: nothing could end the making of a group with it.
            self.group.barrier("new channels")
        self._channels = make_channels(self.group, self._spec, self._device)
        if self._spec.has_gradients and len(self.group.replicas) > 1 == len(self.group.shards):
            self._replicas = Replicas(self.group, self._device)
        self._made_at = self.group.calls.renewals
        self.end = Rank(self.rank, self._spec, {}, self._channels, self._device, self._replicas)

    def run(self, step: Step, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run one step of this rank, as `Runner.run` says."""
        if self.group.watchdog.inside:
            return self._run(step, state)
        with self.call("the step"):
            return self._run(step, state)

    def _run(self, step: Step, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        watchdog = self.group.watchdog
        self.connect()
        end = self.end
        assert end is not None
        end.state, end.sharded = state, self.sharded
        end.begin(step, self.program.send_slots)
        watchdog.begin_messages()
        watchdog.watch(self._doing)
        try:
            with torch.no_grad():
                for wait in self.program.start(end):
                    for ticket in wait.tickets:
                        self._await(wait, ticket)
            end.check_finished()
        except BrokenChannelError as error:
            watchdog.broken(error.peer, f"waited for {describe(error.key)}")
        except Exception as error:
            raise failure(end, error, self.group.rank) from error
        return end.let_go()

    def _await(self, wait: Wait, ticket: Ticket) -> None:
        self._waiting = (wait, ticket, time.monotonic())
        ticket.wait()
        self._waiting = None

    def _doing(self) -> Doing | None:
        """Return the wait or the action of the main thread, for the watchdog."""
        waiting, end = self._waiting, self.end
        if waiting is not None:
            wait, ticket, since = waiting
            words = f"waits at {wait} for {describe(ticket.key)} from rank {ticket.peer}"
            return Doing(words, ticket.peer, since)
        if end is None or end.running is None:
            return None
        kind, stage, microbatch = end.running
        return Doing(f"runs {stage}{kind.letter}{microbatch}", NOBODY, end.running_since)

    def synchronize(self) -> None:
        """Return when every rank has come here. Raises `PipelineError` if one has failed."""
        self.group.synchronize()

    def actions(self) -> list[list[TimedAction]]:
        """Return what each rank of this pipeline did in its last step, and when; all ranks call it."""
        rows = [] if self.end is None else self.end.recorder.actions()
        offset = self.group.clock_offset_ns
        text = "\n".join(f"{a} {s + offset} {e + offset}" for a, s, e in rows)
        with self.group.calls.meeting("the timeline"):
            parts = self.group.gather(text, "the timeline")
        result = []
        for part in (parts[rank] for rank in self.group.pipeline):
            words = [line.split() for line in part.splitlines() if line]
            result.append([(Action.parse(a), int(s), int(e)) for a, s, e in words])
        return result

    def close(self) -> None:
        """Close the channels."""
        if self._abandon in self.group.watchdog.on_end:
            self.group.watchdog.on_end.remove(self._abandon)
        self._leave()

    def _leave(self) -> None:
        for connections in (self._channels, self._replicas):
            if connections is not None:
                connections.close()
        self._channels = self._replicas = None

    def _abandon(self, fatal: bool) -> None:
        for connections in (self._channels, self._replicas):
            if connections is not None:
                connections.abandon()
