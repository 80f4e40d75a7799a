"""``zbcompile profile``: a model's stages and what they cost."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from zbcompile import driver
from zbcompile.cli_input import say
from zbcompile.errors import UsageError
from zbcompile.formats import profile_json
from zbcompile.formats.files import write_text
from zbcompile.formats.profile_json import ProfileFile

__all__ = ["profile"]

_SHAPE = (
    "(model, example) or (model, example, loss_fn, target); example is a tuple of args or a dict of kwargs"
)


def profile(arguments: argparse.Namespace) -> int:
    """Cut the model, say what each stage holds, write the profile."""
    model, args, kwargs, loss_fn, target = _made(arguments.factory)
    wanted = {} if loss_fn is None else {"loss_fn": loss_fn, "target": target}
    front = driver.build_front(model, arguments.stages, args, kwargs, **wanted)
    for report in front.reports:
        say(report)
    if arguments.device is None:
        costs = driver.measured(front, front.flat_inputs(args, kwargs, target))
    else:
        costs = driver.counted(front, arguments.device)
    write_text(
        arguments.output, profile_json.dumps(ProfileFile(costs, num_microbatches=arguments.microbatches))
    )
    return 0


def _made(text: str) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any], Callable[..., Any] | None, Any]:
    """Call the factory that ``package.module:function`` or ``path.py:function`` names."""
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise UsageError(
            f"{text[:60]!r} is no factory", fix="write package.module:function or path.py:function"
        )
    made = getattr(_module(place), name, None)
    if not callable(made):
        raise UsageError(f"{place} has no function {name}", where=text)
    result = made()
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
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"no module {error.name}", where=place, fix="run where it can be imported"
            ) from None
    path = Path(place)
    if not path.is_file():
        raise UsageError("no such file", where=place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError("not a Python file", where=place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
