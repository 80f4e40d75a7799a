"""Plan again from a step that ran, and change the order between two steps on all ranks at once."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from zbcompile.compiler.compiled import CompiledPipeline
from zbcompile.compiler.lower import LoweredPlan, lower
from zbcompile.compiler.peers import reduced_stages, refuse_peers, sharded_stages
from zbcompile.compiler.planning import keep_order_of_changes
from zbcompile.compiler.remeasure import profile_of
from zbcompile.errors import UsageError
from zbcompile.formats import schedule_json
from zbcompile.formats.measured_json import Measured
from zbcompile.runtime.group import PipelineGroup
from zbcompile.schedule.event_graph import EventGraph
from zbcompile.schedule.problem import Objective
from zbcompile.schedule.simulate import timeline_of
from zbcompile.schedule.solution import Solution
from zbcompile.schedule.spread import spread_words

__all__ = ["Replan", "planned_anew", "replan", "weighed"]


@dataclass(frozen=True)
class Replan:
    """What planning again found. All values are predictions with the costs that the last step measured.

    Attributes
    ----------
    changed
        Whether the pipeline runs the new order from now on.
    objective
        What the values are: span or makespan.
    old_ns, new_ns
        Of the order that ran, and of the new one.
    bound_ns
        No order is shorter.
    """

    changed: bool
    objective: Objective
    old_ns: int
    new_ns: int
    bound_ns: int

    @property
    def gain(self) -> float:
        """How much shorter the new order is: 0.1 for a tenth."""
        return 1 - self.new_ns / self.old_ns if self.old_ns else 0.0

    def __str__(self) -> str:
        end = "taken" if self.changed else "left"
        return (
            f"{self.objective} {self.old_ns / 1e6:.3f} ms as it runs, {self.new_ns / 1e6:.3f} ms planned "
            f"anew ({100 * self.gain:.1f} % shorter; bound {self.bound_ns / 1e6:.3f} ms): {end}"
        )


def planned_anew(
    running: LoweredPlan, measured: Measured, *, links: bool, time_limit_s: float, seed: int
) -> Solution:
    """Return the best order for the costs that a step measured: same placement, same caps.

    Parameters
    ----------
    running, measured
        The order that ran, and its step.
    links
        Whether links were measured, too: each rank had a process of its own.
    """
    from zbcompile.planner.plan import plan  # here, so that a pipeline with a given order needs no solver

    profile = profile_of(measured, running.schedule, running.problem, links=links)
    if profile.unsteady:
        warnings.warn(spread_words(profile.unsteady), RuntimeWarning, stacklevel=2)
    return plan(running.problem.with_(profile=profile), time_limit_s=time_limit_s, seed=seed)


def weighed(running: LoweredPlan, found: LoweredPlan, threshold: float) -> Replan:
    """Compare a new order with the one that runs, under the costs of the new one."""
    comm = running.comm
    graph = EventGraph(comm.schedule, found.problem, comm.send_slots, comm.one_communicator)
    old, new = timeline_of(graph).value_ns, found.comm.value_ns
    better = new < old and 1 - new / old >= threshold
    return Replan(better, found.problem.objective, old, new, found.certificate.bound_ns)


def replan(compiled: CompiledPipeline, threshold: float, time_limit_s: float) -> Replan:
    """Do what `Pipeline.replan` says. All ranks come here."""
    measured, group = compiled.timeline(), compiled.group
    with compiled.runner.call("replan()") as call:
        with call.checks():
            if not 0 <= threshold < 1:
                raise UsageError("threshold must be a part of the step from 0 to 1", given=threshold)
            refuse_peers(
                compiled.staged,
                "replan() plans for one pipeline alone",
                "compile again with a profile of the measured times and plan_group=",
            )
            if group is not None:
                group.agree({"arguments of replan()": f"{threshold} {time_limit_s} {compiled.options.seed}"})
            solution = _solution(compiled, measured, group, time_limit_s)
            keep_order_of_changes(solution.schedule, compiled.staged)
            one = compiled.options.one_communicator
            reduced = reduced_stages(compiled.staged, group)
            found = lower(
                solution,
                merge=True,
                one_communicator=one,
                reduced_stages=reduced,
                sharded_stages=sharded_stages(compiled.staged, group),
            )
            result = weighed(compiled.plan, found, threshold)
            programs = found.programs()
            if group is not None:
                group.agree({"new programs": "\n".join(programs), "use of them": str(result)})
        if result.changed:
            compiled.run_order(found, programs)
        call.finish(lambda: None)
    return result


def _solution(
    compiled: CompiledPipeline, measured: Measured, group: PipelineGroup | None, time_limit_s: float
) -> Solution:
    """Plan here where all ranks run in this process, else on rank 0 for all ranks."""

    def found() -> Solution:
        return planned_anew(
            compiled.plan,
            measured,
            links=group is not None,
            time_limit_s=time_limit_s,
            seed=compiled.options.seed,
        )

    if group is None:
        return found()
    text = schedule_json.dumps(found()) if group.rank == 0 else None
    text = group.from_first(text, "the new order", time_limit_s)
    return schedule_json.loads(text, "the new order of rank 0").solution()
