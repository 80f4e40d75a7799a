"""What is left of a plan's gain when latencies are random: the plan and 1F1B, replayed."""

from __future__ import annotations

from dataclasses import dataclass

from zbcompile.schedule.communication import insert_communication
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.replay import Jitter, Replay
from zbcompile.show.baseline import Baseline, split_apart
from zbcompile.show.units import percent, time_unit

__all__ = ["Jittered", "Replayed", "jitter_json", "jitter_lines", "jittered"]

_MOST_DRAWS, _FEWEST_DRAWS, _WAITS = 400, 5, 1_500_000
"""Steps that are drawn: as many as keep the waits of an order, all steps together, at about so many."""

_ENOUGH = 20
"""Steps from which on a tenth of them is spoken of."""

_LIKELY = (0.1, 0.9)


@dataclass(frozen=True, slots=True)
class Replayed:
    """One order, as planned and with latencies that are drawn.

    Attributes
    ----------
    name
        What it is called.
    planned_ns
        Its span or makespan, as the problem's objective says, with the latencies of the profile.
    drawn_ns
        The same for every step that was drawn.
    """

    name: str
    planned_ns: int
    drawn_ns: tuple[int, ...]

    @property
    def mean_ns(self) -> int:
        """The mean over the steps that were drawn."""
        return sum(self.drawn_ns) // len(self.drawn_ns)

    def gain_over(self, other: Replayed) -> tuple[float, float, float, float]:
        """Return how much shorter this is than another order, as shares of the other.

        Returns
        -------
        tuple
            As planned; of the means; and what 1 in 10 of the steps stays below, and exceeds.
        """
        each = sorted(1 - a / b if b else 0.0 for a, b in zip(self.drawn_ns, other.drawn_ns, strict=True))
        low, high = (each[round(share * (len(each) - 1))] for share in _LIKELY)
        still = 1 - self.planned_ns / other.planned_ns if other.planned_ns else 0.0
        return still, 1 - sum(self.drawn_ns) / sum(other.drawn_ns) if any(other.drawn_ns) else 0.0, low, high


@dataclass(frozen=True, slots=True)
class Jittered:
    """A plan and 1F1B with random latencies.

    Attributes
    ----------
    jitter, seed
        What latencies are drawn from.
    objective
        What is timed.
    plan
        The plan.
    others
        1F1B on the same ranks and memory, as it is and with each gradient sent before W; empty where it does
        not apply.
    why
        Why it does not apply.
    """

    jitter: Jitter
    seed: int
    objective: str
    plan: Replayed
    others: tuple[Replayed, ...]
    why: str = ""


def jittered(schedule: Schedule, problem: Problem, baseline: Baseline, jitter: Jitter, seed: int) -> Jittered:
    """Replay an order and 1F1B with random latencies. The same seed gives the same figures.

    Where the order has sends and receives, 1F1B gets them by the same rules. Messages that both send have
    the same latencies. Small steps are drawn 400 times, large ones less often, at least 5 times.

    Raises
    ------
    CheckError
        The order cannot run.
    """
    orders = [("this order", schedule, problem)]
    if baseline.timeline is not None:
        plain, coarse = baseline.timeline.schedule.compute_only(), baseline.timeline.problem
        for name, order in (("1F1B", plain), ("1F1B, B sent before W", split_apart(plain))):
            runs = insert_communication(order, coarse) if schedule.has_communication else order
            orders.append((name, runs, coarse))
    replays = [Replay(order, where) for _, order, where in orders]
    count = max(_FEWEST_DRAWS, min(_MOST_DRAWS, _WAITS // max(1, *(replay.size for replay in replays))))
    draws = {where: jitter.draws(where, count, seed) for _, _, where in orders}
    found = [
        Replayed(name, replay.value_ns(), tuple(replay.value_ns(late) for late in draws[where]))
        for (name, _, where), replay in zip(orders, replays, strict=True)
    ]
    return Jittered(jitter, seed, problem.objective, found[0], tuple(found[1:]), baseline.why)


def jitter_lines(found: Jittered) -> list[str]:
    """Say what is left of the gain, one line per order."""
    unit = time_unit(max(found.plan.planned_ns, found.plan.mean_ns))
    mean, count = found.jitter.mean_ns, len(found.plan.drawn_ns)
    drawn = f"with a latency of {time_unit(mean).text(mean)} on the mean"
    here = f"{unit.text(found.plan.planned_ns)} becomes {unit.text(found.plan.mean_ns)}"
    lines = [f"{drawn} ({found.jitter.kind}, {count} steps drawn) {found.objective} {here}"]
    for other in found.others:
        still, left, *likely = map(percent, found.plan.gain_over(other))
        there = f"{unit.text(other.planned_ns)} becomes {unit.text(other.mean_ns)}"
        spread = f"{' to '.join(likely)}{' in 8 of 10 steps' * (count >= _ENOUGH)}"
        lines.append(f"gain over {other.name}: {still} becomes {left} ({spread}); {there}")
    if not found.others:
        lines.append(f"1F1B does not apply: {found.why}")
    return lines


def jitter_json(found: Jittered) -> dict[str, object]:
    """Return the same as plain values: times in ns, gains as fractions."""

    def row(order: Replayed) -> dict[str, object]:
        names = ("planned", "mean", "low", "high")
        gains = None if order is found.plan else dict(zip(names, found.plan.gain_over(order), strict=True))
        return {
            "name": order.name,
            "planned_ns": order.planned_ns,
            "mean_ns": order.mean_ns,
            "least_ns": min(order.drawn_ns),
            "most_ns": max(order.drawn_ns),
            "gain_over_it": gains,
        }

    return {
        "format": "zbcompile.jitter",
        "version": 1,
        "objective": found.objective,
        "kind": found.jitter.kind,
        "latency_ns": found.jitter.mean_ns,
        "steps_drawn": len(found.plan.drawn_ns),
        "seed": found.seed,
        "why_no_1f1b": found.why or None,
        "orders": [row(order) for order in (found.plan, *found.others)],
    }
