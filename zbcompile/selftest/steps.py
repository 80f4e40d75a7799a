"""Whole steps: planned against measured, and two ranks with a device each beside torch's own schedules."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbcompile.formats.fields import readable
from zbcompile.schedule.costs import StageCost
from zbcompile.schedule.ir import Kind
from zbcompile.selftest.machine import device_of, num_devices, settle, timed_ns
from zbcompile.selftest.models import LanguageModel, token_loss
from zbcompile.selftest.pipelines import MICROBATCHES, compare, compiled, copied, model_and_tokens
from zbcompile.selftest.settings import Found, Settings

__all__ = ["beside_torch", "planned_against_measured"]


def planned_against_measured(rank: int, settings: Settings) -> Found:
    """Run four stages in one process: what their measured costs predict of a step, and what it takes.

    All ranks take turns on one device, so a step is predicted to take the sum of all work.
    """
    found, device = Found(), device_of(settings.device)
    model, tokens = model_and_tokens("llama", settings.step_hidden, settings.step_length, device)
    with compiled(model, tokens, 4) as pipeline:
        planned = _work(pipeline.profile.stages)

        def step() -> None:
            pipeline.zero_grad()
            pipeline.step(tokens, target=tokens)

        step()
        taken = [timed_ns(device, step) for _ in range(settings.rounds)]
        measured = pipeline.timeline()
        busy = sum(map(measured.busy_ns, range(len(measured.ranks))))
        rows = [(a, end - start) for row in measured.ranks for a, start, end in row if a.kind.is_compute]
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD):
            values = [ns for action, ns in rows if action.kind is kind]
            if values:
                found.figures[f"{kind.letter}: median of measured ns"] = int(statistics.median(values))
    found.figures |= {
        "step: planned ns": planned,
        "step: measured ns": int(statistics.median(taken)),
        "step: measured over planned": round(statistics.median(taken) / planned, 4),
        "actions of the last step: ns": busy,
        "outside of actions: share of the last step": round(1 - busy / taken[-1], 4),
    }
    found.say(f"a step took {statistics.median(taken) / planned:.2f} of what its measured stages predict")
    return found


def _work(stages: Sequence[StageCost]) -> int:
    """Return the time of all F, B and W of a step."""
    return MICROBATCHES * sum(c.forward_ns + c.backward_input_ns + c.backward_weight_ns for c in stages)


def beside_torch(rank: int, settings: Settings) -> Found:
    """Run two ranks, each with its device, and steps of torch's 1F1B and ZBV in the same processes.

    A step counts from a meeting of the ranks to the end of the slower one. Gradients of ours are compared
    with autograd first. Where a schedule of torch fails, that is told, and does not count against ours.
    """
    if num_devices(settings.device) < 2:
        return Found.skipped("needs two devices")
    found, device = Found(), device_of(settings.device, rank)
    backend = "nccl" if settings.device == "cuda" else "gloo"
    group = dist.new_group(backend=backend)
    model, tokens = model_and_tokens("llama", settings.step_hidden, settings.step_length, device)
    other = copied(model)
    with compiled(model, tokens, 2) as pipeline:
        compare(found, f"{backend}, rank {rank}", pipeline, other, tokens)

        def ours() -> None:
            pipeline.zero_grad()
            pipeline.step(tokens, target=tokens)

        taken = statistics.median(_steps(ours, settings.rounds, device))
        measured = pipeline.timeline()
        found.figures |= {
            "ours: planned ns": pipeline.certificate.value_ns,
            "ours: measured makespan ns": measured.makespan_ns,
            "ours: measured bubble": round(measured.bubble, 4),
            "ours: ns": int(taken),
        }
        pipeline.synchronize()
    for name, v in (("torch 1F1B", False), ("torch ZBV", True)):
        try:
            step = _torch_step(rank, v, tokens, settings.step_hidden, device, group)
            theirs = statistics.median(_steps(step, settings.rounds, device))
        except Exception as error:
            found.figures[f"{name} failed"] = readable(f"{type(error).__name__}: {error}")
            found.say(f"{name} failed")
            break  # its connections are broken
        found.figures |= {f"{name}: ns": int(theirs), f"ours over {name}": round(taken / theirs, 4)}
    return found


def _steps(step: Callable[[], None], rounds: int, device: torch.device) -> list[int]:
    """Return the time of every step on the slower rank; two more go before."""
    taken = []
    for number in range(rounds + 2):
        settle(device)
        dist.barrier()
        begin = time.perf_counter_ns()
        step()
        settle(device)
        slower = torch.tensor([time.perf_counter_ns() - begin])
        dist.all_reduce(slower, op=dist.ReduceOp.MAX)
        if number >= 2:
            taken.append(int(slower))
    return taken


def _torch_step(
    rank: int, v: bool, tokens: Tensor, hidden: int, device: torch.device, group: dist.ProcessGroup
) -> Callable[[], None]:
    """Return what runs a step of torch's ZBV, two stages on each rank, or of its 1F1B, on this rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

    own = (rank, 3 - rank) if v else (rank,)
    total = 2 * len(own)
    torch.manual_seed(0)
    parts = _parts(LanguageModel("llama", 4, hidden), total)
    stages = [PipelineStage(parts[k].to(device), k, total, device, group=group) for k in own]
    schedule = (
        ScheduleZBVZeroBubble([*stages], MICROBATCHES, loss_fn=token_loss)
        if v
        else Schedule1F1B(stages[0], MICROBATCHES, loss_fn=token_loss)
    )
    args = (tokens,) if 0 in own else ()
    target = tokens if total - 1 in own else None

    def step() -> None:
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(*args, target=target)

    return step


def _parts(model: LanguageModel, count: int) -> list[nn.Module]:
    """Cut a model of four blocks into stages of equal numbers of blocks."""
    size = 4 // count
    cut: list[list[nn.Module]] = [list(model.blocks[k * size : (k + 1) * size]) for k in range(count)]
    cut[0].insert(0, model.embed)
    cut[-1] += [model.norm, model.head]
    return [nn.Sequential(*layers) for layers in cut]
