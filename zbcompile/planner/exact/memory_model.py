"""Memory in the exact model: what a rank holds after each action that may raise it is within its headroom.

The rule of `zbcompile.schedule.memory`, stated anew. F holds most from its start on, other actions when they
end, so each is asked about with itself done. What may raise the bytes of a rank:

- every F;
- a B where M_W > M_B;
- a BW whose gradients wait for their turn in the sum (`zbcompile.schedule.held_gradients`), where a set of
  gradients is more than M_B;
- the W of microbatch 0, where a set is more than M_W: static bytes count one set, which was the first that
  waits and becomes the sum.

The W's of a stage run in microbatch order, so only gradients of fused backwards wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ortools.sat.python import cp_model

from zbcompile.planner.core.instance import B, F, Op, W
from zbcompile.planner.exact.order_model import Literal, OrderModel, negated

__all__ = ["add_memory"]


class _Place(NamedTuple):
    """An action after which a rank may hold more than before.

    Attributes
    ----------
    op
        The action.
    when
        Whether it runs in this form.
    fused
        Whether it is a backward as a BW.
    """

    op: Op
    when: Literal = True
    fused: bool = False


def add_memory(orders: OrderModel) -> None:
    """Keep every rank within its headroom."""
    instance = orders.instance
    at_once = instance.memory.most_at_once
    for rank, headroom in enumerate(instance.headroom):
        stages = instance.stages_of[rank]
        if instance.num_microbatches * sum(at_once[s] for s in stages) <= headroom:
            continue
        for place in _places(orders, rank):
            held = [term for s in stages for term in _held(orders, s, place)]
            within = orders.model.add(sum(held) <= headroom)
            if place.when is not True:
                within.only_enforce_if([place.when])


def _places(orders: OrderModel, rank: int) -> Iterator[_Place]:
    """Yield the places where a rank may hold most."""
    memory = orders.instance.memory
    for op in orders.rank_ops(rank, F):
        yield _Place(op)
    for op in orders.rank_ops(rank, B):
        _, s, i = op
        fused = orders.fused[s, i]
        if memory.pending[s] > memory.saved[s] and fused is not True:
            yield _Place(op, negated(fused))
        if memory.set_bytes[s] > memory.saved[s] and i and _may_wait(orders, s):
            yield _Place(op, fused, fused=True)
    for s in orders.instance.stages_of[rank]:
        if memory.set_bytes[s] > memory.pending[s] and _may_wait(orders, s):
            yield _Place((W, s, 0), orders.split((W, s, 0)))


def _may_wait(orders: OrderModel, s: int) -> bool:
    """Return whether gradients of a stage may wait: those of a BW for those of a W."""
    if not orders.instance.memory.set_bytes[s]:
        return False
    return any(not isinstance(orders.fused[s, i], bool) for i in range(orders.instance.num_microbatches))


def _held(orders: OrderModel, s: int, place: _Place) -> Iterator[cp_model.LinearExprT]:
    """Yield the bytes that a rank holds for one of its stages, in terms to add up."""
    memory, count = orders.instance.memory, orders.instance.num_microbatches
    saved, pending = memory.saved[s], memory.pending[s]
    come = [_gradients_came(orders, s, i, place) for i in range(count)]
    for i, summed in enumerate(come):
        yield saved * _done(orders, (F, s, i), place)
        yield (pending - saved) * _done(orders, (B, s, i), place)
        yield -pending * summed
    if _may_wait(orders, s):
        yield memory.set_bytes[s] * _waiting(orders.model, come)


def _done(orders: OrderModel, op: Op, place: _Place) -> Literal:
    """Return whether an action is done after that of the place."""
    return True if op == place.op else orders.precedes(op, place.op)


def _gradients_came(orders: OrderModel, s: int, i: int, place: _Place) -> Literal:
    """Return whether the gradients of a microbatch's weights have come, from W or BW."""
    fused, backward = orders.fused[s, i], _done(orders, (B, s, i), place)
    if fused is True or backward is False:
        return backward
    if (B, s, i) == place.op:
        return place.fused
    weight = _done(orders, (W, s, i), place)
    if fused is False or weight is True:
        return weight
    if weight is False:  # the place is the W of an earlier microbatch: only a BW may be done
        weight = orders.model.new_bool_var(f"came{s}.{i}")
        orders.model.add_implication(weight, fused)
    orders.model.add_bool_or([~fused, negated(weight), backward])
    orders.model.add_bool_or([~fused, weight, negated(backward)])
    return weight


def _waiting(model: cp_model.CpModel, come: Sequence[Literal]) -> cp_model.LinearExprT:
    """Return how many sets of gradients are held beside the one that static bytes count, or more.

    Those that have come, less those summed (the first few, all of which have come), less the first that
    waits while there is no sum.
    """
    terms: list[cp_model.LinearExprT] = list(come)
    before: Literal = True
    for here in come:
        summed = model.new_bool_var("summed")
        model.add_bool_and([here, before]).only_enforce_if(summed)
        terms.append(-1 * summed)
        before = summed
    if come[0] is not True:
        first = model.new_bool_var("first that waits")
        model.add_implication(first, negated(come[0]))
        model.add_bool_or([~first, *come])
        terms.append(-1 * first)
    return sum(terms)
