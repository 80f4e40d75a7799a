"""Kernels: plain functions over flat arrays, which numba compiles when they are first called with arrays.

The kernels use whole numbers, table look-ups and IEEE multiplications alone, so that they give the same
results compiled and as plain Python. numba is imported and kernels are compiled when a search first needs
them. Searches take the seconds that this costs off their clocks, and those of importing the solver
(`uncounted_seconds`).
"""

from __future__ import annotations

import functools
import signal
import threading
import time
import types
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zbcompile.signals import deferred_signals

__all__ = [
    "MakeVector",
    "SearchClock",
    "Vector",
    "can_compile",
    "has_kernels",
    "jit",
    "matrix",
    "uncounted",
    "uncounted_seconds",
    "vector",
]

Vector = Any
"""An int64 array or a list of ints."""

MakeVector = Callable[[Sequence[int]], Vector]
"""Makes the arrays of a problem: `vector`, or ``list`` for kernels in plain Python."""

_LOCK = threading.RLock()


class _Spent:
    """The seconds that this process has spent on what no limit counts, and whether kernels were among it."""

    seconds = 0.0
    kernels = False


def uncounted_seconds() -> float:
    """Return the seconds that this process has spent on importing numba and the solver and on its kernels."""
    return _Spent.seconds


def has_kernels() -> bool:
    """Return whether this process has compiled a kernel, or loaded a compiled one."""
    return _Spent.kernels


class SearchClock:
    """The seconds since a search began, without those that no limit counts."""

    def __init__(self) -> None:
        self.began, self.compiled = time.monotonic(), uncounted_seconds()

    @property
    def seconds(self) -> float:
        """The seconds that count against a limit."""
        return time.monotonic() - self.began - (uncounted_seconds() - self.compiled)


def uncounted(make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns; no limit counts the seconds.

    Ctrl-C is raised when it is done: a package that was loaded by half is of no use to what comes after.
    """
    began = time.monotonic()
    try:
        with deferred_signals(signal.SIGINT):
            return make()
    finally:
        _Spent.seconds += time.monotonic() - began


@functools.cache
def _numba() -> Any:
    """Return the module numba, or ``None``, and say why, if it cannot be used."""

    def load() -> Any:
        try:
            import numba
        except (ImportError, OSError) as error:
            text = f"the search runs in plain Python, about 25 times slower, since numba is missing: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return None
        return None if getattr(numba.config, "DISABLE_JIT", False) else numba

    with _LOCK:
        return uncounted(load)


def can_compile() -> bool:
    """Return whether numba is there and not switched off by ``NUMBA_DISABLE_JIT``."""
    return _numba() is not None


def vector(values: Sequence[int] | Sequence[float]) -> Vector:
    """Return the numbers given as compiled kernels want them: arrays, or a list where nothing is compiled."""
    if not can_compile():
        return list(values)
    import numpy

    kind = numpy.float64 if values and isinstance(values[0], float) else numpy.int64
    return numpy.array(values, dtype=kind)


class _Rows(dict[Any, int]):
    """A matrix in plain Python: elements by row and column, and a row as a list of its own."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        super().__init__(((r, k), number) for r, row in enumerate(rows) for k, number in enumerate(row))
        self.width = len(rows[0])

    def __missing__(self, row: int) -> list[int]:
        return [self[row, k] for k in range(self.width)]


_PLAIN = {list, _Rows}
"""Types of arrays on which kernels run as they are."""


def matrix(rows: Sequence[Sequence[int]]) -> Vector:
    """Return rows of one width as an array or as `_Rows`, as `vector` does for one row."""
    if not can_compile():
        return _Rows(rows)
    import numpy

    return numpy.array(rows, dtype=numpy.int64)


class _Kernel:
    """A function that runs compiled on arrays, and as it is on lists."""

    def __init__(self, function: types.FunctionType) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.compiled: Callable[..., Any] | None = None
        self.inner: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if not _PLAIN.isdisjoint(map(type, arguments)):
            return self.function(*arguments)
        if self.compiled is None:
            with _LOCK:
                if self.compiled is None:
                    self.compiled = uncounted(lambda: self._compile(arguments))
                    _Spent.kernels = True
        return self.compiled(*arguments)

    def called(self) -> dict[str, _Kernel]:
        """Return the kernels that this one calls, by name."""
        names = self.function.__code__.co_names
        found = {name: self.function.__globals__.get(name) for name in names}
        return {name: kernel for name, kernel in found.items() if isinstance(kernel, _Kernel)}

    def sources(self) -> Iterable[object]:
        """Yield what compiled code depends on: code and constants of this kernel and all that it calls."""
        code, known = self.function.__code__, self.function.__globals__
        yield code.co_code, code.co_consts, code.co_names
        modules = [vars(known[n]) for n in code.co_names if isinstance(known.get(n), types.ModuleType)]
        for names in (known, *modules):
            yield [names[name] for name in code.co_names if isinstance(names.get(name), (int, float))]
        for _, kernel in sorted(self.called().items()):
            yield from kernel.sources()

    def _compile(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the function compiled for arguments of these types, from the cache where it is there.

        Where no folder can be written, or the cache is broken, it is compiled without one.
        """
        signature = tuple(map(_numba().typeof, arguments))
        try:
            compiled = self.dispatcher(cache=True)
            compiled.compile(signature)
        except Exception:  # whatever a broken cache raises; a fault of the kernel is raised again below
            compiled = self.dispatcher(cache=False)
            compiled.compile(signature)
        found: Callable[..., Any] = compiled
        return found

    def dispatcher(self, **options: bool) -> Any:
        """Return numba's function for a copy that calls the compiled forms of the kernels it calls.

        Its name holds a checksum of its sources: numba's cache looks at the file of the function alone.
        """
        names = {name: kernel.called_by_kernels() for name, kernel in self.called().items()}
        given = self.function
        copy = types.FunctionType(given.__code__, {**given.__globals__, **names}, given.__name__)
        copy.__module__ = given.__module__
        copy.__qualname__ = f"{given.__qualname__}_{zlib.crc32(repr(list(self.sources())).encode()):08x}"
        return _numba().njit(nogil=True, **options)(copy)

    def called_by_kernels(self) -> Any:
        """Return numba's function that other kernels call.

        It is the one that Python calls, if that is there. Else it is compiled without what Python and C would
        call it by, and is part of what is cached of those kernels. A constant among its arguments is of no
        type of its own: it would be compiled again for every constant.
        """
        if self.inner is None:
            unliteral = _numba().types.unliteral
            self.inner = self.compiled or self.dispatcher(no_cpython_wrapper=True, no_cfunc_wrapper=True)
            template = self.inner.get_call_template
            self.inner.get_call_template = lambda args, kws: template(tuple(map(unliteral, args)), kws)
        return self.inner


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a module's function a kernel (see the module's text)."""
    assert isinstance(function, types.FunctionType)
    return _Kernel(function)
