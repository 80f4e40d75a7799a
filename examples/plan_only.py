"""Find the best order of a pipeline without a model, a GPU or torch.

    python examples/plan_only.py [plan.json]

Costs are times in nanoseconds and bytes; here they are made up: four stages, the last one heavier. The file,
where one is named, is for `zbcompile show plan.json`, which draws it, and `zbcompile.compile(schedule=...)`,
which runs it. The first search on a machine compiles its kernels, about 20 seconds; later ones load them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import zbcompile
from zbcompile.formats import schedule_json

MILLISECOND, MIB = 1_000_000, 1 << 20


def profile() -> zbcompile.Profile:
    """Return what four stages and the links between them cost."""
    stages = [
        zbcompile.StageCost(
            forward_ns=time * MILLISECOND,
            backward_input_ns=time * MILLISECOND,
            backward_weight_ns=time * MILLISECOND,
            full_backward_ns=2 * time * MILLISECOND,
            saved_bytes=300 * MIB,  # of a microbatch, from F to B
            saved_for_weight_bytes=100 * MIB,  # and from B to W
            static_bytes=1024 * MIB,  # weights, gradients, optimizer
            name=f"stage {k}",
        )
        for k, time in enumerate((10, 10, 10, 13))
    ]
    edges = [zbcompile.Edge(k, k + 1, 8 * MIB, 8 * MIB, True) for k in range(3)]
    link = zbcompile.Link(latency_ns=20_000, bytes_per_second=25_000_000_000)
    return zbcompile.Profile(tuple(stages), tuple(edges), link)


def main(file: str | None = None) -> zbcompile.Solution:
    """Plan for two caps, say what they cost, and write the second plan."""
    for gibibytes in (3, 2):
        problem = zbcompile.Problem.of(profile(), num_microbatches=8, cap=gibibytes * 1024 * MIB)
        solution = zbcompile.plan(problem, time_limit_s=2.0)
        found = solution.certificate
        print(
            f"{gibibytes} GiB a rank: {found.objective} {found.value_ns / MILLISECOND:.1f} ms, "
            f"no order is below {found.bound_ns / MILLISECOND:.1f} ms ({found.status}, {found.method})"
        )
    print(solution.schedule)
    if file is not None:
        Path(file).write_text(schedule_json.dumps(solution))
    return solution


if __name__ == "__main__":
    main(*sys.argv[1:])
