"""F, B and W of one stage against plain autograd and torch's own split: time and bytes held.

    python benchmarks/split.py [--hidden 512] [--rounds 15] [--backend inductor] [--json FILE]

One run measures everything side by side. In each round every way runs twice, in an order that rotates, and
its second run counts: its processor time (of one thread, so that other work on the machine counts little)
is divided by that of plain autograd in the same round. The table gives the median, and beside it the ratio
of the fastest rounds. Bytes held: what the C allocator counts as in use (glibc), with the prediction beside
it, in units of one (length x batch x hidden) tensor per layer.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.allocator import bytes_in_use
from benchmarks.stage_cases import CASES, LAYERS, StageCase
from zbcompile.passes.capture.capture import capture
from zbcompile.passes.capture.constant_masks import fold_constant_masks
from zbcompile.passes.partition.partition import partition
from zbcompile.passes.split.backends import compile_graph
from zbcompile.passes.split.split_backward import split_backward
from zbcompile.passes.split.stage_graphs import Graphs, StageGraphs

Phases = Iterator[None]
"""A way to run the stage once: a generator that pauses after F, after B and after W."""


@dataclass
class Way:
    """One way to run the stage. ``run(x, gy)`` is a generator; predicted: bytes after F and after B."""

    name: str
    run: Callable[[list[Tensor], list[Tensor]], Phases]
    predicted: tuple[int, int] | None = None
    held: tuple[int, int] = (0, 0)
    seconds: list[tuple[float, ...]] = field(default_factory=list)


def eager(stage: nn.Module) -> Way:
    """Plain autograd: forward, then one backward for inputs and parameters."""

    def run(x: list[Tensor], gy: list[Tensor]) -> Phases:
        given = x.pop().requires_grad_()
        y = stage(given)
        root = y.grad_fn
        shape = torch.autograd.graph.get_gradient_edge(y)
        del y, given
        yield
        torch.autograd.backward([shape], [gy.pop()])
        del root, shape
        yield
        yield

    return Way("eager autograd", run)


def torch_split(stage: nn.Module) -> Way:
    """torch.distributed.pipelining: stage_backward_input and stage_backward_weight."""
    parameters = list(stage.parameters())

    def run(x: list[Tensor], gy: list[Tensor]) -> Phases:
        given = x.pop().requires_grad_()
        y = stage(given)
        yield
        _, groups = stage_backward_input([y], [gy.pop()], [given], iter(parameters))
        del y, given
        yield
        stage_backward_weight(iter(parameters), groups)
        del groups
        yield

    return Way("torch's split", run)


def ours(name: str, stage: StageGraphs, state: Mapping[str, Tensor], *, fused: bool = False) -> Way:
    """The stage's graphs: F, then B and W or the fused BW; gradients land in ``.grad`` as with autograd."""

    def keep(grads: dict[str, Tensor]) -> None:
        for name, grad in grads.items():
            state[name].grad = grad

    def run(x: list[Tensor], gy: list[Tensor]) -> Phases:
        with torch.no_grad():
            outputs, saved = stage.run_forward(state, [x.pop()])
            del outputs
            yield
            grads: list[Tensor | None] = [gy.pop()]
            if fused:
                keep(stage.run_full_backward(saved, grads)[1])
                yield
            else:
                after = stage.run_backward_input(saved, grads)[1]
                yield
                keep(stage.run_backward_weight(after))
            yield

    return Way(name, run, (stage.saved_bytes, stage.saved_for_weight_bytes))


def measure_held(way: Way, shape: Sequence[int], parameters: Sequence[nn.Parameter]) -> tuple[int, int]:
    """Bytes in use after F and after B above those before, without parameters and their gradients."""
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = None
        gc.collect()
        before = bytes_in_use()
        x, gy = [torch.randn(*shape)], []
        phases = way.run(x, gy)
        next(phases)
        after_forward = bytes_in_use() - before
        gy.append(torch.randn(*shape))
        next(phases)
        own = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        after_backward = bytes_in_use() - before - own
        for _ in phases:
            pass
    return after_forward, after_backward


def measure_times(
    ways: Sequence[Way], shape: Sequence[int], parameters: Sequence[nn.Parameter], rounds: int, inner: int
) -> None:
    """``rounds`` rounds after a warm one, order rotating. Each way runs ``inner`` times per round, after an
    untimed run that makes caches and allocator its own: else it pays for what the way before left there."""
    x0, gy0 = torch.randn(*shape), torch.randn(*shape)
    for number in range(-1, rounds):
        turn = number % len(ways)
        for way in [*ways[turn:], *ways[:turn]]:
            total = [0.0, 0.0, 0.0]
            for run in range(-1, inner):
                for parameter in parameters:
                    parameter.grad = None
                phases = way.run([x0.clone()], [gy0.clone()])
                begin = time.process_time()
                for phase in range(3):
                    next(phases)
                    end = time.process_time()
                    total[phase] += (end - begin) * (run >= 0)
                    begin = end
            if number >= 0:
                way.seconds.append(tuple(t / inner for t in total))


def ratio(way: Way, base: Way) -> float:
    """Median over rounds of this way's F + B + W over that of ``base`` in the same round."""
    pairs = zip(way.seconds, base.seconds, strict=True)
    return statistics.median(sum(mine) / sum(theirs) for mine, theirs in pairs)


def ratio_of_best(way: Way, base: Way) -> float:
    """Fastest round of this way over the fastest of ``base``: what is left when nothing disturbs."""
    return min(sum(s) for s in way.seconds) / min(sum(s) for s in base.seconds)


def ways_of(
    case: StageCase, backends: Sequence[str], recomputes: Sequence[str | float]
) -> tuple[list[Way], list[nn.Parameter]]:
    """Every way to run the middle stage of ``case``."""
    torch.manual_seed(0)
    model = case.build(case.hidden)
    blocks = case.blocks(model)
    captured = capture(model, *case.example())
    fold_constant_masks(captured)
    sources = partition(captured, 3, split_points=case.split_points)
    ways = [eager(blocks), torch_split(blocks)]
    for backend in backends:
        for recompute in recomputes:
            stage = split_backward(captured, sources, recompute=recompute, backend=backend)[1]
            fused = recompute == "none" and backend == "eager"
            calls = [compile_graph(stage, name, backend) for name in Graphs.__slots__[: 3 + fused]]
            stage = replace(stage, calls=(*calls, *stage.calls[len(calls) :]))
            label = f"{recompute:.0e} B/s" if isinstance(recompute, float) else recompute
            ways.append(ours(f"{backend}, recompute {label}", stage, captured.state))
            if fused:
                ways.append(ours(f"{backend}, fused BW", stage, captured.state, fused=True))
    return ways, list(blocks.parameters())


def rows_of(case: StageCase, ways: Sequence[Way]) -> list[dict[str, Any]]:
    """One record per way: milliseconds per phase, ratio, bytes held in sbh per layer."""
    unit = case.sbh_bytes * LAYERS
    rows = []
    for way in ways:
        forward, backward, weight = (statistics.median(s[i] for s in way.seconds) * 1e3 for i in range(3))
        predicted = way.predicted or (None, None)
        rows.append(
            {
                "stage": case.name,
                "hidden": case.hidden,
                "way": way.name,
                "forward_ms": round(forward, 3),
                "backward_ms": round(backward, 3),
                "weight_ms": round(weight, 3),
                "ratio_to_eager": round(ratio(way, ways[0]), 4),
                "best_ratio_to_eager": round(ratio_of_best(way, ways[0]), 4),
                "held_after_forward_sbh": round(way.held[0] / unit, 3),
                "held_after_backward_sbh": round(way.held[1] / unit, 3),
                "predicted_after_forward_sbh": predicted[0] and round(predicted[0] / unit, 3),
                "predicted_after_backward_sbh": predicted[1] and round(predicted[1] / unit, 3),
            }
        )
    return rows


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """The records of one stage as a table."""
    title = f"{rows[0]['stage']}, 2 layers, batch 4, length 256, hidden {rows[0]['hidden']}"
    table = Table(title=title, title_justify="left")
    heads = (
        "",
        "F ms",
        "B ms",
        "W ms",
        "F+B+W / eager",
        "best / best",
        "held after F",
        "predicted",
        "held after B",
        "predicted",
    )
    for head in heads:
        table.add_column(head, justify="left" if not head else "right")
    for row in rows:
        cells = [f"{row[key]:.1f}" for key in ("forward_ms", "backward_ms", "weight_ms")]
        cells += [f"{row['ratio_to_eager']:.3f}", f"{row['best_ratio_to_eager']:.3f}"]
        for when in ("forward", "backward"):
            cells.append(f"{row[f'held_after_{when}_sbh']:.2f}")
            predicted = row[f"predicted_after_{when}_sbh"]
            cells.append("" if predicted is None else f"{predicted:.2f}")
        table.add_row(row["way"], *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--inner", type=int, default=1, help="runs per round (more for tiny stages)")
    parser.add_argument("--backend", choices=("eager", "inductor"), action="append", help="default: eager")
    parser.add_argument("--price", type=float, default=3e9, help="of recompute, bytes per second")
    parser.add_argument(
        "--recompute", action="append", help="none, min_memory or full; default: none, the price, min_memory"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the records here, - for stdout")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(stderr=options.json == "-", width=130)
    recomputes = options.recompute or ["none", options.price, "min_memory"]
    records = []
    for name in options.case or list(CASES):
        case = CASES[name](options.hidden)
        ways, parameters = ways_of(case, options.backend or ["eager"], recomputes)
        for way in ways:
            way.held = measure_held(way, case.shape, parameters)
        measure_times(ways, case.shape, parameters, options.rounds, options.inner)
        rows = rows_of(case, ways)
        records += rows
        console.print(table_of(rows))
    if options.json == "-":
        print(json.dumps(records, indent=1))
    elif options.json:
        temporary = options.json + ".tmp"
        Path(temporary).write_text(json.dumps(records, indent=1) + "\n")
        os.replace(temporary, options.json)


if __name__ == "__main__":
    main()
