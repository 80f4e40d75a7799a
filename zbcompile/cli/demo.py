"""``zbcompile demo``, ``profile`` and ``rehearse``: the commands that need torch."""

from __future__ import annotations

import argparse
import time

from rich.console import Console

from zbcompile import demo as gpt2_demo
from zbcompile.autograd_oracle import count_draws
from zbcompile.cli.inputs import parse_bytes, say
from zbcompile.formats.fields import format_json
from zbcompile.formats.files import write_text
from zbcompile.formats.schedule_json import ScheduleFile
from zbcompile.show.summary import plan_of, to_json
from zbcompile.show.timeline import Picture

__all__ = ["demo"]

_SHOWN_RANK = 1
_SHOWN_LINES = 42


def demo(arguments: argparse.Namespace) -> int:
    """The whole road on a real model; 1 when a loss or gradient is not what autograd gives."""
    limit = arguments.memory_limit
    settings = gpt2_demo.Settings(
        arguments.steps,
        arguments.microbatches,
        gpt2_demo.Settings.memory_limit if limit is None else parse_bytes(limit),
    )
    began = time.monotonic()

    def step(text: str) -> None:
        say(f"[{time.monotonic() - began:5.1f} s] {text}")

    model = gpt2_demo.gpt2(settings)
    count = sum(p.numel() for p in model.parameters())
    step(f"GPT-2, {settings.blocks} blocks, hidden {settings.hidden}, {count:,} parameters, dropout on")
    pipeline = gpt2_demo.compiled(settings, model, observer=lambda name, _: step(name))
    draws = [count_draws(stage) for stage in pipeline]
    plan = plan_of(ScheduleFile(pipeline.schedule, pipeline.solution.problem, pipeline.certificate))
    console = Console(stderr=arguments.json, highlight=False)
    console.print(Picture(plan))
    console.print(_excerpt(pipeline.source(_SHOWN_RANK)), markup=False)
    step(f"training on {plan.timeline.schedule.num_ranks} gloo processes")
    records = gpt2_demo.run_processes(settings, pipeline.solution)
    result = gpt2_demo.compare(settings, records, draws, step)
    step(_verdict(result))
    for line in result.wrong:
        say(f"wrong: {line}")
    if arguments.json:
        figures = {
            "plan": to_json(plan),
            "losses": list(result.losses),
            "reference_losses": list(result.reference_losses),
            "gradients_compared": result.compared,
            "gradients_bitwise_equal": result.equal,
            "tied_table_relative_difference": result.tied,
            "ok": result.ok,
        }
        write_text("-", format_json(figures))
    return 0 if result.ok else 1


def _excerpt(program: str) -> str:
    """The head of a program: what a rank runs."""
    lines = program.splitlines()
    rest = len(lines) - _SHOWN_LINES
    shown = lines[:_SHOWN_LINES] + ([f"... {rest} more lines"] if rest > 0 else [])
    return (
        f"\nThe program of rank {_SHOWN_RANK}:\n\n"
        + "\n".join(f"    {line}".rstrip() for line in shown)
        + "\n"
    )


def _verdict(result: gpt2_demo.Comparison) -> str:
    words = f"{result.equal} of {result.compared} gradients equal plain autograd to the bit"
    if result.equal < result.compared:
        words += f"; the tied table's within {result.tied:.1e} (its sum runs in another order)"
    return words + ("; every loss is equal" if result.losses == result.reference_losses else "")
