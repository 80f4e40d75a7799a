"""Fingerprints of forty plans: the same before and after a change that must change no plan.

    python benchmarks/same_plans.py > before.txt
    python benchmarks/same_plans.py | diff before.txt -

Every row ends by proof or by counted tries (`level`: those of its limit); the last column says which
(`proved`, `counted`). `TIME` means that the limit cut the row off, and then it says nothing. Columns: name,
value, bound, digest of the order, end. Seconds go to standard error.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator

from zbcompile.planner.plan import plan
from zbcompile.schedule.costs import Link, Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem

Row = tuple[str, Problem, float]

MODELS = {
    "unit": (1000, 1000, 1000, 0, 2, 1),
    "1.5B": (18522, 18086, 9337, 601, 201216, 73728),
    "6.2B": (29718, 29444, 19927, 527, 34, 16),
}


def uniform(model: str, stages: int) -> Profile:
    """Equal stages with a published model's times in ns (given in us) and bytes."""
    forward, backward, weight, lag, saved, pending = MODELS[model]
    stage = StageCost.simple(forward * 1000, backward * 1000, weight * 1000, saved, pending)
    return Profile.uniform(stage, stages, lag * 1000)


def rows() -> Iterator[Row]:
    """The forty problems with their limits in seconds."""
    for model in ("unit", "1.5B", "6.2B"):
        saved = MODELS[model][4]
        for caps in (1, 2):
            for p, m in ((8, 24), (8, 64)):
                problem = Problem.of(uniform(model, p), None, m, saved * p * caps)
                yield f"linear {model} p={p} m={m} cap {caps}p", problem, 10
        for share in (1.0, 0.75):
            for objective in ("span", "makespan"):
                problem = Problem.of(uniform(model, 8), Placement.v(4), 20, int(saved * 8 * share), objective)
                yield f"v {model} p=4 m=20 cap {share}p {objective}", problem, 44
        problem = Problem.of(uniform(model, 8), Placement.looped(4), 20, saved * 12)
        yield f"looped {model} p=4 m=20", problem, 44
    for model in ("1.5B", "6.2B"):
        for transport in ("rendezvous", "batched"):
            problem = Problem.of(uniform(model, 4), None, 40, MODELS[model][4] * 4, "span", transport)
            yield f"linear {model} p=4 m=40 {transport}", problem, 44
    for k in range(6):
        factors = [((k * 7 + s * 5) % 11 + 10) / 15 for s in range(4)]
        stages = tuple(
            StageCost.simple(int(18_522_000 * f), int(18_086_000 * f), int(9_337_000 * f), 201216, 73728)
            for f in factors
        )
        profile = Profile(stages, link=Link(601_000))
        yield f"unequal {k} p=4 m=12", Problem.of(profile, None, 12, int(201216 * 4 * (1 + k / 4))), 30
    stage = StageCost(9_000, 9_000, 6_000, 13_500, 2, 1)
    for m, cap in ((48, 12), (40, 12), (44, 16)):
        profile = Profile.uniform(stage, 4, 500)
        yield f"fused saves 10 % p=4 m={m} cap {cap}", Problem.of(profile, None, m, cap), 44


def main() -> None:
    """Plan every row and print its fingerprint."""
    for name, problem, limit in rows():
        began = time.monotonic()
        solution = plan(problem, time_limit_s=limit, level=max(1, round(limit / 10)))
        seconds = time.monotonic() - began
        found = solution.certificate
        ended = "proved" if found.is_optimal else "counted" if seconds < 0.95 * limit else "TIME"
        digest = hashlib.sha256(str(solution.schedule).encode()).hexdigest()[:16]
        print(f"{name:40} {found.value_ns:>12} {found.bound_ns:>12} {digest} {ended}", flush=True)
        print(f"{name:40} {seconds:6.1f} s  {found.method}  {solution.origin}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
