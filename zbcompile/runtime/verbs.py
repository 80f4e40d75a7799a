"""A rank and the verbs that its program calls.

A rank holds what its stages need between actions: messages, what F saves for B and B for W, gradient sums.
Everything is dropped at its last use, so that what is held is what was planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar, TypeVarTuple, cast

import torch
from torch import Tensor

from zbcompile.errors import PipelineError
from zbcompile.runtime.channels.channel import Channels, Ticket
from zbcompile.runtime.channels.replicas import Reduced, Replicas
from zbcompile.runtime.channels.sharded import ShardTicket, StageCalls
from zbcompile.runtime.gradients import GradientSums
from zbcompile.runtime.mailbox import Mailbox
from zbcompile.runtime.randomness import stream, stream_seed
from zbcompile.runtime.recorder import Recorder
from zbcompile.runtime.spec import PipelineSpec, Step
from zbcompile.runtime.tied import sum_tied
from zbcompile.runtime.wait import Wait, Waits
from zbcompile.runtime.wiring import Saved, zeros_of
from zbcompile.schedule.ir import Kind

__all__ = ["Rank"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Rank:
    """One rank of a pipeline: the object that a program gets.

    Verbs that may have to wait are generators of `Wait`. Stages, microbatches and peers are numbers as in the
    schedule; the peer of a message is the stage at its other end.

    Parameters
    ----------
    index
        Which rank this is.
    spec
        The pipeline.
    state
        Parameters and buffers by name, as the stages ask for them.
    channels
        The rank's end of its channels.
    device
        Where its stages run.
    replicas
        Those of this rank, each with all weights of its stages; None if there are none.
    sharded
        Its stages whose weights replicas share; None if there are none.

    Attributes
    ----------
    gradients
        Parameter name -> sum of the step's gradients; filled by `reduce_gradients`.
    recorder
        When the actions of the last step ran.
    running
        The action that runs now: (kind, stage, microbatch), or None between actions.
    running_since
        When it began, in seconds of the monotonic clock.
    """

    def __init__(
        self,
        index: int,
        spec: PipelineSpec,
        state: Mapping[str, Tensor],
        channels: Channels,
        device: torch.device,
        replicas: Replicas | None = None,
        sharded: StageCalls | None = None,
    ) -> None:
        self.index, self.spec, self.state, self.channels = index, spec, state, channels
        self.device, self.replicas, self.sharded = device, replicas, sharded
        self.recorder = Recorder(device)
        self.begin(Step(()))

    def begin(self, step: Step, send_slots: int | None = None) -> None:
        """Start a step with nothing held; ``send_slots`` is the program's own constant."""
        self.step = step
        sums = GradientSums(self.spec.gradient_dtype, self.spec.accumulate)
        self.sums = step.sums.setdefault(self.index, sums)
        self.sums.restart(self.spec.microbatch_order)
        self._reducing: dict[int, Reduced | ShardTicket] = {}
        self._gathering: dict[int, ShardTicket] = {}
        self._resharding: list[ShardTicket] = []
        self._reshards_later: set[int] = set()
        self.gradients: dict[str, Tensor] = {}
        self.running: tuple[Kind, int, int] | None = None
        self.running_since = 0.0
        self._mailbox = Mailbox(self.index, self.spec, self.channels, self.recorder, send_slots)
        self._saved: dict[tuple[int, int], Saved] = {}
        self._saved_for_weight: dict[tuple[int, int], Saved] = {}
        self.recorder.clear()

    # Verbs: compute.

    def forward(self, stage: int, microbatch: int) -> Waits:
        """F: run the stage on its arrived inputs; its outputs wait for their sends and local users."""
        table = self.spec.wiring.tables[stage]
        tickets = self._mailbox.awaited(False, table.forward_from, stage, microbatch)
        gathering = self._gathering.pop(stage, None)
        yield Wait([*tickets, *([] if gathering is None else [gathering])], Kind.FORWARD, stage, microbatch)
        if gathering is not None:
            self.state = {**self.state, **gathering.found()}
            self.recorder.note(Kind.UNSHARD, stage, 0, None, gathering.begun_ns, gathering.ended_ns)
        inputs: list[Tensor | None] = [None] * len(self.spec.stages[stage].inputs)
        for position, flat in table.batch:
            inputs[position] = self.step.batch[microbatch][flat]
        for source, positions in table.forward_from:
            self._mailbox.take((False, source, stage, microbatch), positions, inputs)
        filled = cast("list[Tensor]", inputs)  # the same list: the stage empties it
        outputs, saved = self._run(
            Kind.FORWARD, stage, microbatch, self._run_forward, stage, microbatch, filled
        )
        if saved is not None:
            self._saved[stage, microbatch] = saved
        for target, positions in table.forward_to:
            self._mailbox.put((False, stage, target, microbatch), [outputs[k] for k in positions])
        if table.loss is not None:
            self.step.losses[microbatch] = outputs[table.loss]
        for k in table.results:
            if self.step.keep_results or (stage, k) in self.step.kept:
                self.step.results.setdefault((stage, k), {})[microbatch] = outputs[k]

    def backward_input(self, stage: int, microbatch: int) -> Waits:
        """B: compute the gradients of the stage's inputs; keep what W needs."""
        yield self._wait_for_gradients(Kind.BACKWARD_INPUT, stage, microbatch)
        if self._is_void(wait=True):
            self._pass_gradients(stage, microbatch)
            return
        call = self.spec.stages[stage].run_backward_input
        saved, tangents = self._saved.pop((stage, microbatch)), self._tangents(stage, microbatch)
        grads, saved = self._run(Kind.BACKWARD_INPUT, stage, microbatch, call, saved, tangents)
        self._saved_for_weight[stage, microbatch] = saved
        self._put_gradients(stage, microbatch, grads)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        """W: compute the gradients of the stage's parameters and add them to the step's sums."""
        if self._is_void(wait=True):
            return
        call = self.spec.stages[stage].run_backward_weight
        saved = self._saved_for_weight.pop((stage, microbatch))
        grads = self._run(Kind.BACKWARD_WEIGHT, stage, microbatch, call, saved)
        self.sums.add(stage, microbatch, grads)

    def full_backward(self, stage: int, microbatch: int) -> Waits:
        """BW: B and W in one."""
        yield self._wait_for_gradients(Kind.FULL_BACKWARD, stage, microbatch)
        if self._is_void(wait=True):
            self._pass_gradients(stage, microbatch)
            return
        call = self.spec.stages[stage].run_full_backward
        saved, tangents = self._saved.pop((stage, microbatch)), self._tangents(stage, microbatch)
        grads, weights = self._run(Kind.FULL_BACKWARD, stage, microbatch, call, saved, tangents)
        self._put_gradients(stage, microbatch, grads)
        self.sums.add(stage, microbatch, weights)

    # Verbs: messages. They name the own stage, the microbatch, and the stage at the other end.

    def recv_forward(self, stage: int, microbatch: int, source: int) -> None:
        """Post the receive of an activation."""
        self._mailbox.post_recv((False, source, stage, microbatch))

    def recv_backward(self, stage: int, microbatch: int, source: int) -> None:
        """Post the receive of a gradient."""
        self._mailbox.post_recv((True, source, stage, microbatch))

    def send_forward(self, stage: int, microbatch: int, target: int) -> Waits:
        """Post the send of an activation; wait only while all send slots of the channel are taken."""
        return self._mailbox.send((False, stage, target, microbatch))

    def send_backward(self, stage: int, microbatch: int, target: int) -> Waits:
        """Post the send of a gradient; wait only while all send slots of the channel are taken."""
        return self._mailbox.send((True, stage, target, microbatch))

    def settle(self, under_way: int = 0) -> Waits:
        """Wait until all that was posted and not waited for has arrived, but for the newest ``under_way``."""
        return self._mailbox.settle(under_way)

    def settle_sends(self, under_way: int = 0) -> Waits:
        """Wait until the sends posted and not waited for have arrived, but for the newest ``under_way``."""
        return self._mailbox.settle_sends(under_way)

    # Verbs: gradients of a whole stage, and the end of a step.

    def reduce_grad(self, stage: int) -> None:
        """Begin to sum the stage's gradients over the replicas; the end of the step waits for the sums.

        Its last W has run. Tied parameters come later, when the stages that hold them have been summed. A
        stage without replicas has nothing to do, as in torch's runtime.
        """
        if not self.step.ends_sums or stage in self._reducing:
            return
        totals = self.sums.totals.get(stage, {})
        if self.sharded is not None and stage in self.sharded.stages:
            self._reducing[stage] = self.sharded.reduce(stage, totals)
            if stage in self._reshards_later:
                self.reshard(stage)
        if self.replicas is None:
            return
        own = {name: total for name, total in totals.items() if name not in self.spec.tied}
        self._reducing[stage] = self.replicas.start((stage, ""), own)
        totals.update(own)

    def unshard(self, stage: int) -> None:
        """Begin to gather the stage's parameters, for which its first F waits; nothing where it holds all."""
        if self.sharded is not None and stage in self.sharded.stages:
            self._gathering[stage] = self.sharded.unshard(stage)

    def reshard(self, stage: int) -> None:
        """Let the gathered parameters go once their gradients are summed; nothing where it holds all.

        torch's orders have RESHARD before REDUCE_GRAD. It then follows the sum, which needs them.
        """
        if self.sharded is None or stage not in self.sharded.stages:
            return
        if self.step.ends_sums and stage not in self._reducing:
            self._reshards_later.add(stage)
        else:
            self._resharding.append(self.sharded.reshard(stage))

    def wait_sent(self) -> Waits:
        """Wait until every message of this rank has arrived."""
        return self._mailbox.wait_sent()

    def reduce_gradients(self) -> Waits:
        """Sum per parameter name: own stages, tied parameters with their other holders, replicas."""
        stages = self.spec.placement.stages_of(self.index)
        for stage in stages:
            self.reduce_grad(stage)
        if self._resharding:
            yield Wait(self._resharding)
        if not self.step.ends_sums:
            return
        tickets: list[Ticket] = list(self._reducing.values())
        tied: dict[str, Tensor] = {}
        if self.sums.totals:  # else nothing was summed: the step is void, or trains nothing here
            tied = yield from sum_tied(self.spec, self.index, self.sums, self.state, self.channels)
            tickets += self._reduce_tied(tied)
        if tickets:
            yield Wait(tickets)
        for stage, reduced in self._reducing.items():
            if isinstance(reduced, ShardTicket):
                self.sums.totals[stage] = reduced.found()
            self.recorder.note(Kind.REDUCE_GRAD, stage, 0, None, reduced.begun_ns, reduced.ended_ns)
        for stage in stages:
            for name, total in self.sums.totals.get(stage, {}).items():
                if name not in self.spec.tied:
                    self.gradients[name] = total
        self.gradients.update(tied)

    def _reduce_tied(self, tied: dict[str, Tensor]) -> list[Ticket]:
        """Begin to sum tied gradients over the replicas, each by itself: all holders have the same bits."""
        tickets: list[Ticket] = []
        if self.replicas is None:
            return tickets
        for name in list(tied):
            alone = {name: tied[name]}
            tickets.append(self.replicas.start((self.spec.tied[name][0], name), alone))
            tied.update(alone)
        return tickets

    def check_finished(self) -> None:
        """Raise `PipelineError` if the finished step still holds anything: its order was incomplete."""
        held = [f"saved for B of {s}, {i}" for s, i in self._saved]
        held += [f"saved for W of {s}, {i}" for s, i in self._saved_for_weight]
        held += [f"message {key}" for key in self._mailbox.leftovers()]
        if held:
            raise PipelineError(
                f"the step ended with work left: {', '.join(held[:4])}", where=f"rank {self.index}"
            )

    def let_go(self) -> dict[str, Tensor]:
        """Return the step's gradients, and hold nothing of it from now on but its times."""
        gradients = self.gradients
        self.step, self.sums, self.gradients, self.state = Step(()), GradientSums(), {}, {}
        return gradients

    # What the verbs share.

    def _run(self, kind: Kind, stage: int, microbatch: int, call: Callable[[*Ts], T], *args: *Ts) -> T:
        self.running_since = time.monotonic()
        self.running = (kind, stage, microbatch)
        result = self.recorder.run(kind, stage, microbatch, call, *args)
        self.running = None
        return result

    def _run_forward(
        self, stage: int, microbatch: int, inputs: list[Tensor]
    ) -> tuple[list[Tensor], Saved | None]:
        """Run a stage; outputs of a void step are zeros, of which nobody uses more than the shapes."""
        runnable = self.spec.stages[stage]
        if self._is_void(wait=False):
            return [zeros_of(port) for port in runnable.outputs], None
        try:
            if stage not in self.spec.random_stages:
                return runnable.run_forward(self.state, inputs)
            seed = stream_seed(self.spec.seed, self.step.number, stage, self.step.first + microbatch)
            with stream(seed, self.device):
                return runnable.run_forward(self.state, inputs)
        except Exception:
            if not self._is_void(wait=True):  # values that do not count may be what it stumbled over
                raise
            return [zeros_of(port) for port in runnable.outputs], None

    def _is_void(self, *, wait: bool) -> bool:
        trial = self.step.trial
        return trial is not None and trial.void(wait)

    def _pass_gradients(self, stage: int, microbatch: int) -> None:
        """Take and give the messages of a backward of a void step, and nothing else."""
        self._saved.pop((stage, microbatch), None)
        self._tangents(stage, microbatch)
        inputs = self.spec.stages[stage].inputs
        grads = [zeros_of(port) if port.has_gradient else None for port in inputs]
        self._put_gradients(stage, microbatch, grads)

    def _wait_for_gradients(self, kind: Kind, stage: int, microbatch: int) -> Wait:
        sources = self.spec.wiring.tables[stage].backward_from
        return Wait(self._mailbox.awaited(True, sources, stage, microbatch), kind, stage, microbatch)

    def _tangents(self, stage: int, microbatch: int) -> list[Tensor | None]:
        """Gradient per output: sums over the stages that used it, later stages first, as autograd does."""
        table, outputs = self.spec.wiring.tables[stage], self.spec.stages[stage].outputs
        tangents: list[Tensor | None] = [None] * len(outputs)
        for target, positions in table.backward_from:
            self._mailbox.take((True, target, stage, microbatch), positions, tangents)
        if table.loss is not None and outputs[table.loss].has_gradient:
            port = outputs[table.loss]
            tangents[table.loss] = torch.full(
                port.shape, self.step.loss_scale, dtype=port.dtype, device=port.device
            )
        return tangents

    def _put_gradients(self, stage: int, microbatch: int, grads: list[Tensor | None]) -> None:
        for source, positions in self.spec.wiring.tables[stage].backward_to:
            tensors = cast("list[Tensor]", [grads[k] for k in positions])  # those ports have a gradient
            self._mailbox.put((True, stage, source, microbatch), tensors)
