"""A rank and the verbs that its program calls.

A rank holds what its stages need between actions: arrived messages, what F saves for B and B for W, outputs
on their way, gradient sums. Everything is dropped at its last use, so that what is held is what was planned.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.errors import PipelineError, ShapeError
from zbcompile.runtime.channels.channel import Channels, Key, Ticket, describe
from zbcompile.runtime.gradients import GradientSums, tied_holders
from zbcompile.runtime.randomness import stream, stream_seed
from zbcompile.runtime.recorder import Recorder
from zbcompile.runtime.wire_format import WireFormat
from zbcompile.runtime.wiring import RunnableStage, Wiring
from zbcompile.schedule.ir import Kind, Placement

__all__ = ["Rank", "PipelineSpec", "Step", "Wait", "Waits"]

Waits = Generator["Wait", None, None]


class Wait:
    """What a program yields: it goes on when all tickets are done. The action is what comes next."""

    __slots__ = ("kind", "microbatch", "stage", "tickets")

    def __init__(self, kind: Kind | None, stage: int, microbatch: int, tickets: Sequence[Ticket]) -> None:
        self.kind, self.stage, self.microbatch, self.tickets = kind, stage, microbatch, tickets

    def __str__(self) -> str:
        return (
            "the end of the step" if self.kind is None else f"{self.stage}{self.kind.letter}{self.microbatch}"
        )


@dataclass(frozen=True)
class PipelineSpec:
    """What all ranks of a pipeline share: stages, where they are, their wiring. Equal on all ranks.

    stages : all of them; a rank runs only its own and needs of the others no more than their ports.
    random_stages : those whose forward draws random numbers.
    one_communicator : the programs keep one global order of messages, for transports with a single queue.
    layouts : per kind of message (backward, source stage, target stage) the layout of its tensors.
    """

    stages: tuple[RunnableStage, ...]
    placement: Placement
    num_microbatches: int
    seed: int = 0
    random_stages: frozenset[int] = frozenset()
    one_communicator: bool = False
    wiring: Wiring = field(init=False)
    layouts: Mapping[tuple[bool, int, int], tuple[WireFormat, ...]] = field(init=False)
    tied: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        wiring = Wiring.of(self.stages)
        layouts = {key: tuple(map(WireFormat.of, ports)) for key, ports in wiring.ports.items()}
        object.__setattr__(self, "wiring", wiring)
        object.__setattr__(self, "layouts", layouts)
        object.__setattr__(self, "tied", tied_holders([stage.trainable for stage in self.stages]))


@dataclass
class Step:
    """One call of ``step``: its inputs and what comes out on one rank.

    batch : per microbatch, the flat list of tensor inputs. number : chooses the random streams.
    loss_scale : the gradient of each microbatch's loss. keep_results : whether outputs are wanted.
    losses : microbatch -> loss; results : (stage, output position) -> microbatch -> tensor.
    """

    batch: Sequence[Sequence[Tensor]]
    number: int = 0
    loss_scale: float = 1.0
    keep_results: bool = True
    losses: dict[int, Tensor] = field(default_factory=dict)
    results: dict[tuple[int, int], dict[int, Tensor]] = field(default_factory=dict)


class Rank:
    """One rank of a pipeline: the object that a program gets.

    state : parameters and buffers by name, as the stages ask for them.
    """

    def __init__(
        self,
        index: int,
        setup: PipelineSpec,
        state: Mapping[str, Tensor],
        transport: Channels,
        device: torch.device,
    ) -> None:
        self.index, self.setup, self.state, self.transport = index, setup, state, transport
        self.device = device
        self.recorder = Recorder(device)
        self.send_slots: int | None = None
        self._rank_of = setup.placement.rank_of
        self.begin(Step(()))

    def begin(self, step: Step, send_slots: int | None = None) -> None:
        """Start a step with nothing held; ``send_slots`` is the program's own constant."""
        self.step, self.send_slots = step, send_slots
        self.sums = GradientSums(self.setup.num_microbatches)
        self.gradients: dict[str, Tensor] = {}
        self.running: tuple[Kind, int, int] | None = None
        self.running_since = 0.0
        self._arriving: dict[Key, Ticket] = {}
        self._made: dict[Key, list[Tensor]] = {}
        self._saved: dict[tuple[int, int], list[Any]] = {}
        self._saved_for_weight: dict[tuple[int, int], list[Any]] = {}
        self._sent: dict[int, deque[tuple[Ticket, int]]] = {}
        self._unsettled: list[Ticket] = []
        self._unsettled_sends: list[Ticket] = []
        self.recorder.clear()

    # Verbs: compute.

    def forward(self, stage: int, microbatch: int) -> Waits:
        """F: run the stage on its arrived inputs; its outputs wait for their sends and local users."""
        table = self.setup.wiring.tables[stage]
        yield self._wait(Kind.FORWARD, stage, microbatch, False, table.forward_from)
        inputs: list[Any] = [None] * len(self.setup.stages[stage].inputs)
        for position, flat in table.batch:
            inputs[position] = self.step.batch[microbatch][flat]
        for source, positions in table.forward_from:
            self._take((False, source, stage, microbatch), positions, inputs)
        outputs, saved = self._run(
            Kind.FORWARD, stage, microbatch, self._run_forward, stage, microbatch, inputs
        )
        if saved is not None:
            self._saved[stage, microbatch] = saved
        for target, positions in table.forward_to:
            self._made[False, stage, target, microbatch] = [outputs[k] for k in positions]
        if table.loss is not None:
            self.step.losses[microbatch] = outputs[table.loss]
        if self.step.keep_results:
            for k in table.results:
                self.step.results.setdefault((stage, k), {})[microbatch] = outputs[k]

    def backward_input(self, stage: int, microbatch: int) -> Waits:
        """B: gradients of the stage's inputs; what W needs is kept."""
        table = self.setup.wiring.tables[stage]
        yield self._wait(Kind.BACKWARD_INPUT, stage, microbatch, True, table.backward_from)
        call = self.setup.stages[stage].run_backward_input
        saved, tangents = self._saved.pop((stage, microbatch)), self._tangents(stage, microbatch)
        grads, saved = self._run(Kind.BACKWARD_INPUT, stage, microbatch, call, saved, tangents)
        self._saved_for_weight[stage, microbatch] = saved
        self._return(stage, microbatch, grads)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        """W: gradients of the stage's parameters, added to the step's sums."""
        call = self.setup.stages[stage].run_backward_weight
        saved = self._saved_for_weight.pop((stage, microbatch))
        grads = self._run(Kind.BACKWARD_WEIGHT, stage, microbatch, call, saved)
        self.sums.add(stage, microbatch, grads)

    def full_backward(self, stage: int, microbatch: int) -> Waits:
        """BW: B and W in one."""
        table = self.setup.wiring.tables[stage]
        yield self._wait(Kind.FULL_BACKWARD, stage, microbatch, True, table.backward_from)
        call = self.setup.stages[stage].run_full_backward
        saved, tangents = self._saved.pop((stage, microbatch)), self._tangents(stage, microbatch)
        grads, weights = self._run(Kind.FULL_BACKWARD, stage, microbatch, call, saved, tangents)
        self._return(stage, microbatch, grads)
        self.sums.add(stage, microbatch, weights)

    # Verbs: messages. They name the own stage, the microbatch, and the stage at the other end.

    def recv_forward(self, stage: int, microbatch: int, source: int) -> None:
        """Post the receive of an activation."""
        self._post_recv((False, source, stage, microbatch))

    def recv_backward(self, stage: int, microbatch: int, source: int) -> None:
        """Post the receive of a gradient."""
        self._post_recv((True, source, stage, microbatch))

    def send_forward(self, stage: int, microbatch: int, target: int) -> Waits:
        """Post the send of an activation; waits only while all send slots of the channel are taken."""
        return self._send(Kind.SEND_F, (False, stage, target, microbatch))

    def send_backward(self, stage: int, microbatch: int, target: int) -> Waits:
        """Post the send of a gradient; waits only while all send slots of the channel are taken."""
        return self._send(Kind.SEND_B, (True, stage, target, microbatch))

    def settle(self) -> Waits:
        """Wait until all that was posted since the last settle has arrived (the transport ``batched``)."""
        self.transport.flush()
        tickets, self._unsettled, self._unsettled_sends = self._unsettled, [], []
        yield Wait(None, -1, -1, tickets)

    def settle_sends(self) -> Waits:
        """Wait until the sends posted since the last settle have arrived (the transport ``rendezvous``)."""
        tickets, self._unsettled, self._unsettled_sends = self._unsettled_sends, [], []
        yield Wait(None, -1, -1, tickets)

    def wait_sent(self) -> Waits:
        """Wait until every message of this rank has arrived."""
        self.transport.flush()
        for channel in self._sent.values():
            while channel:
                yield Wait(None, -1, -1, (channel[0][0],))
                self._note_send(*channel.popleft())

    def reduce_gradients(self) -> Waits:
        """Sums of the step per parameter name: own stages, then tied parameters with their other holders."""
        for stage in self.setup.placement.stages_of(self.index):
            for name, total in self.sums.totals.get(stage, {}).items():
                if name not in self.setup.tied:
                    self.gradients[name] = total
        if self.sums.totals:
            yield from self._sum_tied()

    # What the verbs share.

    def _wait(
        self, kind: Kind, stage: int, microbatch: int, backward: bool, sources: Sequence[tuple[int, Any]]
    ) -> Wait:
        me, rank_of = self.index, self._rank_of
        tickets = [
            self._arriving[backward, source, stage, microbatch]
            for source, _ in sources
            if rank_of[source] != me
        ]
        return Wait(kind, stage, microbatch, tickets)

    def _take(self, key: Key, positions: Sequence[int], into: list[Any]) -> None:
        ticket = self._arriving.pop(key, None)
        tensors = self._made.pop(key) if ticket is None else ticket.tensors()
        for position, tensor in zip(positions, tensors, strict=True):
            held = into[position]
            into[position] = tensor if held is None else held + tensor

    def _run(self, kind: Kind, stage: int, microbatch: int, call: Any, *args: Any) -> Any:
        self.running_since = time.monotonic()
        self.running = (kind, stage, microbatch)
        result = self.recorder.run(kind, stage, microbatch, call, *args)
        self.running = None
        return result

    def _run_forward(self, stage: int, microbatch: int, inputs: list[Any]) -> Any:
        run = self.setup.stages[stage].run_forward
        if stage not in self.setup.random_stages:
            return run(self.state, inputs)
        with stream(stream_seed(self.setup.seed, self.step.number, stage, microbatch), (self.device,)):
            return run(self.state, inputs)

    def _tangents(self, stage: int, microbatch: int) -> list[Tensor | None]:
        """Gradient per output: sums over the stages that used it, later stages first, as autograd does."""
        table, outputs = self.setup.wiring.tables[stage], self.setup.stages[stage].outputs
        tangents: list[Tensor | None] = [None] * len(outputs)
        for target, positions in table.backward_from:
            self._take((True, target, stage, microbatch), positions, tangents)
        if table.loss is not None and outputs[table.loss].has_gradient:
            port = outputs[table.loss]
            tangents[table.loss] = torch.full(
                port.shape, self.step.loss_scale, dtype=port.dtype, device=port.device
            )
        return tangents

    def _return(self, stage: int, microbatch: int, grads: list[Tensor | None]) -> None:
        for source, positions in self.setup.wiring.tables[stage].backward_to:
            tensors = [grads[k] for k in positions]
            self._made[True, stage, source, microbatch] = tensors  # type: ignore[assignment]

    def _post_recv(self, key: tuple[bool, int, int, int]) -> None:
        ticket = self.transport.post_recv(self._rank_of[key[1]], key, self.setup.layouts[key[:3]])
        self._arriving[key] = ticket
        self._unsettled.append(ticket)

    def _send(self, kind: Kind, key: tuple[bool, int, int, int]) -> Waits:
        peer = self._rank_of[key[2]]
        channel = self._sent.setdefault(peer, deque())
        if self.send_slots is not None and len(channel) >= self.send_slots:
            yield Wait(kind, key[1], key[3], (channel[0][0],))
            self._note_send(*channel.popleft())
        begin = time.perf_counter_ns()
        try:
            ticket = self.transport.post_send(peer, key, self.setup.layouts[key[:3]], self._made.pop(key))
        except ShapeError as error:
            error.where = f"rank {self.index}, {describe(key)}"
            raise
        channel.append((ticket, begin))
        self._unsettled.append(ticket)
        self._unsettled_sends.append(ticket)

    def _note_send(self, ticket: Ticket, begin: int) -> None:
        backward, stage, target, microbatch = ticket.key
        kind = Kind.SEND_B if backward else Kind.SEND_F
        self.recorder.note(kind, stage, microbatch, target, begin, time.perf_counter_ns())  # type: ignore[arg-type]

    def _sum_tied(self) -> Waits:
        """Exchange tied sums among the holders; all add them up in the order of the stages."""
        me, rank_of = self.index, self._rank_of
        arriving: dict[tuple[str, int], Ticket] = {}
        sending: list[Ticket] = []
        mine = [n for n, stages in self.setup.tied.items() if me in {rank_of[s] for s in stages}]
        for name in mine:
            stages = self.setup.tied[name]
            layout = (_parameter_layout(self.state[name]),)
            for stage in stages:
                key = ("tied", name, stage)
                others = sorted({rank_of[s] for s in stages} - {me})
                if rank_of[stage] != me:
                    arriving[name, stage] = self.transport.post_recv(rank_of[stage], key, layout)
                    continue
                total = self._own_total(stage, name)
                for peer in others:
                    sending.append(self.transport.post_send(peer, key, layout, [total]))
        self.transport.flush()
        yield Wait(None, -1, -1, [*arriving.values(), *sending])
        for name in mine:
            parts = [
                arriving[name, s].tensors()[0] if (name, s) in arriving else self._own_total(s, name)
                for s in self.setup.tied[name]
            ]
            total = parts[0].clone()
            for part in parts[1:]:
                total.add_(part)
            self.gradients[name] = total

    def _own_total(self, stage: int, name: str) -> Tensor:
        total = self.sums.totals.get(stage, {}).get(name)
        return torch.zeros_like(self.state[name]) if total is None else total


def _parameter_layout(parameter: Tensor) -> WireFormat:
    shape = tuple(parameter.shape)
    count = parameter.numel() * parameter.element_size()
    stride = torch.empty(shape, device="meta").stride()
    return WireFormat(shape, tuple(stride), parameter.dtype, parameter.device, count, True)


def leftovers(rank: Rank) -> list[str]:
    """What a finished step still holds; empty unless the order was incomplete."""
    held = [f"saved for B of {s}, {i}" for s, i in rank._saved]
    held += [f"saved for W of {s}, {i}" for s, i in rank._saved_for_weight]
    held += [f"message {key}" for key in (*rank._made, *rank._arriving)]
    return held


def check_finished(rank: Rank) -> None:
    """Refuse a step that left something behind. Raises `PipelineError`."""
    held = leftovers(rank)
    if held:
        raise PipelineError(
            f"the step ended with work left: {', '.join(held[:4])}", where=f"rank {rank.index}"
        )


def parameters_of(state: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """The parameters among a state."""
    return {name: value for name, value in state.items() if isinstance(value, nn.Parameter)}
