"""Keep what a forward checks about its data: a branch that only raises becomes a call that raises.

``if labels.max() >= size: raise ValueError(...)  -->  zbcompile::check(labels.max() >= size, False, ...)``.
Contract out: the call runs in F at every step, for every microbatch, and raises `DataError` where the model
would have raised. The branch is read in the source of the code that takes it: the other side must raise
whatever happens, and nobody between it and the model may catch that. Any other branch on data has
consequences that a graph cannot follow, and is refused.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType

import torch
from torch import Tensor, nn
from torch.fx.node import Target, has_side_effect

from zbcompile.errors import DataError
from zbcompile.passes.provenance import is_own_file, is_torch_file, short_file

__all__ = ["Check", "branch_at", "check_at", "demand_at", "is_check", "keep_check"]

_LIBRARY = torch.library.Library("zbcompile", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "check(Tensor condition, bool needed, str condition_text, str source, bool raises=True) -> ()"
)

_LONGEST = 160
"""Characters of a condition that an error quotes."""
_JUMPS = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT")
"""Beginnings of the instructions that ask a value on the stack whether it is true."""
_ASKING = ("bool", "torch.equal", "torch.allclose", "torch.is_nonzero")
"""Calls that ask for the truth of a tensor themselves."""
_MAY_SWALLOW = ("suppress", "raises")
"""Words in context managers that catch what is raised inside."""


@torch.library.impl(_LIBRARY, "check", "CompositeExplicitAutograd")
def _check(condition: Tensor, needed: bool, condition_text: str, source: str, raises: bool = True) -> None:
    if bool(condition) is needed:
        return
    what = f"the model's forward raises for this data, at {source}"
    fix = "correct the data; the model itself raises for this microbatch, too"
    if not raises:
        what = f"this data takes another side of a branch than the example did, at {source}"
        fix = (
            "compile with fixed_branches=True on an example that takes this side, and give it such data; "
            "where the model's buffers decide, run the model once before it is compiled"
        )
    raise DataError(what, needed=f"{condition_text} to be {needed}", given=not needed, fix=fix)


@torch.library.register_fake("zbcompile::check", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _check_shape(
    condition: Tensor, needed: bool, condition_text: str, source: str, raises: bool = True
) -> None: ...


_CHECK = has_side_effect(torch.ops.zbcompile.check.default)


def is_check(target: Target) -> bool:
    """Return whether a call's target is the operator that stands for a check of the model."""
    return target is _CHECK


@dataclass(frozen=True)
class Check:
    """A branch of which one side only raises, or whose side is fixed.

    Attributes
    ----------
    needed
        Truth of the condition with which the forward goes on.
    text
        The condition, as its source says it.
    source
        ``file:line``, the file without the folder that it is installed in.
    raises
        Whether the other side raises.
    """

    needed: bool
    text: str
    source: str
    raises: bool = True


def keep_check(check: Check, condition: Tensor | torch.SymBool) -> None:
    """Put a check into the graph that is being traced."""
    as_tensor: Callable[..., Tensor] = torch.scalar_tensor
    value = condition.detach() if isinstance(condition, Tensor) else as_tensor(condition)
    _CHECK(value, check.needed, check.text, check.source, check.raises)


def check_at(frame: FrameType, model: FrameType) -> Check | None:
    """Return the check that running code makes with a tensor's truth.

    Parameters
    ----------
    frame
        The frame that asks for the truth.
    model
        The frame that called the model.

    Returns
    -------
    Check or None
        None where the source is unknown, where the other branch does more than raise, or where what it
        raises may be caught.
    """
    asking = _asking_node(frame)
    if asking is None:
        return None
    tree, node = asking
    needed, callers = tree.needed(node), _callers(frame, model)
    if needed is None or tree.may_be_caught(node) or any(map(_may_catch, callers)):
        return None
    return _described(needed, ast.unparse(node), frame, callers)


def branch_at(frame: FrameType, model: FrameType, side: bool) -> Check:
    """Return the check that running code takes this side of a branch; arguments as for `check_at`."""
    asking = _asking_node(frame)
    text = "" if asking is None else ast.unparse(asking[1])
    return replace(_described(side, text, frame, _callers(frame, model)), raises=False)


def demand_at(frame: FrameType, model: FrameType) -> Check | None:
    """Return the check of a call that raises unless its argument is true; arguments as for `check_at`.

    None where torch itself makes the call, about its own sizes.
    """
    callers = _callers(frame, model)
    caller = next((f for f in (frame, *callers) if f.f_code.co_filename != torch.__file__), frame)
    if is_torch_file(caller.f_code.co_filename) or any(map(_may_catch, (frame, *callers))):
        return None
    return _described(True, "", frame, callers)


def _described(needed: bool, text: str, frame: FrameType, callers: Sequence[FrameType]) -> Check:
    """Return a check with the condition as the model's code says it, and the lines of both."""
    frames = [f for f in (frame, *callers) if not is_torch_file(f.f_code.co_filename)] or [frame]
    source = f"{short_file(frames[0].f_code.co_filename)}:{frames[0].f_lineno}"
    method = next((f for f in frames if isinstance(f.f_locals.get("self"), nn.Module)), frames[0])
    if method is not frames[0]:
        source += f", called at {short_file(method.f_code.co_filename)}:{method.f_lineno}"
    if not text or frames[0] is not frame:
        call = _node_at(frames[0].f_code, frames[0].f_lasti // 2)
        text = " in ".join(part for part in (text, "" if call is None else ast.unparse(call[1])) if part)
    return Check(needed, text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "...", source)


def _callers(frame: FrameType, model: FrameType) -> list[FrameType]:
    """Return the frames between ``frame`` and the call of the model, without those of the passes."""
    found = []
    caller = frame.f_back
    while caller is not None and caller is not model:
        if not is_own_file(caller.f_code.co_filename):
            found.append(caller)
        caller = caller.f_back
    return found


class _Tree:
    """The syntax of one file, with the parent of every node."""

    def __init__(self, source: str) -> None:
        self.root = ast.parse(source)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.at: dict[tuple[int | None, ...], ast.expr] = {}
        for parent in ast.walk(self.root):
            for child in ast.iter_child_nodes(parent):
                self.parents[child] = parent
                if isinstance(child, ast.expr):
                    place = child.lineno, child.end_lineno, child.col_offset, child.end_col_offset
                    self.at.setdefault(place, child)

    def needed(self, node: ast.AST) -> bool | None:
        """Return the truth of an expression without which its statement raises; None where it does more."""
        if isinstance(node, ast.Compare) and len(node.ops) > 1 and self._needed_above(node) is not True:
            return None  # the truth that is asked may be that of the first comparison
        return self._needed_above(node)

    def _needed_above(self, node: ast.AST) -> bool | None:
        parent = self.parents.get(node)
        if isinstance(parent, ast.Assert):
            return True if node is parent.test else None
        if isinstance(parent, ast.If) and node is parent.test:
            raising = _raises(parent.body), _raises(parent.orelse)
            return raising[1] if raising[0] is not raising[1] else None
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            above = self._needed_above(parent)
            return None if above is None else not above
        if isinstance(parent, ast.BoolOp):
            above = self._needed_above(parent)
            decides = isinstance(parent.op, ast.And) is above  # each operand, or only the last
            return above if decides or node is parent.values[-1] else None
        if isinstance(parent, ast.Call) and ast.unparse(parent.func) == "bool":
            return self._needed_above(parent)
        return None

    def may_be_caught(self, node: ast.AST) -> bool:
        """Return whether the function that a node is in may catch what is raised there."""
        child, parent = node, self.parents.get(node)
        while parent is not None and not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ):
            if isinstance(parent, ast.Try) and _swallows(parent, child):
                return True
            if isinstance(parent, ast.With | ast.AsyncWith) and child in parent.body:
                managers = " ".join(ast.unparse(item.context_expr) for item in parent.items)
                if any(word in managers for word in _MAY_SWALLOW):
                    return True
            child, parent = parent, self.parents.get(parent)
        return False


def _swallows(attempt: ast.Try, child: ast.AST) -> bool:
    """Return whether a try statement may go on after an error in its body."""
    if any(isinstance(n, ast.Return) for statement in attempt.finalbody for n in ast.walk(statement)):
        return True
    return child in attempt.body and not all(_raises(handler.body) for handler in attempt.handlers)


def _raises(body: Sequence[ast.stmt]) -> bool:
    """Return whether statements do nothing but raise: before that they may only compute and call."""
    if not body:
        return False
    *before, last = body
    if not all(isinstance(s, ast.Expr | ast.Assign | ast.AnnAssign) and _is_local(s) for s in before):
        return False
    if isinstance(last, ast.If):
        return _raises(last.body) and _raises(last.orelse)
    return isinstance(last, ast.Raise)


def _is_local(statement: ast.stmt) -> bool:
    """Return whether a statement sets nothing but local names, and hands nothing to a caller."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await):
            return False
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            return False
    return True


@functools.lru_cache(maxsize=256)
def _tree_of(file: str, size: int) -> _Tree | None:
    try:
        return _Tree("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _tree(code: CodeType) -> _Tree | None:
    file = code.co_filename
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    return _tree_of(file, sum(map(len, lines))) if lines else None


def _node_at(code: CodeType, index: int) -> tuple[_Tree, ast.expr] | None:
    """Return the expression that an instruction, given by its number, comes from."""
    tree = _tree(code)
    place = list(code.co_positions())[index]
    node = None if tree is None else tree.at.get((place[0], place[1], place[2], place[3]))
    return None if tree is None or node is None else (tree, node)


def _asking_node(frame: FrameType) -> tuple[_Tree, ast.expr] | None:
    """Return the expression whose truth a frame is asking for; None for an instruction that is not known.

    Python 3.13 asks for the truth of a comparison in the comparison itself, as it does of the elements of
    lists: such a question is not known.
    """
    code, index = frame.f_code, frame.f_lasti // 2
    names = _instructions(code)
    if names[index].startswith(_JUMPS):
        index -= 1
        while index >= 0 and names[index] in ("CACHE", "EXTENDED_ARG", "NOP", "COPY", "TO_BOOL"):
            index -= 1
        return _node_at(code, index) if index >= 0 else None
    found = _node_at(code, index)
    if found is None or not isinstance(found[1], ast.Call):
        return None
    return found if ast.unparse(found[1].func) in _ASKING else None


@functools.lru_cache(maxsize=256)
def _instructions(code: CodeType) -> list[str]:
    """Return the name of the instruction at every second byte; caches have none of their own."""
    import dis

    names = ["CACHE"] * (len(code.co_code) // 2)
    for instruction in dis.get_instructions(code):
        names[instruction.offset // 2] = instruction.opname
    return names


def _may_catch(frame: FrameType) -> bool:
    """Return whether a function that is calling may catch what is raised in the call."""
    code = frame.f_code
    if is_torch_file(code.co_filename) or not code.co_exceptiontable:
        return False
    tree = _tree(code)
    if tree is None:
        return True
    place = list(code.co_positions())[frame.f_lasti // 2]
    node = tree.at.get((place[0], place[1], place[2], place[3]))
    return node is None or tree.may_be_caught(node)
