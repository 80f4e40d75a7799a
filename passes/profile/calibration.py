"""Calibrate counted times: compare them with measured ones, stage by stage and kind by kind.

``stages + state + microbatch --> CalibrationReport``. The counted side uses the device's roofline, the
measured side `measure`. What decides a plan is the ratio between stages and kinds, so the report gives the
error with and without the common factor.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from zbcompile.passes.profile.counted import counted_profile
from zbcompile.passes.profile.cpu_rates import measure_cpu
from zbcompile.passes.profile.measure import measure
from zbcompile.passes.split.stage_graphs import StageGraphs
from zbcompile.schedule.costs import Profile
from zbcompile.schedule.devices import Device

__all__ = ["CalibrationReport", "CalibrationRow", "calibration_report"]

_KINDS = (
    ("F", "forward_ns"),
    ("B", "backward_input_ns"),
    ("W", "backward_weight_ns"),
    ("BW", "full_backward_ns"),
)


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """Counted and measured time of one kind (F, B, W or BW) of one stage."""

    stage: int
    kind: str
    counted_ns: int
    measured_ns: int

    @property
    def ratio(self) -> float:
        """Counted over measured: below 1 the count is too optimistic."""
        return self.counted_ns / self.measured_ns


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """Counted against measured times; ``str`` of it is a table.

    Attributes
    ----------
    device
        What was counted for.
    rows
        One per stage and kind, without kinds that take no time at all (the empty B of a first stage).
    """

    device: Device
    rows: tuple[CalibrationRow, ...]

    @property
    def total_ratio(self) -> float:
        """Sum of counted over sum of measured times."""
        return sum(r.counted_ns for r in self.rows) / sum(r.measured_ns for r in self.rows)

    @property
    def mean_error(self) -> float:
        """Mean of abs(counted / measured - 1)."""
        return statistics.mean(abs(r.ratio - 1) for r in self.rows)

    @property
    def relative_error(self) -> float:
        """The same after dividing by `total_ratio`: the error of the proportions, which decide the plan."""
        return statistics.mean(abs(r.ratio / self.total_ratio - 1) for r in self.rows)

    def __str__(self) -> str:
        lines = [f"{'stage':>5} {'kind':>4} {'counted ms':>11} {'measured ms':>11} {'ratio':>6}"]
        lines += [
            f"{r.stage:>5} {r.kind:>4} {r.counted_ns / 1e6:>11.3f} "
            f"{r.measured_ns / 1e6:>11.3f} {r.ratio:>6.2f}"
            for r in self.rows
        ]
        lines.append(
            f"counted / measured {self.total_ratio:.2f} · mean error {self.mean_error:.0%} · "
            f"error of proportions {self.relative_error:.0%} · {self.device.name}: {self.device.source}"
        )
        return "\n".join(lines)


def calibration_report(
    stages: Sequence[StageGraphs],
    state: Mapping[str, Tensor],
    microbatch: Sequence[Tensor],
    device: Device | None = None,
    *,
    repeats: int = 5,
    measured: Profile | None = None,
) -> CalibrationReport:
    """Count and measure the same stages on the same inputs.

    Parameters
    ----------
    stages, state, microbatch
        As for `measure`.
    device
        To count for; by default this CPU with rates measured now.
    repeats
        How often a stage is timed.
    measured
        A profile of the same stages; without it they are measured here.
    """
    device = device or measure_cpu()
    counted = counted_profile(stages, device)
    measured = measured or measure(stages, state, microbatch, repeats=repeats)
    rows = [
        CalibrationRow(index, kind, getattr(count, name), getattr(real, name))
        for index, (count, real) in enumerate(zip(counted.stages, measured.stages, strict=True))
        for kind, name in _KINDS
        if getattr(count, name) and getattr(real, name)
    ]
    return CalibrationReport(device, tuple(rows))
