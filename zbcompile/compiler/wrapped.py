"""Models that torch's data parallelism was put around: no call of a step goes through it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from zbcompile.errors import UsageError
from zbcompile.passes.live_objects import collect_circles, live_instances

__all__ = ["Wrappers"]


class Wrappers:
    """Finds `DistributedDataParallel` around a model, in which it leaves no trace.

    Those made from now on are noted as they take their module. All objects are looked through once, for those
    that were there before.
    """

    def __init__(self) -> None:
        self._found = found = weakref.WeakSet[DistributedDataParallel]()
        self._has_looked = False

        def note(holder: nn.Module, name: str, held: nn.Module | None) -> None:
            if isinstance(holder, DistributedDataParallel):
                found.add(holder)

        # The hook is torch's for all modules, and must not keep this object alive.
        weakref.finalize(self, register_module_module_registration_hook(note).remove)

    def refuse(self, trained: nn.Module) -> None:
        """Refuse a model that is held by one. Raises `UsageError`."""
        if not self._has_looked:
            self._found.update(live_instances(DistributedDataParallel))
            self._has_looked = True
        if not _holding(self._found, trained):
            return
        collect_circles()  # one that was dropped may still be in one
        if _holding(self._found, trained):
            raise UsageError(
                "DistributedDataParallel holds the model, and would sum no gradient of a step",
                fix="leave it out, and give compile(mesh=) a mesh with a dimension dp",
            )


def _holding(found: Iterable[DistributedDataParallel], trained: nn.Module) -> bool:
    """Return whether one of them holds a parameter of the model."""
    held = {id(parameter) for wrapper in found for parameter in wrapper.parameters()}
    return bool(held) and not held.isdisjoint(map(id, trained.parameters()))
