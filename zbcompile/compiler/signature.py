"""What all calls of a pipeline have in common, and how a batch is cut into microbatches.

A call is taken apart into values: a tensor, `Microbatches` (cut by the user), or None where this process does
not have the tensor. The values are cut into microbatches of the rows that were compiled for; what is left
over is a last, smaller one. Neighbouring microbatches of one shape are a run, which one form of the compiled
pipeline takes at once.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import Tensor, nn

from zbcompile.compiler.call import Batch, check_named, name_of, named, pieces_of, places_of
from zbcompile.compiler.runs import Run, shapes_of
from zbcompile.errors import ShapeError, UsageError
from zbcompile.options import BatchDim, CompileOptions
from zbcompile.passes.capture.nested_values import Microbatches, Spec, unflatten
from zbcompile.passes.capture.plain_values import first_difference, step_to

__all__ = ["Signature", "Value", "described", "largest_divisor"]

Value = Tensor | Microbatches | None
"""One tensor of a call; None: this process does not have it."""


class Signature:
    """The nesting, names, dtypes and batch dimensions that all calls of a pipeline share.

    Parameters
    ----------
    batch
        The example.
    options
        Name the tensors that are kept whole, those that are constant, and the batch dimension of each.

    Attributes
    ----------
    spec
        How the tensors are nested in (args, kwargs, target).
    names
        Of the tensors, in flat order.
    dims
        Per tensor the dimension that is cut, or None.
    cut
        Per tensor, whether microbatches have pieces of their own; without a dimension it has none to cut, and
        is given as `Microbatches`.
    constant
        Flat positions of the tensors whose values are the same in every microbatch.
    size
        Rows of the example.

    Raises
    ------
    UsageError
        No tensor has a batch dimension, or an option names something else than a tensor of the call.
    """

    def __init__(self, batch: Batch, options: CompileOptions) -> None:
        values, self.spec = batch.flat()
        self.names = tuple(name_of(path) for path in self.spec.paths())
        default, dims = _asked(options.batch_dim, options.model, batch, self.names)
        check_named("whole", options.whole, options.model, batch)
        check_named("constant", options.constant, options.model, batch)
        places = places_of(options.whole, options.model, batch)
        dims |= {k: None for k, name in enumerate(self.names) if named(name, places)}
        self.size = self._size(values, dims, default)
        self.dims = tuple(self._dim(k, value, dims, default) for k, value in enumerate(values))
        self.cut = tuple(
            d is not None or isinstance(v, Microbatches) for d, v in zip(self.dims, values, strict=True)
        )
        places = places_of(options.constant, options.model, batch)
        self.constant = frozenset(k for k, name in enumerate(self.names) if named(name, places))
        self._kinds = tuple((value.dtype, value.dim()) for value in values)
        self._given = tuple(map(described, values))

    def _size(self, values: Sequence[Value], dims: dict[int, int | None], default: int) -> int:
        """Return the rows of the example: of the first tensor that has the batch dimension."""
        for k, value in enumerate(values):
            dim = dims.get(k, default)
            if dim is not None and value is not None and -value.dim() <= dim < value.dim():
                return _rows(value, dim)
        if found := next((v for v in values if isinstance(v, Microbatches)), None):
            return len(found)
        raise UsageError(
            "no tensor has a batch dimension",
            fix="give a tensor whose dimension 0 is the batch, or name the dimension in "
            "compile(..., batch_dim=...)",
        )

    def _dim(self, k: int, value: Value, dims: dict[int, int | None], default: int) -> int | None:
        """Return the dimension of a tensor that is cut, or None where it goes to every microbatch whole."""
        assert value is not None
        dim, was_asked = dims.get(k, default), k in dims
        if dim is None:
            if isinstance(value, Microbatches):
                raise UsageError("a tensor that is kept whole is given as Microbatches", where=self.names[k])
            return None
        if not -value.dim() <= dim < value.dim():
            if was_asked:
                raise UsageError(
                    "a tensor lacks its batch dimension",
                    where=self.names[k],
                    needed=f"dimension {dim}",
                    given=described(value),
                )
            return None
        dim %= value.dim()
        if isinstance(value, Tensor) and value.shape[dim] != self.size:
            if was_asked:
                raise _other_size(self.names[k], self.size, value.shape[dim])
            return None
        return dim

    def values(self, batch: Batch, *, partial: bool = False) -> list[Value]:
        """Take a call apart.

        Parameters
        ----------
        batch
            The call.
        partial
            Whether tensors may be left out: None in place of one, or no arguments at all.

        Raises
        ------
        ShapeError, UsageError
            The call has another form than the example: nesting, dtypes, values that are no tensors.
        """
        batch = self._in_order(batch, partial)
        tensors, spec = batch.flat()
        values = list(_matched(self.spec, spec, iter(tensors), "", partial))
        for k, value in enumerate(values):
            if value is None:
                continue
            if (value.dtype, value.dim()) != self._kinds[k] or (
                self.dims[k] is None and isinstance(value, Microbatches) != self.cut[k]
            ):
                raise self.differs(k, value)
        return values

    def _in_order(self, batch: Batch, partial: bool) -> Batch:
        """Return the call with its keyword arguments in the example's order; with None for those left out."""
        args, given = self.spec.children[0], self.spec.children[1]
        kwargs = dict(batch.kwargs)
        if partial:
            for key, child in zip(given.keys, given.children, strict=True):
                kwargs.setdefault(str(key), None if child.num_tensors else unflatten(child, []))
        if set(kwargs) == set(given.keys):
            kwargs = {str(key): kwargs[str(key)] for key in given.keys}
        positional = batch.args
        if partial and not positional:
            positional = tuple(None if a.num_tensors else unflatten(a, []) for a in args.children)
        return Batch(positional, kwargs, batch.target)

    def nested(self, tensors: Sequence[Tensor]) -> Batch:
        """Return a call with these tensors, and everything else as in the example.

        Raises
        ------
        UsageError
            An object of the example was changed in place since.
        """
        for found in self.spec.changes():
            raise _other_value(*found)
        return Batch(*unflatten(self.spec, tensors))

    def differs(self, k: int, value: Value) -> ShapeError:
        """Return the refusal of a tensor that differs from the one that was compiled for."""
        return ShapeError(
            "a tensor differs from the one compiled for",
            where=self.names[k],
            needed=self._given[k],
            given=described(value),
            fix="give batches of one shape, or compile another pipeline for this one",
        )

    def first_difference(self, values: Sequence[Value]) -> int | None:
        """Return the first tensor whose shape is not the example's, or None."""
        for k, value in enumerate(values):
            if value is not None and described(value) != self._given[k]:
                return k
        return None

    def lengths(self, values: Sequence[Value], rows: int) -> list[int]:
        """Return the rows of every microbatch: ``rows``, and what is left over; or as the user has cut them.

        Empty if this process has no tensor to cut.

        Raises
        ------
        UsageError
            The batch is empty, or its tensors differ in their rows or microbatches.
        """
        present = [(k, value) for k, value in enumerate(values) if value is not None and self.cut[k]]
        total, found = 0, 0
        lengths: list[int] = []
        for k, value in present:
            dim = self.dims[k]
            if isinstance(value, Microbatches):
                found = self._same(k, found, len(value), "microbatches")
                if dim is not None:
                    now = [piece.shape[dim] for piece in value.pieces]
                    total = self._same(k, total, sum(now), "rows")
                    if lengths and now != lengths:
                        raise self._unlike(k, "rows of its microbatches", lengths, now)
                    lengths = now
            elif dim is not None:
                total = self._same(k, total, value.shape[dim], "rows")
        if present and not (total if any(self.dims[k] is not None for k, _ in present) else found):
            raise UsageError("the batch is empty", where=self.names[present[0][0]], fix="leave the call out")
        if lengths or not present:
            return lengths
        if found:
            if total % found:
                raise UsageError(
                    f"a batch of {total} cannot be cut into {found} equal microbatches",
                    where=self.names[present[0][0]],
                    fix="give all tensors of the batch as Microbatches",
                )
            return [total // found or rows] * found
        return [rows] * (total // rows) + [total % rows] * bool(total % rows)

    def runs(self, values: Sequence[Value], lengths: Sequence[int]) -> list[Run]:
        """Cut a call into microbatches, and put neighbours of one shape together.

        Parameters
        ----------
        values
            From `values`.
        lengths
            Rows of every microbatch.
        """
        pieces = []
        start = 0
        for i, rows in enumerate(lengths):
            pieces.append((rows, [self._piece(k, v, i, start, rows) for k, v in enumerate(values)]))
            start += rows
        grouped = groupby(pieces, lambda piece: (piece[0], shapes_of(piece[1])))
        return [Run(rows, [tensors for _, tensors in group]) for (rows, _), group in grouped]

    def _piece(self, k: int, value: Value, microbatch: int, start: int, rows: int) -> Tensor | None:
        if isinstance(value, Microbatches):
            return value.pieces[microbatch]
        dim = self.dims[k]
        return value if value is None or dim is None else value.narrow(dim, start, rows)

    def _same(self, k: int, before: int, now: int, what: str) -> int:
        if before and now != before:
            raise self._unlike(k, what, before, now)
        return now

    def _unlike(self, k: int, what: str, needed: object, given: object) -> UsageError:
        return UsageError(
            f"the tensors of the batch differ in their {what}",
            where=self.names[k],
            needed=f"{needed}, as in the tensors before it",
            given=given,
            fix="give as many of every tensor that was cut when the pipeline was compiled",
        )


def largest_divisor(size: int, limit: int) -> int:
    """Return the largest divisor of a positive ``size`` that is at most ``limit``."""
    return next(k for k in range(min(limit, size), 0, -1) if size % k == 0)


def _asked(
    batch_dim: BatchDim, model: nn.Module, batch: Batch, names: Sequence[str]
) -> tuple[int, dict[int, int | None]]:
    """Return the batch dimension of all tensors, and of those for which another was asked."""
    if isinstance(batch_dim, int):
        return batch_dim, {}
    keys = [key for key, _ in batch_dim]
    check_named("batch_dim", keys, model, batch)
    dims: dict[int, int | None] = {}
    for place, (_, dim) in zip(places_of(keys, model, batch), batch_dim, strict=True):
        dims |= {k: dim for k, name in enumerate(names) if named(name, (place,))}
    return 0, dims


def _rows(value: Tensor | Microbatches, dim: int) -> int:
    return sum(piece.shape[dim] for piece in pieces_of(value))


def _other_size(name: str, needed: int, given: int) -> UsageError:
    return UsageError(
        "the batch dimension of a tensor has another size than the batch",
        where=name,
        needed=needed,
        given=given,
        fix="name its batch dimension in compile(..., batch_dim={...}), None if it has none",
    )


def described(value: Value) -> str:
    """Return shape and dtype of a tensor, or of the microbatches that it is cut into."""
    if isinstance(value, Microbatches):
        return f"microbatches {[list(piece.shape) for piece in value.pieces]} {value.dtype}"
    return "nothing" if value is None else f"{list(value.shape)} {value.dtype}"


def _other_value(path: str, needed: object, given: object) -> UsageError:
    return UsageError(
        "an argument that is no tensor has another value than the one that was compiled",
        where=name_of(path) or "the arguments",
        needed=f"{reprlib.repr(needed)}, as compiled",
        given=reprlib.repr(given),
        fix="pass a tensor if its value changes from call to call, or compile another pipeline",
    )


def _matched(old: Spec, new: Spec, leaves: Iterator[Tensor], path: str, partial: bool) -> Iterator[Value]:
    """Yield the values of a call in the order of the example's tensors.

    Raises
    ------
    UsageError
        Nesting, or a value that is no tensor, differs.
    """
    if old.kind == new.kind == "tensor":
        yield next(leaves)
        return
    if partial and old.num_tensors and new.kind == "constant" and new.value is None:
        yield from [None] * old.num_tensors
        return
    if old.kind != new.kind or old.keys != new.keys or len(old.children) != len(new.children):
        raise UsageError(
            "the call differs from the one that was compiled",
            where=name_of(path) or "the arguments",
            fix="pass the same arguments, or compile another pipeline for this form",
        )
    if found := first_difference(old.seen, new.seen, path):
        raise _other_value(*found)
    for key, left, right in zip(old.keys, old.children, new.children, strict=True):
        yield from _matched(left, right, leaves, path + step_to(key), partial)
