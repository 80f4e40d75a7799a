"""All ranks in one process: random orders give autograd's bits, memory is as planned, errors say where."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.support.other_send_modes import other_send_modes
from tests.support.pipeline_oracle import same
from tests.support.runtime_helpers import (
    chain_front,
    chain_reference,
    make_chain,
    problem_for,
    programs_for,
    random_case,
    reference,
    run_here,
)
from tests.support.strategies import greedy_order
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import PipelineError
from zbcompile.passes.lower.codegen import emit
from zbcompile.runtime.local_runner import LocalRunner
from zbcompile.runtime.mailbox import Mailbox
from zbcompile.runtime.wire_format import WireFormat
from zbcompile.runtime.wiring import Wiring
from zbcompile.schedule.check import check
from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule

ORDERS, CHUNKS = 1000, 8


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_legal_orders_are_proved_and_give_the_bits_of_autograd(chunk: int) -> None:
    for seed in range(chunk, ORDERS, CHUNKS):
        front, problem, schedule = random_case(seed, 6, (1, 2, 3, 6, 12))
        lowered = insert_communication(schedule, problem, Random(seed).choice((1, 2, 3)))
        check(lowered, problem)
        found = run_here(front, lowered, emit(lowered, problem))
        expected = chain_reference(problem.num_microbatches)
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            assert torch.equal(found[name], grad), (seed, name)


@pytest.mark.parametrize("seed", range(40))
def test_chosen_receive_depth_and_send_slots_finish(seed: int) -> None:
    front, problem, schedule = random_case(seed, 6, (3, 6))
    found = run_here(front, schedule, programs_for(schedule, problem))
    expected = chain_reference(problem.num_microbatches)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


@pytest.fixture
def _more_send_modes() -> Iterator[None]:
    with other_send_modes():
        yield


@pytest.mark.usefixtures("_more_send_modes")
@pytest.mark.parametrize("transport", ["rendezvous", "batched", "buffered", "drained"])
def test_other_send_modes_give_the_same_bits(transport: str) -> None:
    front = chain_front(3)
    problem = problem_for(front, Placement.linear(3), 4).with_(transport=transport)
    order = []
    for stage in range(3):
        row = [Action(Kind.FORWARD, stage, i) for i in range(3 - stage)]
        for i in range(4):
            row.append(Action(Kind.FULL_BACKWARD, stage, i))
            if 3 - stage + i < 4:
                row.append(Action(Kind.FORWARD, stage, 3 - stage + i))
        order.append(row)
    schedule = Schedule.of(problem.placement, 4, order)
    lowered = insert_communication(schedule, problem)
    check(lowered, problem)
    texts = emit(lowered, problem)
    assert any("settle" in text for text in texts)
    found = run_here(front, lowered, texts)
    assert all(torch.equal(found[name], grad) for name, grad in chain_reference(4).items())


def test_a_settle_leaves_the_newest_messages_under_way() -> None:
    """Two ranks; three sends and a receive between them, none of which has arrived."""
    tickets = [object() for _ in range(4)]
    wire = {(False, 0, 1): (), (True, 1, 0): ()}
    spec = SimpleNamespace(placement=Placement.linear(2), wire_formats=wire)
    for verb, expected in (("settle_sends", [[0, 1], [2]]), ("settle", [[0, 1, 2], [3]])):
        posted = iter(tickets)
        channels = SimpleNamespace(
            post_send=lambda *_, p=posted: next(p), post_recv=lambda *_, p=posted: next(p)
        )
        mailbox = Mailbox(0, cast("Any", spec), cast("Any", channels), cast("Any", None), None)
        for microbatch in range(3):
            mailbox.put((False, 0, 1, microbatch), [])
            assert list(mailbox.send((False, 0, 1, microbatch))) == []
        mailbox.post_recv((True, 1, 0, 0))
        waits = [wait for left in (1, 0) for wait in getattr(mailbox, verb)(left)]
        assert [[tickets.index(t) for t in wait.tickets] for wait in waits] == expected


def test_tied_parameters_get_the_sum_over_their_stages_once() -> None:
    model = make_chain(tied=True)
    x = torch.zeros(2, 4)
    front = build_stages(model, 3, (x,), target=x, loss_fn=torch.nn.functional.mse_loss)
    problem = problem_for(front, Placement.linear(3), 4)
    schedule = greedy_order(problem, Random(3))
    found = run_here(front, schedule, programs_for(schedule, problem))
    expected = reference(make_chain(tied=True), 4)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        # Two stages add their sums over microbatches; autograd adds both uses of a microbatch first.
        same(name, found[name], grad, exact=name != "blocks.1.weight")


def test_no_more_saved_values_live_than_planned() -> None:
    """At most as many microbatches have saved values alive as the order has between F and W."""
    front = chain_front(3)
    problem = problem_for(front, Placement.linear(3), 8)
    for seed in range(6):
        schedule = greedy_order(problem, Random(seed), fuse=0.5)
        most = [0, 0, 0]

        def watch(runner: LocalRunner, most: list[int] = most) -> None:
            stages = [_Counting(stage, most) for stage in runner.spec.stages]
            object.__setattr__(runner.spec, "stages", tuple(stages))

        run_here(front, schedule, programs_for(schedule, problem), watch)
        assert most == [_most_in_flight(row) for row in schedule.order]


def _most_in_flight(row: tuple[Action, ...]) -> int:
    held = most = 0
    for action in row:
        held += action.kind is Kind.FORWARD
        held -= action.kind in (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD)
        most = max(most, held)
    return most


class _Counting:
    """A stage whose forward saves copies, and counts the microbatches of which any copy is alive."""

    def __init__(self, stage: Any, most: list[int]) -> None:
        self.stage, self.most = stage, most
        self.alive: list[list[weakref.ref[Tensor]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage, name)

    def run_forward(self, state: Any, inputs: list[Tensor]) -> Any:
        outputs, saved = self.stage.run_forward(state, inputs)
        own = [k for k, t in enumerate(saved) if isinstance(t, Tensor) and t.dim() and t.shape[0] == 2]
        assert own
        for k in own:
            saved[k] = saved[k].clone()
        self.alive.append([weakref.ref(saved[k]) for k in own])
        count = sum(any(ref() is not None for ref in refs) for refs in self.alive)
        self.most[self.stage.index] = max(self.most[self.stage.index], count)
        return outputs, saved


def test_messages_in_another_order_than_the_receives_are_refused() -> None:
    front = chain_front(3)
    problem = problem_for(front, Placement.linear(3), 2)
    texts = list(programs_for(greedy_order(problem, Random(0)), problem))
    texts[1] = texts[1].replace("recv_forward(1, 0, 0)", "recv_forward(1, 9, 0)")
    with pytest.raises(PipelineError, match="mixed up"):
        run_here(front, greedy_order(problem, Random(0)), tuple(texts))


def test_a_deadlock_names_what_every_rank_waits_for() -> None:
    front = chain_front(3)
    problem = problem_for(front, Placement.linear(3), 1)
    schedule = greedy_order(problem, Random(0), fuse=1.0)
    texts = list(programs_for(schedule, problem))
    texts[0] = texts[0].replace("yield from rank.send_forward(0, 0, 1)", "pass")
    with pytest.raises(PipelineError) as caught:
        run_here(front, schedule, tuple(texts))
    message = str(caught.value)
    assert "deadlock" in message
    assert (
        "rank 1 at 1F0 waits for the activation of microbatch 0 from stage 0 to stage 1 (rank 0)" in message
    )
    assert "rank 2 at 2F0 waits for" in message


def test_an_error_in_a_stage_names_the_action_and_keeps_its_traceback() -> None:
    front = chain_front(3)
    problem = problem_for(front, Placement.linear(3), 2)
    schedule = greedy_order(problem, Random(0))

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(front.stages[1], name)

        def run_forward(self, state: Any, inputs: list[Tensor]) -> Any:
            raise ValueError("no such thing")

    def watch(runner: LocalRunner) -> None:
        stages = (front.stages[0], Broken(), front.stages[2])
        object.__setattr__(runner.spec, "stages", stages)

    with pytest.raises(
        PipelineError, match="no such thing .*rank 1, stage 1, microbatch 1, forward"
    ) as caught:
        run_here(front, schedule, programs_for(schedule, problem), watch)
    assert isinstance(caught.value.__cause__, ValueError)
    names = []
    frame = caught.value.__cause__.__traceback__
    while frame is not None:
        names.append(frame.tb_frame.f_code.co_filename)
        frame = frame.tb_next
    assert any(name.startswith("<program of rank 1") for name in names)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0).view(2, 3, 4)[:, 1:],
        torch.arange(4.0).expand(3, 4),
        torch.zeros(0, 4),
        torch.tensor(3.5),
        torch.randint(0, 9, (3, 2)),
        torch.tensor([True, False, True]),
        torch.randn(3, 2, dtype=torch.complex64),
        torch.randn(3, 2, dtype=torch.complex64).conj(),
        torch.randn(3, 2, dtype=torch.complex64).conj().imag,
        torch.randn(3, 2).to(torch.bfloat16).t(),
    ],
)
def test_any_tensor_survives_the_wire(tensor: Tensor) -> None:
    class Port:
        name, shape, stride = "x", tuple(tensor.shape), tensor.stride()
        dtype, device = tensor.dtype, tensor.device

    wire_format = WireFormat.of(Port())  # type: ignore[arg-type]
    packed, arrived = wire_format.pack(tensor), wire_format.buffer()
    for message in (packed, arrived):
        assert message.is_contiguous()
        assert not message.is_conj()
        assert not message.is_neg()
        assert message.numel() * message.element_size() == wire_format.num_bytes
    arrived.copy_(packed)
    back = wire_format.unpack(arrived)
    assert torch.equal(back, tensor)
    assert back.stride() == wire_format.stride


def test_both_ends_of_a_message_agree_on_its_tensors() -> None:
    front = chain_front(6)
    wiring = Wiring.of(front.stages)
    assert any(target > source + 1 for back, source, target in wiring.ports if not back), "no skip"
    for (backward, source, target), ports in wiring.ports.items():
        left, right = wiring.tables[source], wiring.tables[target]
        sent = dict(left.backward_to if backward else left.forward_to)[target]
        received = dict(right.backward_from if backward else right.forward_from)[source]
        assert len(ports) == len(sent) == len(received)
