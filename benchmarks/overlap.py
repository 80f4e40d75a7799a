"""Real sums of gradients over two replicas beside sleeping compute: begun early, and at the end of the step.

    python benchmarks/overlap.py [MiB of gradients per stage] [pairs of steps]

Four gloo processes: two replicas of two ranks with two stages each (placement V, 4 microbatches, F B W sleep
30, 30 and 25 ms). Both ways run in turn in the same processes. "Exposed" is what the slowest rank waits for
sums after its last compute action, the median over the steps.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from zbcompile.compiler.lower import lower
from zbcompile.planner.plan import plan
from zbcompile.runtime.distributed_runner import DistributedRunner
from zbcompile.runtime.grid import Place
from zbcompile.runtime.group import PipelineGroup
from zbcompile.runtime.launch import spawn
from zbcompile.runtime.sleeping import Sleeping
from zbcompile.runtime.spec import PipelineSpec, Step
from zbcompile.runtime.wiring import Saved
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem

__all__ = ["main", "measured"]

_MICROBATCHES = 4
_CPU = torch.device("cpu")


class _Training(Sleeping):
    """A sleeping stage whose W's return gradients."""

    def __init__(self, index: int, profile: Profile, num_bytes: int) -> None:
        super().__init__(index, profile, _CPU)
        self.trainable = (f"weight {index}",)
        self._gradient = torch.ones(num_bytes // 4)
        self._left = 0

    def run_backward_weight(self, saved: Saved) -> dict[str, Tensor]:
        super().run_backward_weight(saved)
        return self._gradients()

    def run_full_backward(
        self, saved: Saved, output_grads: list[Tensor | None]
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        return super().run_full_backward(saved, output_grads)[0], self._gradients()

    def _gradients(self) -> dict[str, Tensor]:
        """Return a gradient with the last microbatch of a step: sums beside the sleep would be work."""
        self._left = (self._left or _MICROBATCHES) - 1
        return {} if self._left else {self.trainable[0]: self._gradient.clone()}


def _problem() -> Problem:
    stage = replace(StageCost.simple(30_000_000, 30_000_000, 25_000_000), reduce_ns=20_000_000)
    return Problem.of(Profile.uniform(stage, 4, 100_000), Placement.v(2), _MICROBATCHES)


def _rank(rank: int, texts: Mapping[str, tuple[str, ...]], num_bytes: int, pairs: int) -> list[list[int]]:
    """Run steps of both ways in turn; return per way what this rank waited for sums at the end, in ns."""
    replica, place = divmod(rank, 2)
    grid = ((place,), (2 + place,))
    group = PipelineGroup(Place((0, 1, 2, 3), (2 * replica, 2 * replica + 1), grid), 120.0)
    problem = _problem()
    stages = tuple(_Training(s, problem.profile, num_bytes) for s in range(problem.num_stages))
    spec = PipelineSpec(stages, problem.placement, _MICROBATCHES)
    runners = [DistributedRunner(group, spec, rows[place], _CPU) for rows in texts.values()]
    with group.calls.building("the benchmark"):
        for runner in runners:
            runner.connect()
    waits: list[list[int]] = [[], []]
    for _ in range(pairs):
        for way, runner in enumerate(runners):
            group.synchronize()
            runner.run(Step([[] for _ in range(_MICROBATCHES)]), {})
            assert runner.end is not None
            rows = runner.end.recorder.actions()
            compute = max(end for action, _, end in rows if action.kind.is_compute)
            waits[way].append(max(0, max(end for _, _, end in rows) - compute))
    for runner in runners:
        runner.close()
    group.close()
    return waits


def measured(num_bytes: int, pairs: int) -> tuple[float, float]:
    """Return what the slowest rank waits for at the end: begun early, and at the end, in ns."""
    problem = _problem()
    plain = lower(plan(problem, level=1), merge=False)
    early = plain.programs()
    late = tuple(
        "".join(line for line in text.splitlines(keepends=True) if "rank.reduce_grad(" not in line)
        for text in early
    )
    found = spawn(_rank, 4, ({"early": early, "late": late}, num_bytes, pairs), timeout_s=500)
    first, second = (
        statistics.median(map(max, zip(*(waits[way] for waits in found), strict=True))) for way in range(2)
    )
    return first, second


def main(mebibytes: int = 64, pairs: int = 9) -> None:
    """Print the table."""
    early, late = measured(mebibytes << 20, pairs)
    print(f"{mebibytes} MiB per stage, {pairs} steps each")
    print(f"begun when a stage's last W is done: {early / 1e6:.1f} ms exposed")
    print(f"begun at the end of the step:        {late / 1e6:.1f} ms exposed")
    print(f"ratio {early / late:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
