"""The lines that only a GPU reaches, with a fake of torch.cuda: names, calls and their order."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zbcompile
from tests.support.fake_cuda import FakePair, install
from zbcompile.runtime.channels import choice
from zbcompile.runtime.channels.nccl import NcclChannels
from zbcompile.runtime.randomness import generators_of, stream
from zbcompile.runtime.recorder import Recorder
from zbcompile.runtime.wire_format import WireFormat
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Kind, Placement
from zbcompile.selftest import machine, overlap
from zbcompile.selftest.settings import SIZES

CUDA = torch.device("cuda", 0)


class Group:
    """What the channels need of a pipeline's group, for a rank of two."""

    size = 2

    def __init__(self, rank: int, pairs: dict[tuple[int, int], FakePair], devices: list[str]) -> None:
        self.rank = self.pipeline_rank = rank
        self.pipeline = [0, 1]
        self._pairs, self._devices = pairs, devices

    def new_pair(self, backend: str, source: int, target: int) -> Any:
        assert backend == "nccl"
        return self._pairs.setdefault((source, target), FakePair()).end(self.rank)

    def new_pipeline_group(self, backend: str) -> Any:
        return self._pairs.setdefault((0, 0), FakePair()).end(self.rank)

    def gather(self, text: str, what: str) -> list[str]:
        assert text in self._devices
        return self._devices


def spec(**more: Any) -> Any:
    """Return the part of a pipeline of two stages that makes channels."""
    forms = {(False, 0, 1): (), (True, 1, 0): ()}
    defaults: dict[str, Any] = {"wire_formats": forms, "tied": {}, "one_communicator": False}
    return SimpleNamespace(placement=Placement.linear(2), **{**defaults, **more})


@pytest.mark.parametrize("one", [False, True])
def test_messages_over_nccl_arrive_with_their_bits_and_strides(
    monkeypatch: pytest.MonkeyPatch, one: bool
) -> None:
    seen = install(monkeypatch)
    pairs: dict[tuple[int, int], FakePair] = {}
    asked = spec(one_communicator=one)
    device = torch.device("cpu")
    ends = [NcclChannels(Group(r, pairs, []), asked, device) for r in range(2)]  # type: ignore[arg-type]
    first = torch.randn(3, 4).t()
    second = torch.randn(5, dtype=torch.float64)
    forms = [WireFormat(tuple(t.shape), t.stride(), t.dtype, device, t.nbytes, True) for t in (first, second)]
    receive = ends[1].post_recv(0, (False, 0, 1, 0), forms)
    assert not receive.ready()
    send = ends[0].post_send(1, (False, 0, 1, 0), forms, [first, second])
    assert receive.ready()
    assert send.ready()
    receive.wait()
    send.wait()
    arrived = receive.tensors()
    assert torch.equal(arrived[0], first)
    assert arrived[0].stride() == first.stride()
    assert torch.equal(arrived[1], second)
    assert len(seen.recorded) >= 6  # each message's memory is held for the streams at both ends
    back = ends[0].post_recv(1, (True, 1, 0, 0), forms[1:])
    ends[1].post_send(0, (True, 1, 0, 0), forms[1:], [second])
    back.wait()
    for end in ends:
        end.close()
    assert all(pair.aborted for pair in pairs.values())


def test_ranks_that_share_a_gpu_get_gloo_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, devices=2)
    monkeypatch.setattr(choice, "GlooChannels", lambda group: "gloo")
    monkeypatch.setattr(choice, "NcclChannels", lambda group, spec, device: "nccl")
    shared = Group(0, {}, ["GPU-cuda:0", "GPU-cuda:0"])
    with pytest.warns(UserWarning, match="ranks 0, 1 share a GPU"):
        assert choice.make_channels(shared, spec(), CUDA) == "gloo"  # type: ignore[arg-type, comparison-overlap]
    own = Group(1, {}, ["GPU-cuda:0", "GPU-cuda:1"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = torch.device("cuda", 1)
        assert choice.make_channels(own, spec(), other) == "nccl"  # type: ignore[arg-type, comparison-overlap]
        cpu = torch.device("cpu")
        assert choice.make_channels(own, spec(), cpu) == "gloo"  # type: ignore[arg-type, comparison-overlap]


def test_times_are_events_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    recorder = Recorder(CUDA)
    recorder.clear()
    assert recorder.run(Kind.FORWARD, 0, 3, lambda: 7) == 7
    ((action, begin, end),) = recorder.actions()
    assert str(action) == "0F3"
    assert 0 < begin <= end


def test_both_generators_are_seeded_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    before = [generator.get_state() for generator in generators_of(CUDA)]
    assert len(before) == 2
    with stream(5, CUDA):
        drawn = [torch.rand(2, generator=generator) for generator in generators_of(CUDA)]
    assert torch.equal(*drawn)
    after = [generator.get_state() for generator in generators_of(CUDA)]
    assert all(map(torch.equal, before, after))


def test_the_machine_of_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = install(monkeypatch, devices=2)
    assert [machine.device_of("cuda", rank).index for rank in range(3)] == [0, 1, 1]
    assert machine.num_devices("cuda") == 2
    assert machine.bytes_in_use(CUDA) == 512
    assert machine.timed_ns(CUDA, lambda: None) >= 0
    assert seen.synchronized == 3
    machine.free_cached(CUDA)
    about = machine.versions("cuda")
    assert about["nccl"] == "2.28.9"
    assert about["device_name"] == "a fake"


def test_copies_and_compute_on_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = install(monkeypatch)
    monkeypatch.setattr(overlap, "device_of", lambda kind: torch.device("cpu"))
    found = overlap.copies_and_compute(0, replace(SIZES["tiny"], device="cuda"))
    assert found.verdict == "passed", found
    assert found.figures["message: bytes"] == 1 << 16
    assert len(set(map(id, seen.recorded))) == 2


def test_ranks_on_other_gpus_have_the_same_graphs() -> None:
    x = torch.randn(2, 4)
    profile = Profile((StageCost.simple(1, 1, 1),) * 2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    pipeline = zbcompile.compile(
        model, 2, example_args=(x,), example_target=x, loss_fn=torch.nn.functional.mse_loss, profile=profile
    )
    stage: Any = pipeline[0].compiled

    def on(device: torch.device) -> str:
        ports = tuple(replace(port, device=device) for port in stage.inputs)
        return str(replace(stage, inputs=ports).signature_hash())

    assert on(torch.device("cuda", 0)) == on(torch.device("cuda", 1))
    assert on(torch.device("cuda", 0)) != on(torch.device("cpu"))
