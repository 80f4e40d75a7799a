"""What the processes of the gloo tests run. Importable, because the processes are started from nothing."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbcompile
from tests.support.hand_stages import hand_batch, hand_case, hand_reference, hand_stages, hand_state
from zbcompile.compiler.lower import lower
from zbcompile.errors import ZBCompileError
from zbcompile.passes.lower.codegen import emit
from zbcompile.passes.lower.insert_comm import insert_comm
from zbcompile.planner.imported import rated
from zbcompile.planner.plan import plan
from zbcompile.runtime.channels import gloo
from zbcompile.runtime.distributed_runner import DistributedRunner
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.sleeping import Sleeping, sleeping_stages
from zbcompile.runtime.spec import PipelineSpec, Step
from zbcompile.schedule.costs import Edge, Profile, StageCost
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.problem import Problem

NUM_RANKS, NUM_MICROBATCHES, NUM_STEPS = 4, 4, 3


def beginning(rank: int) -> dict[str, Any]:
    """Return what a process of the tests begins with."""
    random = torch.get_rng_state()
    torch.manual_seed(torch.default_generator.initial_seed())
    return {
        "warm": "tests.support.warm" in sys.modules,
        "drawn": not torch.equal(random, torch.get_rng_state()),
        "groups": dist.is_initialized(),
        "torch threads": torch.get_num_threads(),
    }


def one_f_one_b(num_microbatches: int = NUM_MICROBATCHES) -> Schedule:
    order = []
    for stage in range(NUM_RANKS):
        warm = min(NUM_RANKS - stage, num_microbatches)
        row = [Action(Kind.FORWARD, stage, i) for i in range(warm)]
        for i in range(num_microbatches):
            row.append(Action(Kind.FULL_BACKWARD, stage, i))
            if warm + i < num_microbatches:
                row.append(Action(Kind.FORWARD, stage, warm + i))
        order.append(row)
    return Schedule.of(Placement.linear(NUM_RANKS), num_microbatches, order)


def sleeping_profile(num_stages: int = NUM_RANKS) -> Profile:
    cost = StageCost.simple(3_000_000, 3_000_000, 2_000_000)
    return Profile((cost,) * num_stages, tuple(Edge(s, s + 1, 4096, 4096) for s in range(num_stages - 1)))


def plan_texts(schedule: Schedule, profile: Profile) -> tuple[Problem, Schedule, tuple[str, ...]]:
    problem = Problem.of(profile, schedule.placement, schedule.num_microbatches)
    lowered = lower(rated(schedule, problem), merge=False)
    return lowered.problem, lowered.schedule, lowered.programs()


class Faulty(Sleeping):
    """A sleeping stage that fails in the forward of microbatch 2 of the second step."""

    def __init__(self, index: int, profile: Profile, fault: str) -> None:
        super().__init__(index, profile, torch.device("cpu"))
        self.fault, self.calls = fault, 0

    def run_forward(self, state: Any, inputs: list[Any]) -> tuple[list[Tensor], list[Any]]:
        self.calls += 1
        if self.calls == NUM_MICROBATCHES + 3:
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "raising":
                raise ValueError("the loss went to the moon")
            if self.fault == "stalled":
                time.sleep(60)
            if self.fault == "shape":
                return [torch.zeros(7, 3, dtype=torch.uint8) for _ in self.outputs], []
        return super().run_forward(state, inputs)


def train(
    rank: int, fault: str, faulty_rank: int, limit_s: float, folder: str, large_bytes: int | None = None
) -> str:
    """Run three steps, of which one rank fails in the second; the number of finished steps goes to a file.

    Messages of ``large_bytes`` or more are sent by the channels' thread.
    """
    if large_bytes is not None:
        gloo._LARGE_BYTES = large_bytes
    schedule, profile = one_f_one_b(), sleeping_profile()
    bad = rank == faulty_rank
    problem, schedule, texts = plan_texts(schedule, profile)
    group = PipelineGroup(None, limit_s)
    counted = Path(folder) / f"steps-{rank}"
    counted.write_text("0")
    with group.calls.building("the test"):
        group.agree({"plan": str(schedule) + ("!" if bad and fault == "different" else "")})
    stages: tuple[Any, ...] = sleeping_stages(profile, torch.device("cpu"))
    if bad:
        stages = (*stages[:rank], Faulty(rank, profile, fault), *stages[rank + 1 :])
    spec = PipelineSpec(stages, schedule.placement, schedule.num_microbatches)
    runner = DistributedRunner(group, spec, texts[rank], torch.device("cpu"))
    for step in range(NUM_STEPS):
        runner.run(Step([[] for _ in range(NUM_MICROBATCHES)], step), {})
        counted.write_text(str(step + 1))
    runner.synchronize()
    runner.close()
    group.close()
    return "finished"


def random_orders(rank: int, seeds: list[int], large_bytes: int | None = None) -> int:
    """Run random legal orders of hand-made stages; gradients must have autograd's bits. Return how many ran.

    Messages of ``large_bytes`` or more are sent by the channels' thread.
    """
    if large_bytes is not None:
        gloo._LARGE_BYTES = large_bytes
    groups = {p: dist.new_group(list(range(p))) for p in range(2, dist.get_world_size() + 1)}
    pipelines = {}
    for p, group in groups.items():
        if rank < p:
            pipelines[p] = PipelineGroup(group, 60.0)
        else:
            # torch names a group by its members and by how many groups a process has: keep that equal.
            dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    ran = 0
    for seed in seeds:
        problem, schedule = hand_case(seed)
        p, count, m = problem.num_ranks, problem.num_stages, problem.num_microbatches
        if rank >= p:
            continue
        tied = seed % 3 == 0
        lowered = insert_comm(schedule, problem)
        texts = emit(lowered.schedule, problem, None, lowered.send_slots)
        spec = PipelineSpec(hand_stages(count, tied), problem.placement, m)
        runner = DistributedRunner(pipelines[p], spec, texts[rank], torch.device("cpu"))
        state = hand_state(count)
        sums = runner.run(Step(hand_batch(m)), state)
        expected = hand_reference(count, m, tied)
        names = {s.weight for s in spec.stages if problem.placement.rank_of[s.index] == rank}  # type: ignore[attr-defined]
        assert sums.keys() == names, (seed, sorted(sums), sorted(names))
        for name, total in sums.items():
            if tied and name == "w0":
                torch.testing.assert_close(total, expected[name], rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(total, expected[name]), (seed, name)
        runner.synchronize()
        runner.close()
        ran += 1
    return ran


def large_and_small(rank: int) -> list[int]:
    """Run two steps of a V whose channels carry large and small messages in turn; return each rank's F's."""
    large, small = gloo._LARGE_BYTES + 1, 64
    edges = (Edge(0, 1, large, small), Edge(1, 2, large, large), Edge(2, 3, small, small))
    costs = Profile((StageCost.simple(1_000_000, 1_000_000, 1_000_000, 2, 1),) * 4, edges)
    planned = lower(plan(Problem.of(costs, Placement.v(2), 6), time_limit_s=1.0), merge=True)
    spec = PipelineSpec(sleeping_stages(costs, torch.device("cpu")), planned.schedule.placement, 6)
    runner = DistributedRunner(PipelineGroup(None, 30.0), spec, planned.programs()[rank], torch.device("cpu"))
    for step in range(2):
        runner.run(Step([[] for _ in range(6)], step), {})
    runner.synchronize()
    ran = [len([a for a, _, _ in row if a.kind is Kind.FORWARD]) for row in runner.actions()]
    runner.close()
    return ran


def from_scratch(rank: int, name: str, num_steps: int) -> dict[str, Any]:
    """Train a model that every process compiles for itself, as under torchrun."""
    model, call, loss_fn = MODELS[name]()
    with zbcompile.compile(
        model, 4, loss_fn=loss_fn, num_microbatches=4, time_limit=0.5, profile=even_profile(), seed=7
    ) as pipeline:
        found = train_steps(pipeline, call, num_steps)
        pipeline.synchronize()
    return found


def inherited(rank: int, pipelines: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Train models that were compiled in the process that this one is a copy of."""
    found = {}
    group = PipelineGroup(None, 120.0)
    for name, (pipeline, call) in pipelines.items():
        built = pipeline._ready()
        with group.calls.building("the test"):
            built.run_on(group)
        found[name] = train_steps(pipeline, call, num_steps)
        pipeline.synchronize()
    return found


def train_steps(pipeline: zbcompile.Pipeline, call: dict[str, Any], num_steps: int) -> dict[str, Any]:
    pipeline.build(call.get("args", ()), call.get("kwargs", {}), call.get("target"))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05)
    losses: list[float] = []
    norms: list[float] = []
    gradients = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        step_losses: list[Tensor] = []
        pipeline.step(
            *call.get("args", ()), target=call.get("target"), losses=step_losses, **call.get("kwargs", {})
        )
        losses += [float(loss) for loss in step_losses]
        gradients.append({n: p.grad.clone() for n, p in pipeline.named_parameters() if p.grad is not None})
        norms.append(float(pipeline.clip_grad_norm_(0.1)))
        optimizer.step()
    buffers = dict(pipeline_buffers(pipeline))
    return {"losses": losses, "norms": norms, "gradients": gradients, "buffers": buffers}


def clipped_differently(rank: int) -> dict[str, Any]:
    """Clip by another norm on rank 2; then ask for the norms, on all alike."""
    model, call, loss_fn = _mlp()
    with zbcompile.compile(
        model, 4, loss_fn=loss_fn, num_microbatches=4, profile=even_profile(), time_limit=0.5
    ) as pipeline:
        pipeline.step(*call["args"], target=call["target"])
        before = {n: p.grad.clone() for n, p in pipeline.named_parameters() if p.grad is not None}
        try:
            pipeline.clip_grad_norm_(0.1, 1.0 if rank == 2 else 2.0)
        except ZBCompileError as error:
            refused = str(error)
        after = {n: p.grad for n, p in pipeline.named_parameters()}
        kept = all(torch.equal(grad, before[n]) for n, grad in after.items() if grad is not None)
        norms = {name: float(norm) for name, norm in pipeline.grad_norms(math.inf).items()}
        largest = float(pipeline.grad_norm(math.inf))
        pipeline.synchronize()
    return {"refused": refused, "kept": kept, "norms": norms, "largest": largest, "own": before}


def pipeline_buffers(pipeline: zbcompile.Pipeline) -> list[tuple[str, Tensor]]:
    return [(n, b.clone()) for stage in pipeline.local_stages for n, b in stage.named_buffers()]


def even_profile() -> Profile:
    stage = StageCost.simple(1_000_000, 1_000_000, 1_000_000, 1000, 500)
    return Profile((stage,) * 4)


def _mlp() -> tuple[nn.Module, dict[str, Any], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))])
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    return model, {"args": (x,), "target": y}, nn.functional.mse_loss


def _cnn() -> tuple[nn.Module, dict[str, Any], Any]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for k in range(4):
        layers += [nn.Conv2d(3 if k == 0 else 6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 25, 4))
    return model, {"args": (torch.randn(8, 3, 5, 5),), "target": torch.randn(8, 4)}, nn.functional.mse_loss


def _tokens() -> dict[str, Any]:
    ids = torch.randint(0, 61, (8, 12), generator=torch.Generator().manual_seed(1))
    return {"kwargs": {"input_ids": ids, "labels": ids}}


def _gpt2() -> tuple[nn.Module, dict[str, Any], Any]:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4,
        n_head=2,
        n_embd=16,
        vocab_size=61,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config), _tokens(), None


def _llama() -> tuple[nn.Module, dict[str, Any], Any]:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        num_attention_heads=2,
        hidden_size=16,
        intermediate_size=32,
        vocab_size=61,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), _tokens(), None


MODELS = {"mlp": _mlp, "cnn": _cnn, "gpt2": _gpt2, "llama": _llama}


def wrong_shape(rank: int, bad_rank: int) -> None:
    """Give a batch of another width in the second step, on one rank."""
    model, call, loss_fn = _mlp()
    pipeline = zbcompile.compile(
        model, 4, loss_fn=loss_fn, num_microbatches=4, profile=even_profile(), time_limit=0.5
    )
    (x,), y = call["args"], call["target"]
    pipeline.step(x, target=y)
    pipeline.step(x[:, :4] if rank == bad_rank else x, target=y)


def different_seed(rank: int) -> None:
    """Ask for another random seed on rank 2."""
    model, call, loss_fn = _mlp()
    zbcompile.compile(
        model,
        4,
        loss_fn=loss_fn,
        num_microbatches=4,
        profile=even_profile(),
        seed=int(rank == 2),
        example_args=call["args"],
        example_target=call["target"],
    )


def cramped(rank: int) -> None:
    """Ask for so little memory that rank 0 finds no order."""
    model, call, loss_fn = _mlp()
    zbcompile.compile(
        model,
        4,
        loss_fn=loss_fn,
        num_microbatches=4,
        profile=even_profile(),
        memory_limit=10,
        example_args=call["args"],
        example_target=call["target"],
    )


def evaluated(rank: int) -> Any:
    """Run a step, then an evaluation; return what this rank gets of both, and the measured timeline."""
    model, call, loss_fn = _mlp()
    (x,), y = call["args"], call["target"]
    with zbcompile.compile(
        model, 4, loss_fn=loss_fn, num_microbatches=4, profile=even_profile(), time_limit=0.5
    ) as pipeline:
        output = pipeline.step(x, target=y, return_outputs=True)
        measured = pipeline.timeline()
        found = pipeline.eval(x)
        pipeline.synchronize()
    return output, found, measured


OUT_OF_TURN = Schedule.parse(
    "placement 0 1\nmicrobatches 4\n"
    "rank 0: 0F0 0F1 0F2 0F3 0B0 0BW1 0BW2 0W0 0BW3\n"
    "rank 1: 1F0 1B0 1F1 1BW1 1F2 1B2 1F3 1BW3 1W0 1W2\n"
)
"""An order whose gradients wait for their turn in the sum, on both ranks."""


def summed_as_asked(rank: int, accumulate: str, **options: Any) -> list[dict[str, Tensor]]:
    """Return the gradients after each of three steps that keep them, the order's W's out of turn."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    x = torch.randn(3, 12, 8)
    options = {"schedule": OUT_OF_TURN, "accumulate": accumulate, "split_points": ["2"], **options}
    found = []
    with zbcompile.compile(
        model, 2, loss_fn=nn.functional.mse_loss, num_microbatches=4, **options
    ) as pipeline:
        for batch in x:
            pipeline.step(batch, target=batch)
            found.append({name: p.grad.clone() for name, p in pipeline.named_parameters()})
        pipeline.eval(x[0])
        pipeline.synchronize()
    return found
