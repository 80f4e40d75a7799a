"""One configuration through the compiler, a step, and an independent comparison with plain autograd."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zbcompile
from benchmarks.model_cases.case import Inputs, ModelCase
from zbcompile.autograd_oracle import autograd_step, count_draws
from zbcompile.errors import ZBCompileError
from zbcompile.schedule.ir import Schedule

MICROBATCHES = 2
ROUNDED = 1e-6
"""Largest relative difference that counts as the order of a sum."""

GRADIENT = "gradient of "
Values = dict[str, Tensor | None]

__all__ = ["Row", "Verdict", "check", "compared"]


class Verdict(StrEnum):
    """How a configuration ended."""

    RIGHT = "right"
    OPTION = "right with an option"
    REFUSED = "refused"
    CRASH = "crash"
    WRONG = "wrong"
    SLOW = "too slow"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Row:
    """What became of one configuration.

    Attributes
    ----------
    name, family
        Of the configuration.
    verdict
        How it ended.
    detail
        Right: ``bitwise`` or the largest relative difference, then the option. Otherwise the reason in one
        line.
    at
        The last step of the compiler that was finished.
    seconds
        Processor time.
    """

    name: str
    family: str
    verdict: Verdict
    detail: str
    at: str = ""
    seconds: float = 0.0


class _Microbatch(nn.Module):
    """The untouched model and its loss, called by the number of a microbatch; keeps what it returned."""

    def __init__(self, model: nn.Module, parts: Sequence[Inputs], loss: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.model, self.parts, self.loss = model, parts, loss
        self.outputs: list[Any] = []

    def forward(self, number: int) -> Tensor:
        part = self.parts[number]
        value = self.model(*part.args, **part.kwargs)
        self.outputs.append(pytree.tree_map_only(Tensor, Tensor.detach, value))
        if self.loss is not None:
            return self.loss(value, part.target)
        if isinstance(value, dict):
            return value["loss"]
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        return next((leaf for leaf in leaves if not leaf.dim()), leaves[0])


def check(case: ModelCase, say: Callable[[str], None]) -> Row:
    """Compile one configuration, run a step and compare it with autograd; ``say`` hears of each step.

    A configuration whose untouched model does not run is not run: that is a fault of the configuration, not
    of the compiler.
    """

    def row(verdict: Verdict, detail: str) -> Row:
        return Row(case.name, case.family, verdict, detail)

    warnings.simplefilter("ignore")
    try:
        say("the untouched model")
        _untouched(case)
        model, batch = _made(case)
    except Exception as error:  # a package that is another version, a configuration that is none
        return row(Verdict.NOT_RUN, f"the model alone fails: {_one_line(error)}")
    try:
        pipeline = zbcompile.compile(
            model,
            case.stages,
            example_args=batch.args,
            example_kwargs=batch.kwargs,
            example_target=batch.target,
            loss_fn=case.loss,
            num_microbatches=MICROBATCHES,
            whole=batch.whole,
            **({"constant": batch.constant} if batch.constant else {}),
            **case.options,
            schedule=_order(case.stages),
            verify=True,
            observer=lambda name, artifact: say(name) if "." not in name else None,
        )
        say("compile")
        losses: list[Tensor] = []
        output = pipeline.step(
            *batch.args, target=batch.target, losses=losses, return_outputs=case.joined, **batch.kwargs
        )
        say("step")
    except ZBCompileError as error:
        if "report the model" in str(error):
            return row(Verdict.CRASH, f"found by verify: {_one_line(error)}")
        return row(Verdict.REFUSED, _one_line(error))
    except Exception as error:  # whatever torch or this package raises: that is the finding
        return row(Verdict.CRASH, f"{_one_line(error)} [{_place(error)}]")
    draws = [count_draws(stage) for stage in pipeline]
    pipeline.close()
    reference, again = _made(case)
    whole = _Microbatch(reference, again.microbatches(MICROBATCHES), case.loss)
    numbers = [{"number": i} for i in range(MICROBATCHES)]
    try:
        wanted = autograd_step(whole, numbers, lambda loss: loss, draws, seed=0, step=0)  # type: ignore[arg-type]
    except ZBCompileError as error:
        return row(Verdict.WRONG, _one_line(error))
    found = _values(model, losses, output)
    expected = _values(reference, wanted, _joined(whole.outputs) if case.joined else None)
    verdict, detail = compared(found, expected)
    if verdict is Verdict.RIGHT and (option := case.needs(batch)):
        return row(Verdict.OPTION, f"{detail}; {option}")
    return row(verdict, detail)


def _order(stages: int) -> Schedule:
    """1F1B with B and W apart: plans are not what is looked at here."""
    lines = [f"placement {' '.join(map(str, range(stages)))}", f"microbatches {MICROBATCHES}"]
    for stage in range(stages):
        warm = min(stages - stage, MICROBATCHES)
        words = [f"{stage}F{i}" for i in range(warm)]
        for i in range(MICROBATCHES):
            words += [f"{stage}B{i}", f"{stage}W{i}"]
            words += [f"{stage}F{warm + i}"] if warm + i < MICROBATCHES else []
        lines.append(f"rank {stage}: {' '.join(words)}")
    return Schedule.parse("\n".join(lines))


def _made(case: ModelCase) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model = case.build().train()
    torch.manual_seed(1)
    batch = case.batch(model)
    if case.ran_once:
        with torch.random.fork_rng():
            _Microbatch(model, batch.microbatches(MICROBATCHES), case.loss)(0)
    return model, batch


def _untouched(case: ModelCase) -> None:
    model, batch = _made(case)
    part = batch.microbatches(MICROBATCHES)
    loss = _Microbatch(model, part, case.loss)(0)
    if loss.dim():
        raise ValueError(f"its loss has the shape {list(loss.shape)}")
    loss.backward()
    if all(p.grad is None for p in model.parameters()):
        raise ValueError("no parameter gets a gradient")


def _values(model: nn.Module, losses: Sequence[Tensor], output: Any) -> Values:
    """Everything that is compared, by name."""
    found: Values = {f"loss {i}": loss for i, loss in enumerate(losses)}
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    found |= {f"output {i}": t for i, t in enumerate(leaves)}
    found |= {f"{GRADIENT}{name}": p.grad for name, p in model.named_parameters()}
    found |= {f"parameter {name}": p for name, p in model.named_parameters()}
    found |= {f"buffer {name}": b for name, b in model.named_buffers()}
    return found


def _joined(outputs: Sequence[Any]) -> Any:
    def join(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        return torch.cat(leaves) if leaves[0].dim() else torch.stack(leaves)

    return pytree.tree_map(join, *outputs)


def compared(found: Values, expected: Values) -> tuple[Verdict, str]:
    """Compare values by name; a difference is told relative to the norm of autograd's value.

    A gradient that is zero but for rounding is compared with a tenth of the typical one.
    """
    grads = [_norm(t) for name, t in expected.items() if t is not None and name.startswith(GRADIENT)]
    floor = 0.1 * (sum(norm**2 for norm in grads) / max(1, len(grads))) ** 0.5
    worst, where = 0.0, ""
    for name in dict.fromkeys((*expected, *found)):
        mine, theirs = found.get(name), expected.get(name)
        if name not in found or name not in expected or (mine is None) != (theirs is None):
            return Verdict.WRONG, f"{name}: on one side only"
        if mine is None or theirs is None:
            continue
        difference = _apart(mine, theirs, floor if name.startswith(GRADIENT) else 0.0)
        if not difference <= worst:
            worst, where = difference, name
    if not worst <= ROUNDED:
        return Verdict.WRONG, f"{where}: {worst:.1e} relative"
    return Verdict.RIGHT, f"{worst:.1e} in {where}" if worst else "bitwise"


def _apart(found: Tensor, expected: Tensor, floor: float) -> float:
    if found.dim() < expected.dim() == 1:  # a model's own loss is averaged, other numbers are stacked
        expected = expected.mean()
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    same = (found == expected) | (found.isnan() & expected.isnan())
    if bool(same.all()):
        return 0.0
    difference = _norm((_wide(found) - _wide(expected)).masked_fill(same, 0))
    return difference / max(_norm(expected), floor, 1e-300)


def _wide(value: Tensor) -> Tensor:
    return value.detach().to(torch.complex128 if value.is_complex() else torch.float64)


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(value)))


def _one_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, ZBCompileError) else f"{type(error).__name__}: {error}"
    return " | ".join(line.strip() for line in text.strip().splitlines()[:6] if line.strip())[:600]


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    with contextlib.suppress(StopIteration):
        own = next(f for f in reversed(frames) if "/passes/" in f.filename or "/zbcompile/" in f.filename)
        return f"{own.filename.rpartition('/')[2]}:{own.lineno} {own.name}"
    return ""
