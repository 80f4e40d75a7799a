"""The runner for one process per rank: runs its own rank's program and waits where the program yields."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from zbcompile.errors import PipelineError, ZBCompileError
from zbcompile.runtime import torch_private
from zbcompile.runtime.channels.channel import Ticket, describe
from zbcompile.runtime.channels.gloo import BrokenChannelError, GlooChannels
from zbcompile.runtime.channels.nccl import NcclChannels
from zbcompile.runtime.executor import failure
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.program import Program
from zbcompile.runtime.recorder import TimedAction
from zbcompile.runtime.runner import Runner
from zbcompile.runtime.spec import PipelineSpec, Step
from zbcompile.runtime.verbs import Rank
from zbcompile.runtime.wait import Wait
from zbcompile.runtime.watchdog import Doing, Interrupted, Watchdog
from zbcompile.schedule.ir import Action

__all__ = ["DistributedRunner"]


class DistributedRunner(Runner):
    """Runs the program of this process's rank.

    Every failure, here or elsewhere, ends as one `PipelineError` with the same text on all ranks; no
    gradient of the failed step is handed over, and later steps raise the same error again.

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
    stall_limit_s
        Seconds that a step may stand still before it is ended.
    owns_group
        Whether `close` also leaves the group's control group.
    """

    def __init__(
        self,
        group: PipelineGroup,
        spec: PipelineSpec,
        text: str,
        device: torch.device,
        stall_limit_s: float,
        *,
        owns_group: bool = True,
    ) -> None:
        self._owns_group = owns_group
        self.group = group
        self.rank = group.rank
        self.program = Program.load(text, group.rank)
        self.channels = _channels(group, spec, device)
        self.end = Rank(group.rank, spec, {}, self.channels, device)
        self.offset_ns = group.clock_offset_ns()
        self._waiting: tuple[Wait, Ticket, float] | None = None
        self._in_step = False
        store = PrefixStore(group.runner_name(), torch_private.own_store())
        self.watchdog = Watchdog(store, group.rank, stall_limit_s, self._doing, self._abandon)

    def run(self, step: Step, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run one step of this rank, as `Runner.run` says."""
        self._refuse_if_failed()
        end = self.end
        end.state = state
        end.begin(step, self.program.send_slots)
        self._in_step = True
        try:
            with torch.no_grad(), self.watchdog:
                for wait in self.program.start(end):
                    for ticket in wait.tickets:
                        self._await(wait, ticket)
                end.check_finished()
        except Interrupted:
            raise self._ended() from None
        except BrokenChannelError as error:
            raise self._broken(error) from error
        except Exception as error:
            raise self._failed(error) from error
        finally:
            self._in_step, self._waiting = False, None
        self._refuse_if_failed()
        return end.gradients

    def _await(self, wait: Wait, ticket: Ticket) -> None:
        self._waiting = (wait, ticket, time.monotonic())
        ticket.wait()
        self._waiting = None

    def _doing(self) -> Doing | None:
        """Return the wait or the action of the main thread, for the watchdog."""
        waiting, running = self._waiting, self.end.running
        if waiting is not None:
            wait, ticket, since = waiting
            words = f"waits at {wait} for {describe(ticket.key)} from rank {ticket.peer}"
            return Doing(words, ticket.peer, since)
        if not self._in_step or running is None:
            return None
        kind, stage, microbatch = running
        return Doing(f"runs {stage}{kind.letter}{microbatch}", -1, self.end.running_since)

    def _abandon(self) -> None:
        self.channels.abandon()
        self._leave_control()

    def _refuse_if_failed(self) -> None:
        error = self.watchdog.error()
        if error is not None:
            raise error

    def _ended(self) -> PipelineError:
        return self.watchdog.error() or PipelineError("the step was interrupted")

    def _failed(self, error: Exception) -> PipelineError:
        known = self.watchdog.error()
        return known or self.watchdog.fail(str(failure(self.end, error)))

    def _broken(self, error: BrokenChannelError) -> PipelineError:
        return self.watchdog.broken(
            f"rank {error.peer} is gone: its connection closed while rank {self.group.rank} "
            f"waited for {describe(error.key)}"
        )

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Raise an error of the checks before a step here as it is, and end the step on the other ranks."""
        self._refuse_if_failed()
        try:
            yield
        except ZBCompileError as error:
            self.watchdog.fail(f"rank {self.group.rank} refused the step: {error}")
            raise

    def synchronize(self) -> None:
        """Return when every rank has come here. Raises `PipelineError` if one has failed."""
        self._refuse_if_failed()
        try:
            self.group.barrier()
        except Exception as error:
            raise self.watchdog.broken(
                f"a rank was gone when rank {self.group.rank} met the others"
            ) from error
        self._refuse_if_failed()

    def actions(self) -> list[list[TimedAction]]:
        """Return per rank what its last step did and when, on rank 0's clock. All ranks call it."""
        rows = self.end.recorder.actions()
        text = "\n".join(f"{a} {s + self.offset_ns} {e + self.offset_ns}" for a, s, e in rows)
        result = []
        for part in self.group.gather(text or "\n"):
            words = [line.split() for line in part.splitlines() if line]
            result.append([(Action.parse(a), int(s), int(e)) for a, s, e in words])
        return result

    def close(self) -> None:
        """Stop the watchdog, close the channels, and leave the control group if the runner owns it."""
        self.watchdog.stop()
        if self.watchdog.reason is None:
            self.channels.abandon()
            if self._owns_group:
                self._leave_control()

    def _leave_control(self) -> None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group(self.group.control)


def _channels(group: PipelineGroup, spec: PipelineSpec, device: torch.device) -> GlooChannels | NcclChannels:
    return NcclChannels(group, spec, device) if device.type == "cuda" else GlooChannels(group)
