"""What was planned against what runs, and beside torch.distributed.pipelining, all in one run.

    python benchmarks/runtime.py [planned] [beside] [host] [gpt] [replan] [faults] [--quick]

planned  sleeping stages over gloo: measured over planned makespan, before and after calibration
beside   the schedules of torch and ours on the same sleeping stages, with the memory each holds
host     the same order through torch's runtime and ours: host time per action
gpt      a small GPT on two ranks: seconds per step
replan   a link becomes slow, the order is planned again: measured steps before and after
faults   a rank killed, raising, stalled, of another plan: named on all ranks within 10 s, 20 runs each
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.runtime_modules import Gpt, SleepingModule
from benchmarks.slow_link import slow_down
from zbcompile.compiler.lower import LoweredPlan, lower
from zbcompile.compiler.rehearsal import rehearse
from zbcompile.compiler.replan import planned_anew, weighed
from zbcompile.errors import ZBCompileError
from zbcompile.formats import profile_json, torch_csv
from zbcompile.formats.measured_json import Measured
from zbcompile.planner.imported import rated
from zbcompile.planner.plan import plan
from zbcompile.runtime.distributed_runner import DistributedRunner
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.launch import spawn, spawn_outcomes
from zbcompile.runtime.sleeping import sleeping_stages
from zbcompile.runtime.spec import PipelineSpec, Step
from zbcompile.schedule.check import check
from zbcompile.schedule.costs import Edge, Link, Profile, StageCost
from zbcompile.schedule.ir import Action, Kind, Placement, Schedule
from zbcompile.schedule.memory import memory_peaks
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate

MS = 1_000_000
LINK = Link(100_000, 2_000_000_000)
"""What a plan for two processes of one machine would assume: 0.1 ms and 2 GB/s."""
TORCH = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
ROUNDS, STEPS = 3, 5
SLOW = (3, 4)
PROFILES = Path(__file__).resolve().parent.parent / "examples" / "profiles"


def profile(f: int, b: int, w: int, stages: int, size: int, divide: int = 1) -> Profile:
    """Equal stages of F, B, W in ms; with ``divide`` each is that many times smaller, in time and memory."""
    cost = StageCost.simple(f * MS // divide, b * MS // divide, w * MS // divide, 120 // divide, 60 // divide)
    edges = tuple(Edge(s, s + 1, size, size) for s in range(stages - 1))
    return Profile((cost,) * stages, edges, LINK)


def planned_against_measured(quick: bool) -> None:
    """Table 1."""
    print("\nplanned against measured: gloo, sleeping F = B = W = 20 ms, m = 2p, best of 3 steps")
    print(
        f"{'p':>2} {'message':>9} {'planned ms':>10} {'measured ms':>11} {'over':>7} {'calibrated':>10}"
        "  host us, latency us"
    )
    for ranks in (4,) if quick else (4, 8):
        for size in (4 << 10, 2 << 20):
            problem = Problem.of(profile(20, 20, 20, ranks, size), None, 2 * ranks)
            planned = lower(plan(problem, time_limit_s=3.0), merge=True)
            found = rehearse(planned.solution, steps=ROUNDS)
            assert found is not None
            print(
                f"{ranks:>2} {size >> 10:>6} KB {found.planned_ns / MS:>10.1f} "
                f"{found.measured_ns / MS:>11.1f} "
                f"{100 * found.excess:>6.2f}% {100 * found.excess_calibrated:>9.2f}%  "
                f"{found.calibrated.overhead_ns / 1000:.0f}, {found.calibrated.link.latency_ns / 1000:.0f}",
                flush=True,
            )


def torch_steps(
    rank: int, text: str, form: str, rank_of: tuple[int, ...], costs: Profile, count: int
) -> list[tuple[float, float]]:
    """Per step of a CSV in torch's runtime: seconds from a meeting of all ranks to the last one's end, and
    the most CPU seconds of one rank."""
    device, size = torch.device("cpu"), max(1, costs.edges[0].forward_bytes // 4)
    own = [s for s, r in enumerate(rank_of) if r == rank]
    stages = [PipelineStage(SleepingModule(costs.stages[s]), s, len(rank_of), device) for s in own]
    runtime = _PipelineScheduleRuntime(
        stages, count, loss_fn=lambda y, t: y.sum() + t.sum(), scale_grads=False
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(text)
        runtime._load_csv(str(path), format=form)
    x, target = torch.zeros(count, size, requires_grad=True), torch.zeros(count, 1)
    found = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        begin, used = time.perf_counter(), time.process_time()
        args: tuple[Any, ...] = (x,) if rank_of[0] == rank else ()
        runtime.step(*args, target=target if rank_of[-1] == rank else None)
        used = time.process_time() - used
        found.append((_latest(time.perf_counter() - begin), _latest(used)))
    return found[1:]


def our_steps(
    rank: int, schedule: Schedule, costs: Profile, texts: tuple[str, ...]
) -> list[tuple[float, float]]:
    """The same for our runtime."""
    device = torch.device("cpu")
    setup = PipelineSpec(sleeping_stages(costs, device), schedule.placement, schedule.num_microbatches)
    runner = DistributedRunner(PipelineGroup(None, 60.0), setup, texts[rank], device)
    found = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        begin, used = time.perf_counter(), time.process_time()
        runner.run(Step([[] for _ in range(schedule.num_microbatches)]), {})
        used = time.process_time() - used
        found.append((_latest(time.perf_counter() - begin), _latest(used)))
    runner.close()
    runner.group.close()
    return found[1:]


def _latest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def torch_csv_of(name: str, ranks: int, count: int) -> str:
    """A schedule of torch as CSV. Its 1F1B has no usable order (the last rank's begins with microbatch 1)."""
    if name == "1F1B":
        return torch_csv.dumps(_one_f_one_b(ranks, count))
    rows = get_schedule_ops(name, ranks, count)
    return "".join(",".join("" if a is None else str(a) for a in row) + "\n" for row in rows)


def _one_f_one_b(ranks: int, count: int) -> Schedule:
    order = []
    for stage in range(ranks):
        warm = min(ranks - stage, count)
        row = [Action(Kind.FORWARD, stage, i) for i in range(warm)]
        for i in range(count):
            row.append(Action(Kind.FULL_BACKWARD, stage, i))
            if warm + i < count:
                row.append(Action(Kind.FORWARD, stage, warm + i))
        order.append(row)
    return Schedule.of(Placement.linear(ranks), count, order)


def our_plan(costs: Profile, ranks: int, count: int, cap: int, placement: str, seconds: float) -> LoweredPlan:
    where = Placement.named(placement, ranks, costs.num_stages // ranks)
    problem = Problem.of(costs, where, count, cap, "makespan")
    return lower(plan(problem, time_limit_s=seconds), merge=True)


def beside_torch(quick: bool) -> None:
    """Table 2: makespan of one step."""
    shapes = [(p, 2 * p, times) for p in (4, 8) for times in ((20, 20, 20), (20, 30, 10))]
    for ranks, count, (f, b, w) in shapes[:2] if quick else shapes:
        print(
            f"\nbeside torch: p = {ranks}, m = {count}, F : B : W = {f} : {b} : {w} ms, "
            f"64 KB messages, best of {ROUNDS}"
        )
        print(f"{'schedule':<28} {'stages':>6} {'memory (M_B)':>12} {'planned ms':>10} {'measured ms':>11}")
        size = 64 << 10
        one, two = profile(f, b, w, ranks, size), profile(f, b, w, 2 * ranks, size, 2)
        peaks = {}
        for name in TORCH:
            text = torch_csv_of(name, ranks, count)
            schedule = torch_csv.loads(text).schedule
            costs = one if schedule.num_stages == ranks else two
            problem = Problem.of(costs, schedule.placement, count, objective="makespan")
            check(schedule, problem)
            peaks[name] = max(memory_peaks(schedule, problem))
            plan_ms = simulate(schedule, problem).makespan_ns / MS
            args = (text, "compute_only", schedule.placement.rank_of, costs, count)
            best = min(spawn(torch_steps, ranks, args, timeout_s=300)[0])[0]
            _line(f"torch {name}", schedule.num_stages, peaks[name], plan_ms, best)
        for title, cap in (("memory of 1F1B", peaks["1F1B"]), ("memory of ZBV", peaks["ZBVZeroBubble"])):
            for costs, placement in ((one, "linear"), (two, "v"), (two, "looped")):
                try:
                    ours = our_plan(costs, ranks, count, cap, placement, 5.0 if quick else 15.0)
                except ZBCompileError as error:
                    print(f"ours, {placement}, {title}: {error.what}")
                    continue
                peak = max(memory_peaks(ours.schedule, ours.problem))
                args = (ours.schedule, costs, ours.programs())
                best = min(spawn(our_steps, ranks, args, timeout_s=300)[0])[0]
                value = simulate(ours.schedule, ours.problem).makespan_ns / MS
                _line(f"ours {placement}, {title}", costs.num_stages, peak, value, best)


def _line(name: str, stages: int, peak: int, plan_ms: float, seconds: float) -> None:
    print(f"{name:<28} {stages:>6} {peak / 120:>12.2f} {plan_ms:>10.1f} {1000 * seconds:>11.1f}", flush=True)


def host_time(quick: bool) -> None:
    """Table 3: the same 1F1B order with 4 ms actions; what exceeds the plan, per action of the busiest."""
    print("\nhost time per action: one 1F1B order, p = 4, m = 32, F = 4 ms, BW = 8 ms, 4 KB messages")
    ranks, count = 4, 8 if quick else 32
    text = torch_csv_of("1F1B", ranks, count)
    schedule = torch_csv.loads(text).schedule
    costs = profile(4, 4, 4, ranks, 4 << 10)
    problem = Problem.of(costs, schedule.placement, count, objective="makespan")
    free = simulate(schedule, problem.with_(profile=profile_without_link(costs))).makespan_ns
    lowered = lower(rated(schedule, problem), merge=False)
    actions = max(len(row) for row in schedule.order)
    args = (text, "compute_only", schedule.placement.rank_of, costs, count)
    theirs = spawn(torch_steps, ranks, args, timeout_s=300)[0]
    ours = spawn(our_steps, ranks, (lowered.schedule, costs, lowered.programs()), timeout_s=300)[0]
    for name, steps in (("torch", theirs), ("ours", ours)):
        seconds, used = (min(step[k] for step in steps) for k in range(2))
        excess = (seconds * 1e9 - free) / actions / 1000
        print(
            f"{name:<6} step {1000 * seconds:8.2f} ms, planned {free / MS:.1f} ms: "
            f"{excess:6.0f} us per action; CPU time {1e6 * used / actions:6.0f} us per action",
            flush=True,
        )


def profile_without_link(costs: Profile) -> Profile:
    return Profile(costs.stages, costs.edges, Link())


def _gpt_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _gpt_data(count: int) -> Tensor:
    return torch.randint(0, 2048, (2 * count, 128), generator=torch.Generator().manual_seed(1))


def gpt_ours(rank: int, count: int) -> list[float]:
    """Seconds per step of our pipeline; rank 0 measures and plans."""
    import zbcompile

    torch.manual_seed(0)
    ids = _gpt_data(count)
    with zbcompile.compile(
        Gpt(),
        2,
        loss_fn=_gpt_loss,
        num_microbatches=count,
        example_args=(ids,),
        example_target=ids,
        split_points=["blocks.3"],
        time_limit=5.0,
    ) as pipeline:
        return _timed_steps(lambda: pipeline.step(ids, target=ids))


def gpt_torch(rank: int, count: int) -> list[float]:
    """The same model, cut at the same block, with torch's 1F1B."""
    torch.manual_seed(0)
    model, ids = Gpt(), _gpt_data(count)
    parts = [nn.Sequential(model.embed, *model.blocks[:3]), nn.Sequential(*model.blocks[3:], model.head)]
    stage = PipelineStage(parts[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, count, loss_fn=_gpt_loss)
    if rank == 0:
        return _timed_steps(lambda: schedule.step(ids))
    return _timed_steps(lambda: schedule.step(target=ids))


def _timed_steps(step: Any) -> list[float]:
    found = []
    for _ in range(ROUNDS + 2):
        dist.barrier()
        begin = time.perf_counter()
        step()
        found.append(_latest(time.perf_counter() - begin))
    return found[2:]


def small_gpt(quick: bool) -> None:
    """Table 4."""
    count = 4 if quick else 8
    print(
        f"\na small GPT (hidden 256, 6 blocks) on 2 ranks, m = {count}, "
        "one thread each: best seconds per step"
    )
    for name, function in (("torch 1F1B", gpt_torch), ("ours", gpt_ours)):
        print(f"{name:<12} {min(spawn(function, 2, (count,), timeout_s=400)[0]):.3f}", flush=True)


def faults(quick: bool) -> None:
    """Table 5: every survivor's seconds from the fault to its end."""
    from tests.support.gloo_workers import NUM_RANKS, train

    runs, limit = (2 if quick else 20), 2.0
    print(
        f"\nfaults: {runs} runs each, stall limit {limit} s, 4 ranks; seconds from the first end to the last"
    )
    for fault in ("killed", "raising", "stalled", "different"):
        named, seconds = 0, []
        for turn in range(runs):
            bad = turn % NUM_RANKS
            with tempfile.TemporaryDirectory() as folder:
                outcomes = spawn_outcomes(train, NUM_RANKS, (fault, bad, limit, folder), timeout_s=120)
            living = [o for o in outcomes if o.error is not None]
            errors = {o.error.rpartition("PipelineError: ")[2] for o in living if o.error is not None}
            alive = NUM_RANKS - (fault == "killed")
            right = len(living) == alive and len(errors) == 1 and f"rank {bad}" in "".join(errors)
            named += right and all(o.exit_code not in (0, None) for o in outcomes)
            seconds.append(max(o.seconds for o in outcomes) - min(o.seconds for o in outcomes))
        print(
            f"{fault:<10} named on all ranks {named} of {runs}; "
            f"spread {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s",
            flush=True,
        )


def slow_steps(
    rank: int, schedule: Schedule, costs: Profile, texts: tuple[str, ...], delay_s: float
) -> tuple[float, Measured]:
    """Steps back to back over a slow link, the best round: seconds of one, and the times of the last."""
    slow_down(*SLOW, delay_s)
    device = torch.device("cpu")
    setup = PipelineSpec(sleeping_stages(costs, device), schedule.placement, schedule.num_microbatches)
    runner = DistributedRunner(PipelineGroup(None, 60.0), setup, texts[rank], device)
    batch: list[list[Tensor]] = [[] for _ in range(schedule.num_microbatches)]
    runner.run(Step(batch), {})
    found = []
    for _ in range(ROUNDS):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(STEPS):
            runner.run(Step(batch), {})
        seconds = _latest(time.perf_counter() - begin) / STEPS
        found.append((seconds, Measured.of(runner.actions(), "rehearsed")))
    runner.close()
    runner.group.close()
    return min(found, key=lambda round: round[0])


def shortened(costs: Profile, divide: int) -> Profile:
    """A profile with all times divided."""
    stages = tuple(
        replace(
            s,
            forward_ns=s.forward_ns // divide,
            backward_input_ns=s.backward_input_ns // divide,
            backward_weight_ns=s.backward_weight_ns // divide,
            full_backward_ns=s.full_backward_ns // divide,
        )
        for s in costs.stages
    )
    return replace(costs, stages=stages, link=replace(costs.link, latency_ns=costs.link.latency_ns // divide))


def replanned(quick: bool) -> None:
    """Table 6: one link becomes slower than it was planned for; the order is planned again from a step."""
    print(
        "\nreplan: the published 1.5B profile, p = 8, m = 24, cap 1.5p; the link between ranks "
        f"{SLOW[0]} and {SLOW[1]} slowed in both directions; {STEPS} steps back to back, best of {ROUNDS}"
    )
    print("times  slowed by | planned anew from a step | measured, ms: before, after, shorter")
    published = profile_json.loads((PROFILES / "gpt-1.5b-p8-m24.json").read_text()).profile
    for divide in (5,) if quick else (5, 1):
        costs = shortened(published, divide)
        cap = [12 * s.saved_bytes + s.static_bytes for s in costs.stages]
        running = lower(plan(Problem.of(costs, None, 24, cap), time_limit_s=5.0), merge=True)
        for delay_ms in (15 // divide, 30 // divide):
            args = (running.schedule, costs, running.programs(), delay_ms / 1000)
            before, measured = spawn(slow_steps, 8, args, timeout_s=200)[0]
            solution = planned_anew(running, measured, links=True, time_limit_s=5.0, seed=0)
            found = lower(solution, merge=True)
            result = weighed(running, found, 0.02)
            args = (found.schedule, costs, found.programs(), delay_ms / 1000)
            after, _ = spawn(slow_steps, 8, args, timeout_s=200)[0]
            slow = found.problem.profile.link_between(*SLOW)
            print(
                f"  / {divide} {delay_ms:>6} ms | {result.old_ns / MS:.1f} -> {result.new_ns / MS:.1f} ms, "
                f"bound {result.bound_ns / MS:.1f}, link {slow.latency_ns / MS:.2f} ms | "
                f"{1000 * before:.1f} {1000 * after:.1f} {100 * (1 - after / before):.1f} %",
                flush=True,
            )


TABLES = {
    "planned": planned_against_measured,
    "beside": beside_torch,
    "host": host_time,
    "gpt": small_gpt,
    "faults": faults,
    "replan": replanned,
}


def main() -> None:
    """Run the tables that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], default=[])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and runs")
    args = parser.parse_args()
    print(f"torch {torch.__version__}")
    for name in args.tables or TABLES:
        TABLES[name](args.quick)


if __name__ == "__main__":
    main()
