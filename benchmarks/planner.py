"""The planner against the open profiles and the peers' own orders.

    python benchmarks/planner.py [SECTION ...] [--rows N]
    python benchmarks/planner.py ablate --help      what each part of the planner is worth

Prints for every row: ours, the peer's figure, the bound, the gap, wall and processor seconds. Times
in milliseconds. Sections: paper, makespan, starved, v, v_min, peers, looped, variants, unequal (stages),
unequal_microbatches, large, cuts, reductions. Default: all.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import ablate, reductions
from zbcompile.planner.cuts import plan_cuts
from zbcompile.planner.plan import plan
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.cuts import CutProblem
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.microbatches import MicrobatchCost
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import simulate
from zbcompile.schedule.solution import Solution
from zbcompile.schedule.sum_order import renumbered

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
PAPER = json.loads((DATA / "paper_profiles.json").read_text())["configs"]
_TARGETS = json.loads((DATA / "targets.json").read_text())
TARGETS = {row["name"]: row for row in _TARGETS["problems"]}
DRAWS = _TARGETS["unequal_microbatches"]["sizes"]
CUT = _TARGETS["cut"]
PEER = json.loads((DATA / "peer_schedules.json").read_text())["runs"]
Row = dict[str, Any]


def timed(problem: Problem, limit: float, **options: Any) -> tuple[Solution, float, float]:
    """Plan once: (solution, wall seconds, processor seconds)."""
    wall, cpu = time.perf_counter(), time.process_time()
    solution = plan(problem, time_limit_s=limit, **options)
    return solution, time.perf_counter() - wall, time.process_time() - cpu


def line(
    name: str, solution: Solution, wall: float, cpu: float, peer_ns: float | None, note: str = ""
) -> None:
    """One row of the table."""
    certificate = solution.certificate
    ours = certificate.value_ns / 1e6
    peer = "" if peer_ns is None else f"{peer_ns / 1e6:11.3f} {ours * 1e6 / peer_ns - 1:+8.2%}"
    print(
        f"{name:34} {ours:11.3f} {peer:20} {certificate.bound_ns / 1e6:11.3f} {certificate.method:18} "
        f"{certificate.status:11} {wall:6.1f} {cpu:6.1f}  {note}",
        flush=True,
    )


def paper_problem(row: Row, caps_in_p: float, objective: str = "span") -> Problem:
    """One published profile, one stage per rank."""
    stage = StageCost.simple(
        row["forward_us"] * 1000,
        row["backward_input_us"] * 1000,
        row["backward_weight_us"] * 1000,
        row["saved_units"],
        row["saved_for_weight_units"],
    )
    p = row["num_ranks"]
    profile = Profile.uniform(stage, p, row["comm_us"] * 1000)
    return Problem.of(
        profile, None, row["num_microbatches"], int(row["saved_units"] * p * caps_in_p), objective
    )


def peer_problem(row: Row, peak_over_saved: float, objective: str, per_rank: int = 2) -> Problem:
    """A peer's row: two half stages per rank in a V, or one stage per rank; bytes doubled to stay whole."""
    half = 2 if per_rank == 2 else 1
    stage = StageCost.simple(
        row["TF"] * 1000 // half,
        row["TB"] * 1000 // half,
        row["TW"] * 1000 // half,
        row["mem"][0] * 2 // half,
        -row["mem"][2] * 2 // half,
    )
    p = row["p"]
    placement = Placement.v(p) if per_rank == 2 else Placement.linear(p)
    profile = Profile.uniform(stage, per_rank * p, row["Tcomm"] * 1000)
    cap = round(2 * row["mem"][0] * peak_over_saved)
    return Problem.of(profile, placement, row["m"], cap, objective)


def paper() -> None:
    """Published profiles at cap p and 2p; the peer's figure is the published bubble rate."""
    for caps, name in ((1, "ZB-1p"), (2, "ZB-2p")):
        for row in PAPER:
            problem = paper_problem(row, caps)
            solution, wall, cpu = timed(problem, 10)
            work = problem.work_ns(0)
            rate = 1 - work / solution.certificate.value_ns
            published = row["published_bubble_rate"][name]
            label = f"{row['model']} p={row['num_ranks']} m={row['num_microbatches']} cap {caps}p"
            note = f"rate {rate:.4f} published {published:.4f}"
            line(label, solution, wall, cpu, None, note)


def makespan() -> None:
    """Published profiles, makespan, at 1p, 1.5p and 2p against the peer's makespan."""
    peers = {(r["cost"], r["m"]): r["schedules"] for r in PEER if r["set"] == "paper"}
    for caps, name in ((1, "ZB-1p"), (1.5, "ZB-1.5p"), (2, "ZB-2p")):
        for row in PAPER:
            solution, wall, cpu = timed(paper_problem(row, caps, "makespan"), 10)
            peer = peers[row["model"], row["num_microbatches"]][name]["makespan"] * 1000
            label = f"{row['model']} m={row['num_microbatches']} makespan {caps}p"
            line(label, solution, wall, cpu, peer)


def starved() -> None:
    """Caps below p, one stage per rank; the peer's best there is V-Half or V-Min at the same peak."""
    costs = {"unit": (1000, 1000, 1000, 0, 2, 1), "1.5B": (18522, 18086, 9337, 601, 201216, 73728)}
    costs["6.2B-like"] = (29718, 29444, 19927, 527, 34, 16)
    for p, counts, limit in ((4, (8, 12, 16), 30), (8, (24,), 60)):
        for m in counts:
            for name, (f, b, w, c, saved, pending) in costs.items():
                for share in (0.75, 0.5):
                    stage = StageCost.simple(f * 1000, b * 1000, w * 1000, saved, pending)
                    problem = Problem.of(
                        Profile.uniform(stage, p, c * 1000), None, m, int(saved * p * share), "span"
                    )
                    solution, wall, cpu = timed(problem, limit)
                    line(f"{name} p={p} m={m} cap {share}p", solution, wall, cpu, None)


def v_rows(only: str = "") -> Iterator[tuple[Row, str]]:
    """Every peer row with a V order, paper rows first."""
    for row in PEER:
        for name in ("ZB-V", "V-Half", "V-Min"):
            if name in row["schedules"] and only in name:
                yield row, name


def v(first: int, count: int) -> None:
    """V placement at the memory of the peer's own order, span and makespan.

    A row that is still longer than the peer's (V-Min at p = 8: not shorter by 8 %), or has a gap above 1 %
    (makespan at cap p), is planned again with a minute; the line printed is that of the last plan.
    """
    longer, gaps = [], []
    for row, name in list(v_rows())[first : first + count]:
        schedule = row["schedules"][name]
        for objective, field in (("span", "longest_stage"), ("makespan", "makespan")):
            problem, peer = peer_problem(row, schedule["peak_over_MB"], objective), schedule[field] * 1000
            wanted = peer * 0.92 if name == "V-Min" and row["p"] == 8 and row["set"] == "paper" else peer
            at_cap_p = objective == "makespan" and schedule["peak_over_MB"] >= row["p"]
            for limit in (10, 60):
                solution, wall, cpu = timed(problem, limit)
                certificate = solution.certificate
                if certificate.value_ns <= wanted and not (at_cap_p and certificate.gap > 0.01):
                    break
            label = f"{row['cost']} p={row['p']} m={row['m']} {name} {objective}"
            line(label, solution, wall, cpu, peer, f"limit {limit} s")
            longer += [label] if certificate.value_ns > peer else []
            gaps += [certificate.gap] if at_cap_p else []
    print(f"v: longer than the peer's: {', '.join(longer) or 'none'}")
    print(f"v: makespan at cap p, largest gap: {max(gaps, default=0):.2%}")


def peers(first: int, count: int) -> None:
    """Every V order of the peers at its memory, by counted tries: mean gaps, and what is longer.

    The tries are those of ten seconds on a free core, so the values do not depend on what else runs.
    """
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    longer = []
    for row, name in list(v_rows())[first : first + count]:
        schedule = row["schedules"][name]
        for objective, field in (("span", "longest_stage"), ("makespan", "makespan")):
            problem, peer = peer_problem(row, schedule["peak_over_MB"], objective), schedule[field] * 1000
            solution, wall, cpu = timed(problem, 600, level=1)
            label = f"{row['set']} {row['cost']} p={row['p']} m={row['m']} {name} {objective}"
            line(label, solution, wall, cpu, peer)
            gaps[name, objective].append(solution.certificate.gap)
            longer += [label] if solution.certificate.value_ns > peer else []
    for (name, objective), found in sorted(gaps.items()):
        said = f"gap mean {statistics.mean(found):.2%}, worst {max(found):.2%}"
        print(f"peers: {name} {objective}: {found.count(0)} of {len(found)} proved, {said}")
    print(f"peers: longer than the peer's: {', '.join(longer) or 'none'}")


def v_min(count: int) -> None:
    """V-Min at p = 8 by counted tries: what ten seconds allow, then what a minute does, with two seeds each.

    The 'peer' is the best order known before. Six profiles of other times and ranks follow, whose rows are to
    be compared with each other: no seed should be longer than another, or than a minute, by more than .5 %.
    """
    known = {24: 1444.3835e6, 32: 1862.5425e6, 64: None}
    rows: list[tuple[str, Problem, float | None]] = []
    for m, best_ns in known.items():
        row = next(r for r, _ in v_rows("V-Min") if (r["set"], r["p"], r["m"]) == ("paper", 8, m))
        problem = peer_problem(row, row["schedules"]["V-Min"]["peak_over_MB"], "span")
        rows.append((f"1.5B p=8 m={m} V-Min", problem, best_ns))
    for p, m, times in (
        (4, 12, (10, 10, 10)),
        (4, 16, (18, 18, 9)),
        (6, 18, (12, 15, 9)),
        (6, 24, (10, 10, 5)),
        (8, 16, (10, 12, 8)),
        (8, 24, (14, 13, 13)),
    ):
        stage = StageCost.simple(*(time * 1_000_000 for time in times), 2, 1)
        profile = Profile.uniform(stage, 2 * p, 400_000)
        name = f"{'/'.join(map(str, times))} p={p} m={m} half of p"
        rows.append((name, Problem.of(profile, Placement.v(p), m, 2 * p), None))
    for name, problem, best_ns in rows[:count]:
        for level, seed in ((1, 0), (1, 1), (6, 0)):
            solution, wall, cpu = timed(problem, 600, level=level, seed=seed)
            line(name, solution, wall, cpu, best_ns, f"level {level} seed {seed}")


def looped_problem(p: int, per_rank: int, m: int) -> Problem:
    """The published 1.5B times in ``per_rank`` parts, one cap for all ranks.

    The cap is the peak of rank 0 under interleaved 1F1B: 2 (p - 1) + (v - 1) p + 1 parts of a microbatch.
    """
    row = PAPER[0]
    times = (row["forward_us"], row["backward_input_us"], row["backward_weight_us"])
    stage = StageCost.simple(
        *(time * 1000 // per_rank for time in times), row["saved_units"], row["saved_for_weight_units"]
    )
    profile = Profile.uniform(stage, per_rank * p, row["comm_us"] * 1000)
    cap = row["saved_units"] * (2 * (p - 1) + (per_rank - 1) * p + 1)
    return Problem.of(profile, Placement.looped(p, per_rank), m, cap)


def target_problem(name: str, cap: str) -> Problem:
    """A problem of targets.json. ``one cap`` is the greatest peak of a rank under interleaved 1F1B."""
    row = TARGETS[name]
    stages = tuple(StageCost(*numbers) for numbers in row["stages_ns_bytes"])
    own = row["caps"]["interleaved 1F1B"]
    caps = {"1p": row["caps"]["1p"], "own peaks": own, "one cap": [max(own)] * len(own)}[cap]
    profile = Profile(stages, link=Link(row["link_latency_ns"]))
    return Problem.of(profile, Placement(tuple(row["ranks"])), row["microbatches"], tuple(caps))


def looped() -> None:
    """Looped placements. The 'peer' is the best order known before.

    Which memory is meant: ``one cap``, the peak of rank 0 under interleaved 1F1B, for all; ``own peaks``:
    each rank's cap is its own peak under that order; ``1p``: v parts of p microbatches.
    """
    for p, per_rank, m, best_ms in (
        (4, 2, 32, 1475.596),
        (4, 4, 16, 745.611),
        (4, 4, 32, 1480.731),
        (8, 4, 16, 757.195),
        (8, 4, 32, 1492.315),
        (8, 2, 16, 755.610),
        (8, 2, 32, 1486.389),
    ):
        solution, wall, cpu = timed(looped_problem(p, per_rank, m), 2)
        line(f"1.5B p={p} v={per_rank} m={m}, one cap", solution, wall, cpu, best_ms * 1e6)
    for name, cap, best_ms in (
        ("llama:2:64", "own peaks", 5673.3),
        ("llama:2:64", "one cap", 5472.0),
        ("llama:2:64", "1p", 5472.0),
        ("llama:4:64", "own peaks", 5510.45),
        ("llama:4:64", "1p", 5472.0),
        ("llama:8:64", "own peaks", 5505.6),
        ("llama:8:64", "1p", 5484.6),
        ("big:64:looped:128", "own peaks", 4712.2),
        ("big:64:looped:128", "1p", 4352.0),
    ):
        problem = target_problem(name, cap)
        solution, wall, cpu = timed(problem, 2 if problem.num_ranks <= 16 else 5)
        line(f"{name}, {cap}", solution, wall, cpu, best_ms * 1e6)


def variants() -> None:
    """Cap 0.5 p, p = 8, m = 24: M_B x 0.56 and T_B x 1.12 on offer; the 'peer' is ours without."""
    for name, (f, b, w, c, saved, pending) in {
        "unit": (1000, 1000, 1000, 0, 200, 100),
        "1.5B": (18522, 18086, 9337, 601, 201216, 73728),
    }.items():
        lean = StageCost.simple(f * 1000, b * 1120, w * 1000, saved * 56 // 100, pending)
        stage = StageCost(f * 1000, b * 1000, w * 1000, (b + w) * 1000, saved, pending, variants=(lean,))
        problem = Problem.of(Profile.uniform(stage, 8, c * 1000), None, 24, saved * 4)
        without, _, _ = timed(problem, 20, variants=False)
        solution, wall, cpu = timed(problem, 20)
        line(f"{name} p=8 m=24 variants", solution, wall, cpu, without.certificate.value_ns)


def unequal(count: int) -> None:
    """Stages each +-25 %, the first x 0.9, the last x 1.4, caps 1p to 2p."""
    gaps = []
    for k in range(count):
        rng = random.Random(k)
        p = rng.choice((4, 8))
        m = 3 * p
        stages = []
        for s in range(p):
            factor = 0.9 if s == 0 else 1.4 if s == p - 1 else 1.0
            times = [int(t * factor * rng.uniform(0.75, 1.25) * 1000) for t in (18522, 18086, 9337)]
            stages.append(StageCost.simple(*times, 201216, 73728))
        profile = Profile(tuple(stages), link=Link(601_000))
        cap = rng.choice((1, 1.5, 2))
        problem = Problem.of(profile, None, m, int(201216 * p * cap))
        solution, wall, cpu = timed(problem, 30)
        gaps.append(solution.certificate.gap)
        line(f"unequal {k} p={p} m={m} cap {cap}p", solution, wall, cpu, None)
    print(f"unequal: median gap {statistics.median(gaps):.2%}, worst {max(gaps):.2%} of {count}")


def unequal_microbatches(
    count: int, caps: Sequence[int] = (1, 2), variations: Sequence[str] = tuple(DRAWS)
) -> None:
    """Ten draws of sizes per coefficient of variation, 1.5B p = 8 m = 24, makespan, cap 1p and 2p, level 1.

    The 'peer' is the order for equal microbatches with the microbatches as they come; the note has the same
    order with the shortest first.
    """
    profile = Profile.uniform(StageCost.simple(18_522_000, 18_086_000, 9_337_000, 201216, 73728), 8, 601_000)
    for cap in caps:
        alike = Problem.of(profile, None, 24, 201216 * 8 * cap, "makespan")
        order = plan(alike, level=1)
        for variation in variations:
            gains, rising_gains, gaps = [], [], []
            for k, sizes in enumerate(DRAWS[variation][:count]):
                problem = alike.with_(microbatch_costs=tuple(map(MicrobatchCost.of, sizes)))
                solution, wall, cpu = timed(problem, 300, level=1)
                given = simulate(order.schedule, problem).value_ns
                by_size = tuple(sorted(range(24), key=sizes.__getitem__))
                rising = simulate(renumbered(order.schedule, by_size), problem).value_ns
                gains.append(1 - solution.certificate.value_ns / given)
                rising_gains.append(1 - rising / given)
                gaps.append(solution.certificate.gap)
                note = f"shortest first {rising / 1e6:.3f}"
                line(f"cap {cap}p, variation {variation}, draw {k}", solution, wall, cpu, given, note)
            print(
                f"cap {cap}p, variation {variation}: {statistics.mean(gains):.1%} shorter than as given "
                f"(shortest first {statistics.mean(rising_gains):.1%}), gap {statistics.mean(gaps):.1%}"
            )


def large() -> None:
    """p = 64, m = 512, unit times, cap 1p and 2p; peak memory of this process."""
    for caps in (1, 2):
        profile = Profile.uniform(StageCost.simple(1_000_000, 1_000_000, 1_000_000, 2, 1), 64)
        solution, wall, cpu = timed(Problem.of(profile, None, 512, 128 * caps), 10)
        line(f"unit p=64 m=512 cap {caps}p", solution, wall, cpu, None)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


def cut_problem(caps_in_p: float) -> CutProblem:
    """The problem ``cut`` of targets.json: 32 equal layers and a head on 8 ranks, makespan."""
    times, held, share = CUT["layer_ns"], CUT["layer_bytes"], CUT["head"]["times_layer"]
    layer = StageCost.simple(times["F"], times["B"], times["W"], held["saved"], held["saved_for_weight"])
    head = StageCost.simple(*(round(share * times[kind]) for kind in "FBW"), CUT["head"]["extra_saved"], 0)
    pieces = Profile((layer,) * 32 + (head,), link=Link(CUT["link_latency_ns"]))
    return CutProblem.of(pieces, Placement.linear(8), 16, int(caps_in_p * 8 * 4 * held["saved"]), "makespan")


def cuts() -> None:
    """Cuts chosen with the order in 30 s, no fusing. The 'peer' is the cut that was climbed before."""
    before = next(values for name, values in CUT["makespan_ms"].items() if name.startswith("climbed"))
    for caps_in_p, peer_ms in zip((0.5, 0.75, 1, 1.5), before, strict=True):
        wall, cpu = time.perf_counter(), time.process_time()
        solution = plan_cuts(cut_problem(caps_in_p), time_limit_s=30, fuse="never")
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        assert solution.cuts is not None
        line(f"cuts cap {caps_in_p}p", solution, wall, cpu, peer_ms * 1e6, str(solution.cuts.sizes))


def main() -> None:
    """Run the sections named, or all; or leave parts of the planner out."""
    if sys.argv[1:2] == ["ablate"]:
        ablate.main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sections", nargs="*")
    parser.add_argument("--rows", type=int, default=10_000, help="rows per section")
    parser.add_argument("--first", type=int, default=0, help="rows to leave out of sections v and peers")
    arguments = parser.parse_args()
    sections = {
        "paper": paper,
        "large": large,
        "looped": looped,
        "variants": variants,
        "makespan": makespan,
        "unequal": lambda: unequal(min(20, arguments.rows)),
        "unequal_microbatches": lambda: unequal_microbatches(arguments.rows),
        "starved": starved,
        "cuts": cuts,
        "reductions": lambda: reductions.main(next(row for row in PAPER if row["model"] == "14.6B")),
        "v": lambda: v(arguments.first, arguments.rows),
        "v_min": lambda: v_min(arguments.rows),
        "peers": lambda: peers(arguments.first, arguments.rows),
    }
    unknown = [name for name in arguments.sections if name not in sections]
    if unknown:
        sys.exit(f"no section {unknown[0]!r}; there are {', '.join(sections)}")
    heads = f"{'row':34} {'ours ms':>11} {'peer ms, ours to it':20} {'bound ms':>11} {'proved by':18}"
    print(f"{heads} {'status':11} {'wall s':>6} {'cpu s':>6}")
    for name, run in sections.items():
        if not arguments.sections or name in arguments.sections:
            run()


if __name__ == "__main__":
    main()
