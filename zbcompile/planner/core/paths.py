"""Longest paths through one microbatch's F's and B's: time that every order must spend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from zbcompile.planner.core.instance import Instance, is_path
from zbcompile.schedule.dependency_graph import step_graph

__all__ = ["NO_PATH", "Paths"]

NO_PATH = -1


@dataclass(frozen=True, slots=True)
class Paths(ABC):
    """Longest paths of one microbatch in ns. Node s is F of stage s, node S + s is B of stage s.

    Attributes
    ----------
    num_stages
        S.
    head
        Least time from the begin of the step to the start of a node.
    tail
        Least time from the start of a node to the end of the step.
    """

    num_stages: int
    head: tuple[int, ...]
    tail: tuple[int, ...]

    @staticmethod
    def of(instance: Instance) -> Paths:
        """Find the longest paths: by sums along a plain chain of stages, else by a table of all pairs."""
        return _ChainPaths.along(instance) if is_path(instance) else _AllPaths.between(instance)

    @abstractmethod
    def f_to_f(self, a: int, b: int) -> int:
        """Return the longest path from the start of F(a) to the start of F(b), `NO_PATH` if there is none."""

    @abstractmethod
    def f_to_b(self, a: int, b: int) -> int:
        """Return the longest path from the start of F(a) to the start of B(b)."""

    @abstractmethod
    def b_to_b(self, a: int, b: int) -> int:
        """Return the longest path from the start of B(a) to the start of B(b)."""


@dataclass(frozen=True, slots=True)
class _ChainPaths(Paths):
    """Paths where each stage feeds the next one and gets its gradient: down the F's, then up the B's.

    Attributes
    ----------
    down
        Time from the start of F(0) to that of F(s).
    up
        Time from the start of B(S - 1) to that of B(s).
    around
        Time from the start of F(0) to that of B(S - 1).
    """

    down: tuple[int, ...]
    up: tuple[int, ...]
    around: int

    @staticmethod
    def along(instance: Instance) -> _ChainPaths:
        """Add up a chain's times and lags."""
        count = instance.num_stages
        f, b, w = instance.forward, instance.backward, instance.weight
        steps = [f[s] + instance.forward_from[s + 1][0][1] for s in range(count - 1)]
        back = [b[s + 1] + instance.backward_from[s][0][1] for s in range(count - 2, -1, -1)]
        down = tuple(accumulate(steps, initial=0))
        up = tuple(accumulate(back, initial=0))[::-1]
        around = down[-1] + f[-1]
        ends = list(accumulate((up[s] + b[s] + w[s] for s in range(count)), max))
        head = (*down, *(around + length for length in up))
        tail = (*(around - before + ends[-1] for before in down), *map(int.__sub__, ends, up))
        return _ChainPaths(count, head, tail, down, up, around)

    def f_to_f(self, a: int, b: int) -> int:
        return self.down[b] - self.down[a] if a <= b else NO_PATH

    def f_to_b(self, a: int, b: int) -> int:
        return self.around - self.down[a] + self.up[b]

    def b_to_b(self, a: int, b: int) -> int:
        return self.up[b] - self.up[a] if a >= b else NO_PATH


@dataclass(frozen=True, slots=True)
class _AllPaths(Paths):
    """Paths between all pairs of nodes.

    Attributes
    ----------
    longest
        ``longest[a][b]`` is the least time from the start of a to the start of b, `NO_PATH` if b does not
        wait for a.
    """

    longest: tuple[tuple[int, ...], ...]

    @staticmethod
    def between(instance: Instance) -> _AllPaths:
        """Find all pairs, by one pass per node over the dependency graph in topological order."""
        import networkx as nx  # here, and not above: a plain chain needs no graph

        count = instance.num_stages
        graph = step_graph(instance.rules, (instance.forward, instance.backward, instance.weight))
        number = {node: k * count + s for node in graph for k, s in (node,)}
        order = [number[node] for node in nx.topological_sort(graph)]
        arcs: list[list[tuple[int, int]]] = [[] for _ in order]
        for before, after, least in graph.edges(data="least_ns"):
            arcs[number[before]].append((number[after], least))
        inner = [node for node in order if node < 2 * count]
        inner_arcs = [[arc for arc in row if arc[0] < 2 * count] for row in arcs]
        longest: list[tuple[int, ...]] = [()] * (2 * count)
        for position, node in enumerate(inner):
            far = [NO_PATH] * (2 * count)
            far[node] = 0
            for here in inner[position:]:
                if far[here] != NO_PATH:
                    for there, length in inner_arcs[here]:
                        far[there] = max(far[there], far[here] + length)
            longest[node] = tuple(far)
        ends = (*instance.forward, *instance.backward, *instance.weight)
        head, tail = _heads(arcs, order), _tails(arcs, order, ends)
        return _AllPaths(count, head[: 2 * count], tail[: 2 * count], tuple(longest))

    def f_to_f(self, a: int, b: int) -> int:
        return self.longest[a][b]

    def f_to_b(self, a: int, b: int) -> int:
        return self.longest[a][self.num_stages + b]

    def b_to_b(self, a: int, b: int) -> int:
        return self.longest[self.num_stages + a][self.num_stages + b]


Arcs = Sequence[Sequence[tuple[int, int]]]
"""What waits for every node, as (node, least time from start to start)."""


def _heads(arcs: Arcs, topological: Sequence[int]) -> tuple[int, ...]:
    """Return the longest path to the start of every node."""
    head = [0] * len(arcs)
    for node in topological:
        for there, length in arcs[node]:
            head[there] = max(head[there], head[node] + length)
    return tuple(head)


def _tails(arcs: Arcs, topological: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
    """Return the longest path from the start of every node to the end of one that takes ``ends``."""
    tail = list(ends)
    for node in reversed(topological):
        for there, length in arcs[node]:
            tail[node] = max(tail[node], length + tail[there])
    return tuple(tail)
