"""What every order pays once a step beside its F's, B's and W's: least times that any bound may add.

Take an order with all of its actions as late as the ends of the ranks allow. Without gathers, reductions and
updates these starts are possible starts of the same order, so every bound on F's, B's and W's alone holds for
them. Let rank r have the stages S(r), and compute from the start of its first F to the end of its last W.

* Its first F is of some stage s in S(r), and waits for the gather of s: the rank begins at least the least
  gather of S(r) before that F.
* Its last W (or BW) is of some stage s in S(r), so the reduction of s follows it: the rank ends at least the
  least reduction of S(r), and then its update, after that W. Call this the tail of r.

So a bound on the time that one rank computes grows by that rank's least gather and its tail (``work``,
``memory_windows``, ``start_end_idle``, for the span ``microbatch_work``: the rank of the witness;
``enclosing_pair``, ``last_round_trip``: the outer rank). Other bounds on the span grow by the least of these
sums of all ranks. For the makespan, nothing computes before the gather of a stage that waits for no other
stage; a bound on the end of one rank (``head_and_work``, for the makespan ``microbatch_work``) grows by the
least of these gathers and that rank's tail, every other one by the least gather and the least tail of all
ranks. Nothing of this asks whether microbatches are alike. ``least_microbatch`` has it from the bound in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from zbcompile.planner.bounds.bound import Bound
from zbcompile.planner.core.instance import Instance

__all__ = ["least_once_a_step", "with_once_a_step"]

_RANK_OF = {
    "work": "rank",
    "memory_windows": "rank",
    "start_end_idle": "rank",
    "enclosing_pair": "outer_rank",
    "last_round_trip": "outer_rank",
    "microbatch_work": "rank",
}
"""Methods that bound the time that one rank computes -> what their witness calls that rank."""


def least_once_a_step(instance: Instance) -> int:
    """Return what every order pays beside its F's, B's and W's, whatever rank decides, in ns."""
    ranks = range(instance.num_ranks)
    tails = [_tail(instance, rank) for rank in ranks]
    if instance.objective == "makespan":
        return _first_gather(instance) + min(tails)
    return min(_gather(instance, rank) + tails[rank] for rank in ranks)


def with_once_a_step(instance: Instance, bounds: Iterable[Bound]) -> Iterator[Bound]:
    """Yield bounds on F's, B's and W's alone as bounds on the whole step."""
    if not instance.steps.any:
        yield from bounds
        return
    least = least_once_a_step(instance)
    ends_of = {"head_and_work"} | ({"microbatch_work"} if instance.objective == "makespan" else set())
    for bound in bounds:
        more, rank = least, bound.witness.get(_RANK_OF.get(bound.method, "rank"))
        if isinstance(rank, int) and bound.method in ends_of:
            more = _first_gather(instance) + _tail(instance, rank)
        elif isinstance(rank, int) and bound.method in _RANK_OF:
            more = _gather(instance, rank) + _tail(instance, rank)
        witness = {**bound.witness, "once_a_step_ns": more}
        yield replace(bound, value_ns=bound.value_ns + more, witness=witness)


def _gather(instance: Instance, rank: int) -> int:
    return min(instance.steps.gather[s] for s in instance.stages_of[rank])


def _tail(instance: Instance, rank: int) -> int:
    reduction = min(instance.steps.reduce[s] for s in instance.stages_of[rank])
    return reduction + instance.steps.update[rank]


def _first_gather(instance: Instance) -> int:
    sources = (s for s in range(instance.num_stages) if not instance.forward_from[s])
    return min(instance.steps.gather[s] for s in sources)
