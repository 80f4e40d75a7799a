"""Names of attributes that the code of forwards reads and sets, found in its bytecode.

``modules --> ForwardNames``. The code is followed from ``forward`` and the hooks through methods of the
modules' classes and through functions of the same files. Names are not told apart by object: a name that any
forward sets counts as set for every module.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType

from torch import nn

from zbcompile.passes.hooks import module_hooks

__all__ = ["ForwardNames"]

_FILLING = frozenset(
    ("add", "append", "appendleft", "clear", "extend", "insert", "pop", "popitem", "popleft", "remove")
) | {"setdefault", "update"}
"""Methods that change a container."""
_BY_TEXT = frozenset({"getattr", "hasattr", "setattr", "delattr"})


@dataclass(frozen=True)
class ForwardNames:
    """What the code of forwards does with names of attributes.

    Attributes
    ----------
    read
        Names that it uses.
    asked
        Names that it gives to ``getattr`` and ``hasattr`` as text.
    assigned
        Names that it sets or deletes.
    filled
        Names of what may be a container that it changes in place.
    """

    read: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()
    filled: frozenset[str] = frozenset()

    @staticmethod
    def of(modules: Iterable[nn.Module], others: Iterable[object] = ()) -> ForwardNames:
        """Return the names in the forwards and hooks of ``modules`` and in the functions ``others``."""
        modules = list(modules)
        classes = dict.fromkeys(c for kind in {type(m) for m in modules} for c in kind.__mro__)
        methods: dict[str, list[object]] = {}
        for owner in classes:
            if owner not in (object, nn.Module):
                for name, value in vars(owner).items():
                    methods.setdefault(name, []).append(value)
        hooks = [h for m in modules for _, table in module_hooks(m) for h in table.values()]
        own = [value for m in modules for value in vars(m).values() if callable(value)]
        todo = [*methods.get("forward", ()), *methods.get("__call__", ()), *hooks, *own, *others]
        seen: dict[CodeType, ForwardNames] = {}
        while todo:
            for function in _functions(todo.pop()):
                if function.__code__ in seen or function.__module__ == "torch.nn.modules.module":
                    continue
                names = seen[function.__code__] = _names_of(function.__code__)
                for name in names.read:
                    todo += methods.get(name, ())
                    value = function.__globals__.get(name)
                    if isinstance(value, FunctionType) and not value.__module__.startswith("torch."):
                        todo.append(value)
        found = list(seen.values())
        none = frozenset[str]()
        return ForwardNames(
            none.union(*(n.read for n in found)),
            none.union(*(n.asked for n in found)),
            none.union(*(n.assigned for n in found)),
            none.union(*(n.filled for n in found)),
        )


def _functions(value: object) -> Iterator[FunctionType]:
    """Yield the plain functions behind a method, a property, a partial or a callable object."""
    if isinstance(value, FunctionType):
        yield value
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            yield from _functions(wrapped)
    elif isinstance(value, property):
        yield from _functions(value.fget)
    elif isinstance(value, functools.partial):
        yield from _functions(value.func)
    elif isinstance(value, nn.Module):
        return
    elif hasattr(value, "__func__"):
        yield from _functions(value.__func__)
    elif not isinstance(value, type) and isinstance(vars(type(value)).get("__call__"), FunctionType):
        yield from _functions(vars(type(value))["__call__"])


@functools.lru_cache(maxsize=4096)
def _names_of(code: CodeType) -> ForwardNames:
    """Return the names in one function, those of the functions defined inside included."""
    read, asked, assigned, filled = set(code.co_names), set[str](), set[str](), set[str]()
    texts = {value for value in code.co_consts if isinstance(value, str)}
    by_text = _BY_TEXT & read
    asked |= texts if by_text else set()
    assigned |= texts if by_text & {"setattr", "delattr"} else set()
    lines: dict[int | None, tuple[set[str], set[str]]] = {}
    for instruction in dis.get_instructions(code):
        name, kind = instruction.argval, instruction.opname
        line = instruction.positions.lineno if instruction.positions is not None else None
        loaded, marks = lines.setdefault(line, (set(), set()))
        if kind in ("STORE_ATTR", "DELETE_ATTR"):
            assigned.add(name)
        elif kind in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            marks.add(kind)
        elif kind in ("LOAD_ATTR", "LOAD_METHOD"):
            loaded.add(name)
    for loaded, marks in lines.values():
        if marks or loaded & _FILLING:
            filled |= loaded - _FILLING
    for value in code.co_consts:
        if isinstance(value, CodeType):
            inner = _names_of(value)
            read, asked = read | inner.read, asked | inner.asked
            assigned, filled = assigned | inner.assigned, filled | inner.filled
    return ForwardNames(frozenset(read), frozenset(asked), frozenset(assigned), frozenset(filled))
