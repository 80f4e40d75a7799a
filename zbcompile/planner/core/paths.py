"""Longest paths through one microbatch's F's and B's: time that every order must spend."""

from __future__ import annotations

from dataclasses import dataclass

from zbcompile.planner.core.instance import Instance

__all__ = ["NO_PATH", "Paths"]

NO_PATH = -1


@dataclass(frozen=True, slots=True)
class Paths:
    """Longest paths of one microbatch in ns. Node s is F of stage s, node S + s is B of stage s.

    Attributes
    ----------
    num_stages
        S.
    longest
        ``longest[a][b]`` is the least time from the start of a to the start of b, `NO_PATH` if b does not
        wait for a.
    head
        Least time from the begin of the step to the start of a node.
    tail
        Least time from the start of a node to the end of the step.
    """

    num_stages: int
    longest: tuple[tuple[int, ...], ...]
    head: tuple[int, ...]
    tail: tuple[int, ...]

    @staticmethod
    def of(instance: Instance) -> Paths:
        """Find all pairs, by one pass per node over the topological order F(0..S-1), B(S-1..0)."""
        count = instance.num_stages
        arcs: list[list[tuple[int, int]]] = [[] for _ in range(2 * count)]
        for stage in range(count):
            arcs[stage].append((count + stage, instance.forward[stage]))
            for source, lag in instance.forward_from[stage]:
                arcs[source].append((stage, instance.forward[source] + lag))
            for target, lag in instance.backward_from[stage]:
                arcs[count + target].append((count + stage, instance.backward[target] + lag))
        topological = [*range(count), *range(2 * count - 1, count - 1, -1)]
        rows = []
        for position, node in enumerate(topological):
            far = [NO_PATH] * (2 * count)
            far[node] = 0
            for here in topological[position:]:
                if far[here] != NO_PATH:
                    for there, length in arcs[here]:
                        far[there] = max(far[there], far[here] + length)
            rows.append((node, tuple(far)))
        longest = tuple(row for _, row in sorted(rows))
        head = tuple(max(longest[a][b] for a in range(2 * count)) for b in range(2 * count))
        last = [instance.forward[s] for s in range(count)] + [
            instance.backward[s] + instance.weight[s] for s in range(count)
        ]
        tail = tuple(
            max(longest[a][b] + last[b] for b in range(2 * count) if longest[a][b] != NO_PATH)
            for a in range(2 * count)
        )
        return Paths(count, longest, head, tail)

    def f_to_f(self, a: int, b: int) -> int:
        """Return the longest path from the start of F(a) to the start of F(b)."""
        return self.longest[a][b]

    def f_to_b(self, a: int, b: int) -> int:
        """Return the longest path from the start of F(a) to the start of B(b)."""
        return self.longest[a][self.num_stages + b]

    def b_to_b(self, a: int, b: int) -> int:
        """Return the longest path from the start of B(a) to the start of B(b)."""
        return self.longest[self.num_stages + a][self.num_stages + b]
