"""Reductions of gradients that a step exposes, planned without them and planned with them (simulated).

The published 14.6B profile, p = 16, m = 48, with 8 replicas. Of 14.6e9 parameters a rank has a sixteenth;
their gradients are reduced in fp32 by a ring over the 8 replicas: 2 x 7/8 of the bytes pass each GPU, at
25 GB/s (one port of 200 Gbit/s). With two stages per rank each stage has half of it.
"""

from __future__ import annotations

from dataclasses import replace

from zbcompile.planner.plan import plan
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import Timeline, simulate

__all__ = ["main", "reduction_ns"]

_PARAMETERS = 14_600_000_000
_REPLICAS = 8
_BYTES_PER_SECOND = 25_000_000_000
_LEVEL = 1


def reduction_ns(stages: int) -> int:
    """Time of one stage's reduction where the model is cut into so many equal stages."""
    gradient_bytes = 4 * _PARAMETERS // stages
    passed = 2 * (_REPLICAS - 1) * gradient_bytes // _REPLICAS
    return passed * 1_000_000_000 // _BYTES_PER_SECOND


def problem(row: dict[str, int], placement: Placement) -> Problem:
    """The published profile with its stages in equal parts, at 1p (looped: Megatron's cap), no reductions."""
    p, parts = placement.num_ranks, placement.num_stages // placement.num_ranks
    times = (row["forward_us"], row["backward_input_us"], row["backward_weight_us"])
    stage = StageCost.simple(
        *(time * 1000 // parts for time in times), row["saved_units"], row["saved_for_weight_units"]
    )
    profile = Profile.uniform(stage, placement.num_stages, row["comm_us"] * 1000)
    held = 2 * (p - 1) + (parts - 1) * p + 1 if placement.name == "looped" else parts * p
    return Problem.of(profile, placement, row["num_microbatches"], held * row["saved_units"])


def _exposed(timeline: Timeline) -> str:
    times = [timeline.exposed_ns(rank) / 1e6 for rank in range(timeline.schedule.num_ranks)]
    return f"{min(times):7.1f} to {max(times):6.1f}"


def main(row: dict[str, int]) -> None:
    """Print a line per placement: span and exposed reductions, without and with planning."""
    p = row["num_ranks"]
    print(f"{'row':8} {'order of a step without':>35} {'planned with reductions':>35}")
    for placement in (Placement.linear(p), Placement.v(p), Placement.looped(p)):
        line(row, placement)


def line(row: dict[str, int], placement: Placement) -> None:
    """Print one line."""
    plain = problem(row, placement)
    reduce_ns = reduction_ns(placement.num_stages)
    stages = tuple(replace(stage, reduce_ns=reduce_ns) for stage in plain.profile.stages)
    whole = plain.with_(profile=replace(plain.profile, stages=stages))
    before, after = (plan(q, level=_LEVEL, time_limit_s=600.0) for q in (plain, whole))
    old, new = (simulate(found.schedule, whole) for found in (before, after))
    certificate = after.certificate
    print(
        f"{placement.name:8} {old.value_ns / 1e6:9.3f} exposed {_exposed(old)}"
        f" {new.value_ns / 1e6:9.3f} exposed {_exposed(new)}"
        f"  {new.value_ns / old.value_ns - 1:+.2%}, bound {certificate.bound_ns / 1e6:.3f}"
        f" {certificate.method} {certificate.status}, {' > '.join(certificate.lineage)}",
        flush=True,
    )
