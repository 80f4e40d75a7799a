"""The one way from an order to what runs: merge_backward, insert_comm, check; then codegen.

`zbcompile.compile`, ``zbcompile plan``, ``convert`` and ``rehearse``, and evaluation all lower here, so that
the order in a file is the order that is compiled. No torch is loaded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from zbcompile.compiler.observe import Observer, quiet
from zbcompile.passes.lower.codegen import emit
from zbcompile.passes.lower.insert_comm import CommSchedule, insert_comm, keep_comm
from zbcompile.passes.lower.merge_backward import merge_backward_timed
from zbcompile.schedule.check import checked_times
from zbcompile.schedule.ir import Schedule
from zbcompile.schedule.problem import Problem
from zbcompile.schedule.simulate import Timeline
from zbcompile.schedule.solution import Certificate, Solution
from zbcompile.schedule.stage_actions import with_stage_actions

__all__ = ["LoweredPlan", "codegen", "lower", "lower_order"]


@dataclass(frozen=True)
class LoweredPlan:
    """An order with its communication, and what is known about it.

    Attributes
    ----------
    solution
        The problem, the order with its sends and receives, and the certificate of that order.
    comm
        The same order with what bounds the messages on their way.
    timeline
        When everything happens.
    """

    solution: Solution
    comm: CommSchedule
    timeline: Timeline

    @property
    def schedule(self) -> Schedule:
        """What runs, sends and receives included."""
        return self.comm.schedule

    @property
    def problem(self) -> Problem:
        """What the order was planned for."""
        return self.solution.problem

    @property
    def certificate(self) -> Certificate:
        """How good the order that runs is, and why."""
        return self.solution.certificate

    def programs(self, observer: Observer = quiet) -> tuple[str, ...]:
        """Return the program of every rank (`codegen`)."""
        return codegen(self.comm, self.problem, self.certificate, observer)


def lower(
    solution: Solution,
    *,
    merge: bool,
    one_communicator: bool = False,
    sharded_stages: Collection[int] = (),
    reduced_stages: Collection[int] = (),
    observer: Observer = quiet,
) -> LoweredPlan:
    """Lower a solution; its certificate then speaks of the order with communication.

    Parameters
    ----------
    solution
        An order and its problem. An order that has its communication keeps it.
    merge
        Whether B and W that stand together may become one BW where that costs nothing: for orders that the
        planner found. An order that somebody gave is run as it was given.
    one_communicator
        Keep one global order of messages.
    sharded_stages, reduced_stages
        Stages that get their UNSHARD and RESHARD, or their REDUCE_GRAD, also where their costs name no time
        for them.

    Raises
    ------
    CheckError
        The order is incomplete, out of order, can hang or exceeds a cap.
    """
    comm = lower_order(
        solution.schedule,
        solution.problem,
        merge=merge,
        one_communicator=one_communicator,
        sharded_stages=sharded_stages,
        reduced_stages=reduced_stages,
        observer=observer,
    )
    timeline = checked_times(comm.schedule, solution.problem)
    observer("check", comm.schedule)
    certificate = replace(solution.certificate, value_ns=comm.value_ns)
    return LoweredPlan(replace(solution, schedule=comm.schedule, certificate=certificate), comm, timeline)


def lower_order(
    schedule: Schedule,
    problem: Problem,
    *,
    merge: bool = False,
    one_communicator: bool = False,
    sharded_stages: Collection[int] = (),
    reduced_stages: Collection[int] = (),
    observer: Observer = quiet,
) -> CommSchedule:
    """Put the communication into an order; parameters as for `lower`.

    Raises
    ------
    CheckError
        A message's ends are missing, or its messages can hang.
    """
    if schedule.has_communication:
        comm = keep_comm(schedule, problem)
    else:
        compute_ns = None
        if merge and not schedule.has_stage_actions:
            schedule, compute_ns = merge_backward_timed(schedule, problem)
            observer("merge_backward", schedule)
        comm = insert_comm(schedule, problem, one_communicator=one_communicator, compute_ns=compute_ns)
    if sharded_stages or reduced_stages:
        placed = with_stage_actions(
            comm.schedule, problem, sharded_stages=sharded_stages, reduced_stages=reduced_stages
        )
        comm = replace(comm, schedule=placed)
    observer("insert_comm", comm.schedule)
    return comm


def codegen(
    comm: CommSchedule,
    problem: Problem,
    certificate: Certificate | None = None,
    observer: Observer = quiet,
) -> tuple[str, ...]:
    """Return the program of every rank, as text."""
    texts = emit(comm.schedule, problem, certificate, comm.send_slots)
    observer("codegen", texts)
    return texts
