"""What a rank need not hold: tensors of other ranks' stages.

`without_tensors` drops what compiling kept: nothing of a loaded pipeline holds a tensor but the model itself.
`free_others` (``compile(..., free_model=True)``) takes them out of the user's model as well. Modules stay the
same objects, and so do the rank's own parameters. In place of a freed tensor stands a `FreedParameter` or
`FreedBuffer` without memory. It may be looked at (shape, dtype, device), which later captures do; whatever
computes with it, copies it or gives it to an optimizer raises `UsageError` with its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.errors import UsageError
from zbcompile.passes import torch_private
from zbcompile.passes.capture.capture import may_be_read
from zbcompile.passes.live_objects import collect_circles
from zbcompile.passes.split.stage_graphs import StageGraphs
from zbcompile.passes.split.staged_model import StagedModel
from zbcompile.runtime.group import PipelineGroup
from zbcompile.schedule.ir import Placement

__all__ = ["FreedBuffer", "FreedParameter", "free_others", "let_go", "require_group", "without_tensors"]

_LOOKS = frozenset(
    {"dim", "element_size", "is_complex", "is_floating_point", "numel", "size", "storage_offset", "stride"}
)
"""Methods that only look at a tensor."""
_REFUSED_GETTERS = (Tensor.data.__get__, Tensor.is_leaf.__get__)  # type: ignore[attr-defined]
"""Properties that copies and optimizers ask for."""


def require_group(group: PipelineGroup | None) -> None:
    """Refuse to free anything where all ranks run in this process."""
    if group is None:
        raise UsageError(
            "free_model=True frees the tensors of other processes, and all ranks run in this one",
            fix="leave free_model out, or start one process per rank (torchrun)",
        )


def without_tensors(staged: StagedModel) -> StagedModel:
    """Return what is the same but holds shapes and dtypes of the model's tensors only."""
    with torch_private.as_plain_tensors():  # a later form is captured when others are freed already
        state = {
            name: torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
            for name, tensor in staged.captured.state.items()
        }
    return replace(staged, captured=replace(staged.captured, state=state))


def free_others(
    trained: nn.Module, staged: StagedModel, placement: Placement, rank: int
) -> tuple[StagedModel, list[weakref.ref[Tensor]]]:
    """Take the tensors that only other ranks' stages hold out of a model.

    Tensors of no stage stay, and small buffers of whole numbers, which the model's code may read. Those that
    were on the meta device already stay as they are.

    Parameters
    ----------
    trained
        What owns all tensors.
    staged, placement, rank
        The stages, where they run, and who asks.

    Returns
    -------
    StagedModel, list
        The stages, those of other ranks without the constants of their graphs; and what was freed, for
        `let_go`.
    """
    others, own = set[str](), set[str]()
    for stage, at in zip(staged.stages, placement.rank_of, strict=True):
        (own if at == rank else others).update((*stage.parameters, *stage.buffers))
    held = [weakref.ref(tensor) for tensor in _replace(trained, others - own)]
    staged = replace(
        without_tensors(staged),
        stages=tuple(
            stage if at == rank else _without_constants(stage)
            for stage, at in zip(staged.stages, placement.rank_of, strict=True)
        ),
    )
    return replace(staged, captured=replace(staged.captured, constants={})), held


def let_go(freed: Sequence[weakref.ref[Tensor]]) -> None:
    """Give freed memory back to the system, that of compiling included.

    Warn where something else still holds a freed tensor: an optimizer that was made before, or a state dict.
    """
    collect_circles()
    with contextlib.suppress(OSError, AttributeError):  # a C library that keeps nothing back has no such call
        ctypes.CDLL(None).malloc_trim(0)
    alive = [tensor for ref in freed if (tensor := ref()) is not None]
    if alive:
        warnings.warn(
            f"free_model: {len(alive)} tensors of other ranks, {sum(t.nbytes for t in alive)} bytes, are "
            "still held outside of the model; make the optimizer after compile(), from pipeline.parameters()",
            stacklevel=2,
        )


def _replace(trained: nn.Module, names: Collection[str]) -> list[Tensor]:
    """Replace tensors by such without memory wherever a module holds them; return the old ones."""
    named = [
        *trained.named_parameters(remove_duplicate=False),
        *trained.named_buffers(remove_duplicate=False),
    ]
    freed = {
        id(t): (_freed(name, t), t)
        for name, t in named
        if name in names and not t.is_meta and not may_be_read(t)
    }
    for module in trained.modules():
        for table in torch_private.tensor_tables(module):
            for name, tensor in table.items():
                if id(tensor) in freed:
                    table[name] = freed[id(tensor)][0]
    return [old for _, old in freed.values()]


def _freed(name: str, tensor: Tensor) -> Tensor:
    data = torch.empty_like(tensor.detach(), device="meta")
    kind = FreedParameter if isinstance(tensor, nn.Parameter) else FreedBuffer
    made = torch_private.as_subclass(data, kind, tensor.requires_grad)
    vars(made)["freed_name"] = name
    return made


def _without_constants(stage: StageGraphs) -> StageGraphs:
    return replace(stage, constants=tuple(torch.empty_like(t, device="meta") for t in stage.constants))


class _Freed(Tensor):
    """A tensor of another rank: it may be looked at, and nothing else."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _LOOKS or (name == "__get__" and func not in _REFUSED_GETTERS):
            with torch_private.as_plain_tensors():
                return func(*args, **(kwargs or {}))
        freed = next(a for a in (*args, *(kwargs or {}).values(), *_inside(args)) if isinstance(a, _Freed))
        raise UsageError(
            "this tensor belongs to a stage of another rank, and free_model=True has freed it here",
            where=vars(freed)["freed_name"],
            fix="use pipeline.parameters(), pipeline.state_dict() and pipeline.eval(), made for what is here",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<freed: {vars(self)['freed_name']}, a tensor of another rank>"


def _inside(args: Sequence[object]) -> list[object]:
    """Return what stands in lists among arguments."""
    return [item for argument in args if isinstance(argument, list | tuple) for item in argument]


class FreedParameter(_Freed, nn.Parameter):
    """A parameter of another rank's stage."""


class FreedBuffer(_Freed):
    """A buffer of another rank's stage."""
