"""Random streams: every forward of (stage, microbatch) draws from a stream of its own.

The stream's seed is a hash of (seed, step, stage, microbatch), so dropout masks are the same whether the
ranks share a process or not, whatever the order of the schedule is, and a step run again with the same seed
and step number gives the same bits. The surrounding random state is left as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch.fx import GraphModule

__all__ = ["draws_random_numbers", "generators_of", "stream", "stream_seed"]


def stream_seed(seed: int, step: int, stage: int, microbatch: int) -> int:
    """Return a 63-bit hash of the four numbers."""
    words = b"".join(int(n).to_bytes(16, "little", signed=True) for n in (seed, step, stage, microbatch))
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def stream(value: int, device: torch.device) -> Iterator[None]:
    """Draw from the stream of seed ``value`` on the CPU and on ``device``; restore both states afterwards."""
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(value)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return torch's generators that code on a device draws from: the CPU's, and the device's own."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


def draws_random_numbers(module: GraphModule) -> bool:
    """Whether torch tags any call of the graph, or of a graph inside it, as drawing random numbers."""
    for inner in module.modules():
        if not isinstance(inner, GraphModule):
            continue
        for node in inner.graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                return True
    return False
