"""Refuse a step whose model, loss or mode is no longer the one that was compiled.

Graphs hold the plain attributes, modules and hooks that the model had. `ModelGuard` notes them once, after
capture and verification, and compares them before every step and evaluation: under 1 ms for 1,000 modules.
`ModeGuard` compares the autocast mode. Values of parameters and buffers may change, and so may what
the forward itself sets.

    model.tau = 4  -->  UsageError: attribute 'tau' was changed after the model was compiled
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from zbcompile.compiler.call import pieces_of
from zbcompile.compiler.forward_names import ForwardNames
from zbcompile.compiler.signature import Value
from zbcompile.errors import UsageError
from zbcompile.passes import torch_private
from zbcompile.passes.capture.with_loss import loss_module
from zbcompile.passes.hooks import HookKind, module_hooks, refused_hook

__all__ = ["ModeGuard", "ModelGuard", "refuse_inputs_with_gradients"]

_Value = TypeVar("_Value")
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, range,
)  # fmt: skip
_TORCH_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has: hooks, tables of tensors, the mode."""
_LARGEST = 1000
"""Entries of the largest container whose contents are compared."""


class ModelGuard:
    """What must stay as it was compiled: modules, names of tensors, plain attributes, modes and hooks.

    Parameters
    ----------
    model, loss_fn
        As they were compiled. A loss that is a module or an object is watched, a function is not.
    """

    def __init__(self, model: nn.Module, loss_fn: object) -> None:
        loss = loss_module(model, loss_fn)
        named = dict(model.named_modules())
        if loss is not None:
            named |= {f"loss_fn.{path}".rstrip("."): module for path, module in loss.named_modules()}
        others = [loss_fn] if loss is None and loss_fn is not None else []
        names = ForwardNames.of(named.values(), others)
        self._named = [(path or "the model", module) for path, module in named.items()]
        self._modules = list(named.values())
        self._classes = [type(module) for module in self._modules]
        self._no_children: list[tuple[str, Mapping[str, object]]] = []
        self._no_hooks: list[tuple[str, str, Mapping[int, object]]] = []
        self._tables: list[_Table] = []
        self._lists: list[_Contents] = []
        attributes: list[_Table] = []
        hooks: list[_Table] = []
        objects: dict[int, tuple[str, object]] = {}
        register = bool({"register_forward_hook", "register_forward_pre_hook"} & names.read)
        for path, module in self._named:
            children, parameters, buffers = torch_private.module_tables(module)
            if children:
                self._tables.append(_Table(children, _Children(path, children)))
            else:
                self._no_children.append((path, children))
            for kind, table in (("parameter", parameters), ("buffer", buffers)):
                if table or kind == "parameter":
                    self._tables.append(_Table(table, _Tensors(path, kind, table, names)))
            own = _Attributes(path, module, names)
            attributes.append(_Table(vars(module), own))
            self._lists += own.containers()
            objects |= {id(value): (_join(path, name), value) for name, value in own.objects()}
            for kind, hooked in module_hooks(module):
                if register and kind.fate == "captured":
                    continue
                if hooked:
                    hooks.append(_Table(hooked, _Hooks(path, kind.name, hooked)))
                else:
                    self._no_hooks.append((path, kind.name, hooked))
        if _has_attributes(loss_fn):
            objects[id(loss_fn)] = ("loss_fn", loss_fn)
        for where, value in objects.values():
            own = _Attributes(where, value, names)
            attributes.append(_Table(vars(value), own))
            self._lists += own.containers()
        self._tables += [*attributes, *hooks]
        self._attribute_dicts = [table.now for table in attributes]
        self._named_dicts = [t.now for t in self._tables if not isinstance(t.compare, _Attributes)]
        self._seen: dict[bool, _Seen] = {}
        for training in (False, True):
            self._note(training)
        self._held_parameters = [torch_private.module_tables(m)[1] for m in self._modules]
        self._children_alone = [table for _, table in self._no_children]
        self._hooks_alone = [table for _, _, table in self._no_hooks]

    def check(self, *, training: bool = True) -> None:
        """Compare the model with what was compiled.

        Parameters
        ----------
        training
            Whether a step follows: then the modes of modules must be those that were compiled.

        Raises
        ------
        UsageError
            Names the module path, the attribute or kind of hook, both values, and what to change.
        """
        if not all(map(is_, map(type, self._modules), self._classes)):
            self._refuse_classes()
        if any(self._children_alone):
            path, table = next((p, t) for p, t in self._no_children if t)
            name = next(iter(table))
            raise _changed(f"module {name!r} was added", path, "no module", _short(table[name]))
        if not self._as_noted(training):
            for watched in self._tables:
                watched.compare(training)
            self._seen.clear()  # what was noted holds tensors that may have been replaced
            self._note(training)
        for contents in self._lists:
            contents.check()
        if any(self._hooks_alone):
            path, kind, _ = next(item for item in self._no_hooks if item[2])
            raise _hook(path, kind)
        parameters = [p for p in _values(self._held_parameters) if p is not None]
        if refused := refused_hook(parameters):
            self._refuse_hook(*refused)

    def _as_noted(self, training: bool) -> bool:
        """Return whether all tables are as they were when last found right, without saying what differs."""
        seen, tables = self._seen.get(training), self._named_dicts
        if seen is None:
            return False
        if list(map(len, tables)) != seen.sizes or list(chain.from_iterable(tables)) != seen.names:
            return False
        if not all(map(is_, _values(tables), seen.values)):
            return False
        try:
            return list(_values(self._attribute_dicts)) == seen.attributes
        except Exception:  # values that are not identical may refuse to be compared
            return False

    def _note(self, training: bool) -> None:
        """Note the present tables, which are right: the next check is quick as long as they stay."""
        tables = self._named_dicts
        self._seen[training] = _Seen(
            list(map(len, tables)),
            list(chain.from_iterable(tables)),
            list(_values(tables)),
            list(_values(self._attribute_dicts)),
        )

    def _refuse_classes(self) -> None:
        for (path, module), old in zip(self._named, self._classes, strict=True):
            if type(module) is not old:
                raise _changed("the module has another class", path, old.__name__, type(module).__name__)

    def _refuse_hook(self, kind: HookKind, hooked: Tensor) -> None:
        for path, module in self._named:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter is hooked:
                    raise _hook(_join(path, name), kind.name)


class ModeGuard:
    """The autocast mode that graphs were captured in, whose casts are calls of the graphs."""

    def __init__(self) -> None:
        self.captured = tuple(torch_private.ambient_autocast())

    def check(self) -> None:
        """Refuse a step under another autocast mode, or under ``inference_mode``."""
        now = tuple(torch_private.ambient_autocast())
        if now != self.captured:
            raise UsageError(
                f"the model was captured {_autocast(self.captured)}, step() runs {_autocast(now)}",
                where="torch.autocast",
                fix="call compile() and step() under the same autocast mode",
            )
        if torch.is_inference_mode_enabled():
            raise UsageError(
                "step() runs under torch.inference_mode: its gradients could not be used afterwards",
                fix="call step() outside of it, or eval()",
            )


def refuse_inputs_with_gradients(names: Sequence[str], values: Sequence[Value]) -> None:
    """Refuse tensors that require a gradient: a step gives none to its inputs."""
    for name, value in zip(names, values, strict=True):
        if value is not None and any(piece.requires_grad for piece in pieces_of(value)):
            raise UsageError(
                "an input of step() requires a gradient, and a step gives none to its inputs",
                where=name,
                fix="detach it, or put what computes it into the model",
            )


class _Table(NamedTuple):
    """A dict of a module or an object, and who compares it closely with what was compiled."""

    now: Mapping[Any, object]
    compare: Callable[[bool], None]


class _Children:
    """The modules below a module."""

    def __init__(self, path: str, table: Mapping[str, nn.Module | None]) -> None:
        self.path, self.table, self.old = path, table, dict(table)

    def __call__(self, training: bool) -> None:
        for name in dict.fromkeys((*self.old, *self.table)):
            old, new = self.old.get(name), self.table.get(name)
            if old is not new:
                what = "was replaced" if old is not None and new is not None else "was removed"
                raise _changed(
                    f"a module {'was added' if old is None else what}",
                    _join(self.path, name),
                    _short(old),
                    _short(new) if old is None or type(old) is not type(new) else f"another {_short(new)}",
                )
        if list(self.table) != list(self.old):
            raise _changed("modules have another order", self.path, list(self.old), list(self.table))


class _Tensors:
    """The names of a module's parameters or buffers; their values may change."""

    def __init__(self, path: str, kind: str, table: Mapping[str, Tensor | None], names: ForwardNames) -> None:
        self.path, self.kind, self.table = path, kind, table
        self.free = names.assigned
        self.old = {name: value is not None for name, value in table.items()}

    def __call__(self, training: bool) -> None:
        for name in dict.fromkeys((*self.old, *self.table)):
            old, new = self.old.get(name, False), self.table.get(name) is not None
            if old != new and name not in self.free:
                words = "removed", f"a {self.kind}", "none"
                verb, needed, given = words if old else ("added", "none", f"a {self.kind}")
                raise _changed(f"{self.kind} {name!r} was {verb}", _join(self.path, name), needed, given)


class _Hooks:
    """The hooks that a module had; they are in the graphs."""

    def __init__(self, path: str, kind: str, table: Mapping[int, object]) -> None:
        self.path, self.kind, self.table, self.old = path, kind, table, dict(table)

    def __call__(self, training: bool) -> None:
        raise _hook(self.path, self.kind, "was added or removed")


class _Attributes:
    """The plain attributes of a module or an object.

    All public ones of a module are compared. Of names that begin with ``_``, and of the attributes of an
    object, those are compared that a forward reads and that are plain values.
    """

    def __init__(self, path: str, owner: object, names: ForwardNames) -> None:
        self.path, self.owner, self.names = path, owner, names
        self.table = vars(owner)
        self.is_module = isinstance(owner, nn.Module)
        self.hooked = isinstance(owner, nn.Module) and any(
            table for kind, table in module_hooks(owner) if kind.name == "forward pre-hook"
        )
        self.training = self.table.get("training")
        self.old = {name: _copied(v) for name, v in self.table.items() if self._watched(name, v)}

    def _watched(self, name: str, value: object) -> bool:
        if name in self.names.assigned or (self.is_module and name in _TORCH_OWN):
            return False
        if isinstance(value, Tensor):  # one that a hook makes anew at each call is no state
            return self.is_module and not name.startswith("_") and not self.hooked and value.is_leaf
        if not self.is_module or name.startswith("_"):
            return name in self.names.read and isinstance(value, _PLAIN)
        return not (name in self.names.filled and isinstance(value, list | dict | set))

    def __call__(self, training: bool) -> None:
        if training and self.is_module and self.table.get("training") is not self.training:
            mode = "training" if self.training else "evaluation"
            raise UsageError(
                f"the model was compiled with this module in {mode} mode",
                where=self.path,
                fix="undo the change, or compile another pipeline for the changed model",
            )
        for name, old in self.old.items():
            if name not in self.table:
                raise self._changed(name, _short(old), "no such attribute")
            if not _same(old, self.table[name]):
                raise self._changed(name, _short(old), _short(self.table[name]))
        for name, value in self.table.items():
            if name not in self.old and self._watched(name, value):
                self._check_new(name, value)

    def _check_new(self, name: str, value: object) -> None:
        """Refuse a new attribute where the forward found another value, or may ask for it by name."""
        before = getattr(type(self.owner), name, _NOTHING)
        known = before is not _NOTHING or name in self.names.asked
        if known and not _same(before, value):
            raise self._changed(
                name, "no such attribute" if before is _NOTHING else _short(before), _short(value)
            )

    def _changed(self, name: str, needed: str, given: str) -> UsageError:
        return _changed(f"attribute {name!r} was changed", _join(self.path, name), needed, given)

    def containers(self) -> list[_Contents]:
        """Return the lists, dicts and sets whose contents are compared too."""
        kinds = (list, dict, set)
        return [
            _Contents(self, name)
            for name, value in self.old.items()
            if isinstance(value, kinds) and len(value) <= _LARGEST
        ]

    def objects(self) -> list[tuple[str, object]]:
        """Return the attributes that are objects with plain attributes of their own, such as a config."""
        if not self.is_module:
            return []
        return [
            (name, value)
            for name, value in self.table.items()
            if name not in _TORCH_OWN and not callable(value) and _has_attributes(value)
        ]


class _Contents:
    """A container that is an attribute: it may be changed in place."""

    __slots__ = ("name", "old", "owner", "table")

    def __init__(self, owner: _Attributes, name: str) -> None:
        self.owner, self.name, self.table = owner, name, owner.table
        self.old = owner.old[name]

    def check(self) -> None:
        """Refuse other contents than those that were compiled."""
        now = self.table[self.name]
        if not _same(self.old, now):
            raise _changed(
                f"attribute {self.name!r} was changed",
                _join(self.owner.path, self.name),
                _short(self.old),
                _short(now),
            )


_NOTHING = object()


class _Seen(NamedTuple):
    """Sizes, names and values of tables of modules, tensors and hooks; values of the attributes."""

    sizes: list[int]
    names: list[object]
    values: list[object]
    attributes: list[object]


def _values(tables: Iterable[Mapping[Any, _Value]]) -> Iterator[_Value]:
    """Return the values of many dicts, one after the other."""
    return chain.from_iterable(map(_VALUES_OF, tables))


_VALUES_OF = methodcaller("values")


def _has_attributes(value: object) -> bool:
    """Return whether a value is a plain object of the user's, whose attributes a forward may read."""
    if isinstance(value, nn.Module | type | Tensor | torch.nn.ParameterList) or not hasattr(
        value, "__dict__"
    ):
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "builtins", "functools", "typing")


def _copied(value: object) -> object:
    """Return a container's copy, and anything else itself."""
    kind = type(value)
    if kind is list or kind is dict or kind is set:
        return cast("list[object]", value).copy()
    return value


def _same(old: object, new: object) -> bool:
    """Compare plain values by value, containers by their contents, anything else by identity."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, _PLAIN) and not isinstance(old, torch.Size):
        return old == new or (old != old and new != new)
    if isinstance(old, tuple | list) and isinstance(new, tuple | list):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        return list(old) == list(new) and all(map(_same, old.values(), new.values()))
    return isinstance(old, set) and old == new


def _short(value: object) -> str:
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return "none" if value is None else reprlib.repr(value)


def _join(path: str, name: str) -> str:
    return name if path == "the model" else f"{path}.{name}"


def _autocast(modes: Sequence[tuple[str, torch.dtype]]) -> str:
    words = [f"autocast({kind}, {str(dtype).removeprefix('torch.')})" for kind, dtype in modes]
    return f"under {' and '.join(words)}" if words else "without autocast"


def _changed(what: str, where: str, needed: object, given: object) -> UsageError:
    return UsageError(
        f"{what} after the model was compiled",
        where=where,
        needed=f"{needed}, as compiled",
        given=given,
        fix="undo the change, or compile another pipeline for the changed model",
    )


def _hook(where: str, kind: str, verb: str = "was added") -> UsageError:
    return UsageError(
        f"a {kind} {verb} after the model was compiled: the graphs would not follow",
        where=where,
        fix="undo it, or compile another pipeline; work on gradients can be done in "
        "param.register_post_accumulate_grad_hook, or on param.grad after the step",
    )
