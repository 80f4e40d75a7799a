"""The problems on which parts of the planner are left out, one after the other."""

from __future__ import annotations

import random
from dataclasses import dataclass

from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import Problem

__all__ = ["ROWS", "Row"]

MODELS = {
    "unit": (1000, 1000, 1000, 0, 2, 1),
    "1.5B": (18522, 18086, 9337, 601, 201216, 73728),
    "6.2B": (29718, 29444, 19927, 527, 34, 16),
    "14.6B": (11347, 11248, 8132, 377, 378880, 163840),
}
"""F, B, W and latency in us, M_B and M_W of a stage; published profiles, but for the first."""


@dataclass(frozen=True, slots=True)
class Row:
    """One problem.

    Attributes
    ----------
    name
        Its name; the first word is its group.
    problem
        The problem.
    time_limit_s
        A limit that the counts of tries end well before, but for the row without time.
    """

    name: str
    problem: Problem
    time_limit_s: float = 600.0


def _stage(model: str) -> StageCost:
    forward, backward, weight, _, saved, pending = MODELS[model]
    return StageCost.simple(forward * 1000, backward * 1000, weight * 1000, saved, pending)


def _problem(
    model: str,
    placement: Placement,
    m: int,
    cap_in_p: float,
    objective: str = "span",
    transport: str = "async",
) -> Problem:
    """Return equal stages; the cap is the memory of so many times p microbatches of a rank's stages."""
    stages = placement.num_stages
    profile = Profile.uniform(_stage(model), stages, MODELS[model][3] * 1000)
    cap = int(MODELS[model][4] * stages * cap_in_p)
    return Problem.of(profile, placement, m, cap, objective, transport)


def _unequal(seed: int, placement: Placement, m: int, cap_in_p: float) -> Problem:
    """Return stages that differ by a quarter, the last one longer by two fifths."""
    rng, stages = random.Random(seed), []
    for s in range(placement.num_stages):
        factor = 1.4 if s == placement.num_stages - 1 else 1.0
        times = [int(t * factor * rng.uniform(0.75, 1.25) * 1000) for t in MODELS["1.5B"][:3]]
        stages.append(StageCost.simple(*times, 201216, 73728))
    cap = int(201216 * placement.num_stages * cap_in_p)
    return Problem.of(Profile(tuple(stages), link=Link(601_000)), placement, m, cap)


def _fused(m: int, cap: int, saves: float, latency_ns: int = 500) -> Problem:
    """Return stages whose BW takes less than B and W."""
    stage = StageCost(9_000, 9_000, 6_000, round(15_000 * (1 - saves)), 2, 1)
    return Problem.of(Profile.uniform(stage, 4, latency_ns), None, m, cap)


def _variants(model: str, m: int, cap_in_p: float) -> Problem:
    """Return stages that may hold 44 % less, with a B that takes 12 % longer."""
    forward, backward, weight, latency, saved, pending = MODELS[model]
    f, b, w, saved, pending = forward * 1000, backward * 1000, weight * 1000, saved * 100, pending * 100
    lean = StageCost.simple(f, b * 112 // 100, w, saved * 56 // 100, pending)
    stage = StageCost(f, b, w, b + w, saved, pending, variants=(lean,))
    return Problem.of(Profile.uniform(stage, 4, latency * 1000), None, m, int(saved * 4 * cap_in_p))


def _sizes(problem: Problem, seed: int) -> Problem:
    """Return the problem with microbatches of .5 to 1.5 times its times and bytes."""
    rng = random.Random(seed)
    sizes = [rng.uniform(0.5, 1.5) for _ in range(problem.num_microbatches)]
    return problem.with_(microbatch_costs=tuple(MicrobatchCost.of(size, size) for size in sizes))


LINE, V, LOOP = Placement.linear, Placement.v, Placement.looped

ROWS = (
    Row("paper 1.5B p=8 m=24 cap 2p", _problem("1.5B", LINE(8), 24, 2)),
    Row("paper 1.5B p=8 m=24 cap 1p makespan", _problem("1.5B", LINE(8), 24, 1, "makespan")),
    Row("paper 1.5B p=8 m=32 cap 1.5p", _problem("1.5B", LINE(8), 32, 1.5)),
    Row("paper 1.5B p=8 m=32 cap 2p makespan", _problem("1.5B", LINE(8), 32, 2, "makespan")),
    Row("paper 6.2B p=8 m=24 cap 1.25p makespan", _problem("6.2B", LINE(8), 24, 1.25, "makespan")),
    Row("paper 14.6B p=16 m=48 cap 2p", _problem("14.6B", LINE(16), 48, 2)),
    Row("paper 14.6B p=8 m=32 cap 1.5p makespan", _problem("14.6B", LINE(8), 32, 1.5, "makespan")),
    Row("starved unit p=4 m=8 cap 0.5p", _problem("unit", LINE(4), 8, 0.5)),
    Row("starved 1.5B p=4 m=8 cap 0.75p", _problem("1.5B", LINE(4), 8, 0.75)),
    Row("starved 1.5B p=4 m=8 cap 0.5p", _problem("1.5B", LINE(4), 8, 0.5)),
    Row("starved 6.2B p=4 m=12 cap 0.75p", _problem("6.2B", LINE(4), 12, 0.75)),
    Row("starved 1.5B p=6 m=10 cap 0.5p makespan", _problem("1.5B", LINE(6), 10, 0.5, "makespan")),
    Row("v unit p=4 m=20 cap 0.75p", _problem("unit", V(4), 20, 0.75)),
    Row("v 1.5B p=4 m=18 cap 1p", _problem("1.5B", V(4), 18, 1)),
    Row("v 1.5B p=4 m=20 cap 0.75p makespan", _problem("1.5B", V(4), 20, 0.75, "makespan")),
    Row("v 6.2B p=4 m=20 cap 0.75p", _problem("6.2B", V(4), 20, 0.75)),
    Row("v 6.2B p=4 m=20 cap 1p makespan", _problem("6.2B", V(4), 20, 1, "makespan")),
    Row("v 14.6B p=4 m=24 cap 0.5p", _problem("14.6B", V(4), 24, 0.5)),
    Row("v 1.5B p=7 m=10 cap 1p", _problem("1.5B", V(7), 10, 1)),
    Row("v 1.5B p=2 m=3 cap 1p", _problem("1.5B", V(2), 3, 1)),
    Row("v 1.5B p=3 m=144 cap 1p", _problem("1.5B", V(3), 144, 1)),
    Row("looped 1.5B p=4 m=20 cap 1.5p", _problem("1.5B", LOOP(4), 20, 1.5)),
    Row("looped 6.2B p=4 m=18 cap 1p", _problem("6.2B", LOOP(4), 18, 1)),
    Row("looped unit p=4 x 3 m=12 cap 1p", _problem("unit", LOOP(4, 3), 12, 1)),
    Row("looped 14.6B p=4 m=24 cap 1.25p makespan", _problem("14.6B", LOOP(4), 24, 1.25, "makespan")),
    Row("unequal 0 p=4 m=12 cap 1p", _unequal(0, LINE(4), 12, 1)),
    Row("unequal 1 p=8 m=24 cap 1.5p", _unequal(1, LINE(8), 24, 1.5)),
    Row("unequal 2 p=6 m=18 cap 2p", _unequal(2, LINE(6), 18, 2)),
    Row("unequal 3 v p=4 m=18 cap 1p", _unequal(3, V(4), 18, 1)),
    Row("unequal 4 contiguous p=4 m=18 cap 1p", _unequal(4, Placement((0, 0, 1, 1, 2, 2, 3, 3)), 18, 1)),
    Row("sends 1.5B p=4 m=36 cap 1p rendezvous", _problem("1.5B", LINE(4), 36, 1, transport="rendezvous")),
    Row("sends 6.2B p=4 m=36 cap 1p batched", _problem("6.2B", LINE(4), 36, 1, transport="batched")),
    Row("sends 1.5B v p=4 m=18 cap 1p rendezvous", _problem("1.5B", V(4), 18, 1, transport="rendezvous")),
    Row(
        "sends 6.2B looped p=4 m=18 cap 1.5p batched", _problem("6.2B", LOOP(4), 18, 1.5, transport="batched")
    ),
    Row("tight 1.5B v p=8 m=24 cap 0.5p (V-Min)", _problem("1.5B", V(8), 24, 0.5)),
    Row("tight 6.2B v p=4 m=16 cap 0.5p makespan", _problem("6.2B", V(4), 16, 0.5, "makespan")),
    Row("v 1.5B p=8 m=24 cap 0.625p (V-Half)", _problem("1.5B", V(8), 24, 0.625)),
    Row(
        "v 14.6B p=4 m=24 cap 1p ranks renumbered",
        _problem("14.6B", Placement((2, 0, 3, 1, 1, 3, 0, 2)), 24, 1),
    ),
    Row("looped 1.5B p=4 x 4 m=16 cap 1p", _problem("1.5B", LOOP(4, 4), 16, 1)),
    Row("unequal 5 looped p=4 m=16 cap 1p", _unequal(5, LOOP(4), 16, 1)),
    Row(
        "sends 1.5B looped p=4 m=16 cap 1p rendezvous",
        _problem("1.5B", LOOP(4), 16, 1, transport="rendezvous"),
    ),
    Row("sends 6.2B v p=4 m=16 cap 1p batched", _problem("6.2B", V(4), 16, 1, transport="batched")),
    Row("sends unequal 6 p=6 m=18 cap 1p batched", _unequal(6, LINE(6), 18, 1).with_(transport="batched")),
    Row("sizes 1.5B p=4 m=12 cap 1p", _sizes(_problem("1.5B", LINE(4), 12, 1), 0)),
    Row("sizes 6.2B v p=4 m=12 cap 1p makespan", _sizes(_problem("6.2B", V(4), 12, 1, "makespan"), 1)),
    Row("decisions BW saves 10 % p=4 m=36 cap 1.5p", _fused(36, 12, 0.1)),
    Row("decisions BW saves 25 % p=4 m=12 cap 1p", _fused(12, 8, 0.25, 2_000)),
    Row("decisions BW saves 10 % no time left", _fused(48, 12, 0.1), 0.0),
    Row("decisions variants 1.5B p=4 m=8 cap 0.5p", _variants("1.5B", 8, 0.5)),
    Row("decisions variants unit p=4 m=8 cap 0.75p", _variants("unit", 8, 0.75)),
    Row("decisions variants 6.2B p=4 m=12 cap 0.5p", _variants("6.2B", 12, 0.5)),
)
"""All rows. With all parts and one core, each takes some seconds."""
