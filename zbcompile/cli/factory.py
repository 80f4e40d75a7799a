"""Builds the model and the example that the user's factory returns."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zbcompile.errors import UsageError, ZBCompileError
from zbcompile.formats.streams import say
from zbcompile.passes.capture.meta_capture import planned_device

__all__ = ["Example", "build", "build_without_weights"]

_SHAPE = (
    "(model, example) or (model, example, loss_fn, target); example is a tuple of args or a dict of kwargs"
)
T = TypeVar("T")


@dataclass(frozen=True)
class Example:
    """A model and the arguments of one microbatch.

    Attributes
    ----------
    model
        The model.
    args, kwargs
        Arguments of its forward. They are the user's own values, of any type.
    loss_fn, target
        The loss and its second argument; None when the model returns its loss.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: Callable[..., Tensor] | None
    target: Any


def build(text: str) -> Example:
    """Call the factory that ``package.module:function`` or ``path.py:function`` names.

    Raises
    ------
    UsageError
        There is no such function, it raised (the error names the line), or it returned something else.
    """
    return _checked(text, _run(text, _factory(text)))


def build_without_weights(text: str) -> Example:
    """Call the factory with meta as the default device; normally if it needs real values while it builds.

    Raises
    ------
    UsageError
        As `build`.
    """
    factory = _factory(text)
    try:
        with torch.device("meta"), contextlib.redirect_stdout(sys.stderr):
            made = factory()
        if isinstance(made, tuple) and made and isinstance(made[0], nn.Module):
            planned_device(made[0], ())
    except (Exception, SystemExit) as error:
        say(f"{text} needs values while it builds ({type(error).__name__}): built with weights, not run")
        made = _run(text, factory)
    return _checked(text, made)


def _run(text: str, code: Callable[[], T]) -> T:
    """Run the user's code; an exception becomes an error with its line. What it prints is talk, not data."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return code()
    except ZBCompileError:
        raise
    except (Exception, SystemExit) as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        line = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else text
        raise UsageError(f"{text} failed: {type(error).__name__}: {error}", where=line) from error


def _factory(text: str) -> Callable[[], object]:
    """Find the function."""
    source, _, name = text.rpartition(":")
    if not source or not name.isidentifier():
        raise UsageError(
            f"{text[:60]!r} is no factory", fix="write package.module:function or path.py:function"
        )
    found: Callable[[], object] | None = getattr(_module(source), name, None)
    if not callable(found):
        raise UsageError(f"{source} has no function {name}", where=text)
    return found


def _checked(text: str, result: object) -> Example:
    """Return what the factory returned in one form."""
    if not isinstance(result, tuple) or len(result) not in (2, 4) or not isinstance(result[0], nn.Module):
        raise UsageError(f"{text} returned something else", needed=_SHAPE, given=type(result).__name__)
    model, example = result[:2]
    loss_fn, target = result[2:] if len(result) == 4 else (None, None)
    if isinstance(example, dict):
        return Example(model, (), example, loss_fn, target)
    if not isinstance(example, tuple | list):
        raise UsageError(f"{text} returned no example", needed=_SHAPE, given=type(example).__name__)
    return Example(model, tuple(example), {}, loss_fn, target)


def _module(source: str) -> ModuleType:
    """Import ``package.module``, or run ``path.py`` as a module."""
    if not source.endswith(".py"):
        try:
            return _run(source, partial(importlib.import_module, source))
        except UsageError as error:
            if isinstance(error.__cause__, ModuleNotFoundError):
                error.fix = "run where it can be imported"
            raise
    path = Path(source)
    if not path.is_file():
        raise UsageError("no such file", where=source)
    name = path.stem
    while name in sys.modules or name in sys.stdlib_module_names:
        name += "_"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError("not a Python file", where=source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _run(source, partial(spec.loader.exec_module, module))
    return module
