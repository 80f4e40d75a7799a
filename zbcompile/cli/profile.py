"""``zbcompile profile``: a model's stages and what they cost."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zbcompile.cli.inputs import say
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import UsageError, ZBCompileError
from zbcompile.formats import profile_json
from zbcompile.formats.files import write_text
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.passes.capture.meta_capture import planned_device
from zbcompile.passes.profile.counted import counted_profile
from zbcompile.passes.profile.measure import measure
from zbcompile.schedule.devices import device_named

__all__ = ["profile"]

_SHAPE = (
    "(model, example) or (model, example, loss_fn, target); example is a tuple of args or a dict of kwargs"
)


_Made = tuple[nn.Module, Sequence[Any], Mapping[str, Any], Callable[..., Any] | None, Any]


def profile(arguments: argparse.Namespace) -> int:
    """Cut the model, say what each stage holds, write the profile.

    With a device the model is built without weights where that works, and nothing of it is run.
    """
    device = None if arguments.device is None else device_named(arguments.device)
    model, args, kwargs, loss_fn, target = (
        _made(arguments.factory) if device is None else _made_without_weights(arguments.factory)
    )
    front = build_stages(
        model,
        arguments.stages,
        args,
        kwargs,
        target=None if loss_fn is None else target,
        loss_fn=loss_fn,
        verify=None if device is None else False,
    )
    for report in front.reports:
        say(report)
    if device is None:
        costs = measure(front.stages, front.captured.state, front.flat_inputs(args, kwargs, target))
    else:
        costs = counted_profile(front.stages, device)
    write_text(
        arguments.output, profile_json.dumps(ProfileFile(costs, num_microbatches=arguments.microbatches))
    )
    return 0


def _made_without_weights(text: str) -> _Made:
    """Call the factory with meta as the default device; normally if it needs real values while it builds."""
    factory = _factory(text)
    try:
        with torch.device("meta"):
            made = factory()
        if isinstance(made, tuple) and made and isinstance(made[0], nn.Module):
            planned_device(made[0], ())
    except Exception as error:
        say(f"{text} needs values while it builds ({type(error).__name__}): built with weights, not run")
        made = _run(text, factory)
    return _checked(text, made)


def _made(text: str) -> _Made:
    return _checked(text, _run(text, _factory(text)))


def _run(text: str, code: Callable[[], Any]) -> Any:
    """Run the user's code; what it raises becomes an error with its line."""
    try:
        return code()
    except ZBCompileError:
        raise
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else text
        raise UsageError(f"{text} failed: {type(error).__name__}: {error}", where=place) from error


def _factory(text: str) -> Callable[[], Any]:
    """The function that ``package.module:function`` or ``path.py:function`` names."""
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise UsageError(
            f"{text[:60]!r} is no factory", fix="write package.module:function or path.py:function"
        )
    found = getattr(_module(place), name, None)
    if not callable(found):
        raise UsageError(f"{place} has no function {name}", where=text)
    return found  # type: ignore[no-any-return]


def _checked(text: str, result: Any) -> _Made:
    """What the factory returned, in one form."""
    if not isinstance(result, tuple) or len(result) not in (2, 4) or not isinstance(result[0], nn.Module):
        raise UsageError(f"{text} returned something else", needed=_SHAPE, given=type(result).__name__)
    model, example = result[:2]
    loss_fn, target = result[2:] if len(result) == 4 else (None, None)
    if isinstance(example, dict):
        return model, (), example, loss_fn, target
    if not isinstance(example, tuple | list):
        raise UsageError(f"{text} returned no example", needed=_SHAPE, given=type(example).__name__)
    return model, tuple(example), {}, loss_fn, target


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        try:
            return _run(place, partial(importlib.import_module, place))
        except UsageError as error:
            if isinstance(error.__cause__, ModuleNotFoundError):
                error.fix = "run where it can be imported"
            raise
    path = Path(place)
    if not path.is_file():
        raise UsageError("no such file", where=place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError("not a Python file", where=place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    _run(place, partial(spec.loader.exec_module, module))
    return module
