"""Find arguments that are cut along a dimension that is not the batch, by the untouched model's own results.

Shapes alone do not say it: a mask [S, S] beside S samples, an input [S, B, D]. Where shapes leave a doubt,
the model runs forward in evaluation mode on joined microbatches and on single ones. It is refused on
evidence only: the results differ, and agree if the argument is kept whole or is cut along dimension 1. A
model that mixes its samples passes, unless it mixes them at every place of a sequence by itself: that cannot
be told from [S, B, D].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zbcompile.compiler.signature import Signature, Value
from zbcompile.errors import UsageError
from zbcompile.passes.capture.nested_values import flatten, unflatten
from zbcompile.passes.capture.state_guards import attributes_kept, random_kept

__all__ = ["check_batch_dimension"]

_SAME = 1e-4
"""Largest relative difference of float32 results that are the same; ten times it is another result."""


def check_batch_dimension(
    model: nn.Module, signature: Signature, batch: Sequence[Value], count: int, result_dim: int
) -> None:
    """Refuse arguments of the model that are cut along another dimension than the batch's.

    Parameters
    ----------
    model
        The untouched model; it is left as it was.
    signature
        Along which dimensions the batch is cut.
    batch
        The whole batch. What the user has cut is not checked.
    count
        Number of microbatches.
    result_dim
        The dimension along which results are joined.

    Raises
    ------
    UsageError
        Names the argument, and says how to pass it.

    Notes
    -----
    Costs nothing without a doubt: no model argument beside the first is square in the batch, and the first is
    no floating-point tensor of three dimensions. A doubt about a square costs up to three forwards of the
    whole batch, one about the first argument up to eight of a microbatch.
    """
    given = sum(child.num_tensors for child in signature.spec.children[:2])
    dims = {k: dim for k, dim in enumerate(signature.dims[:given]) if dim is not None}
    tensors = [value for value in batch if isinstance(value, Tensor)]
    if count == 1 or not dims or len(tensors) < len(batch) or max(dims.values()) > 1:
        return
    first = next(iter(dims))
    squares = [
        k
        for k, dim in dims.items()
        if k != first and tensors[k].dim() > 1 and tensors[k].shape[1 - dim] == signature.size
    ]
    head = tensors[first]
    has_three = head.dim() > 2 and head.is_floating_point() and head.shape[1 - dims[first]] > 1
    if not squares and not has_three:
        return
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with attributes_kept(model), random_kept(), torch.random.fork_rng(devices=[]), torch.no_grad():
        model.eval()

        def run(values: Sequence[Tensor]) -> list[Tensor]:
            args, kwargs, _ = unflatten(signature.spec, [value.detach().clone() for value in values])
            return flatten(model(*args, **kwargs), results=True)[0]

        try:
            for k in squares:
                _check_square(_Cut(run, tensors, dims, count, result_dim), k, signature.names[k])
            if has_three:
                rows = 2 * (signature.size // count)
                pair = [t.narrow(dims[k], 0, rows) if k in dims else t for k, t in enumerate(tensors)]
                _check_first(_Cut(run, pair, dims, 2, result_dim), signature.names[first])
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)


@dataclass(frozen=True)
class _Cut:
    """Results of a model on a batch as a whole, and on its pieces.

    Attributes
    ----------
    run
        Calls the model.
    tensors
        The batch.
    dims
        Tensor -> the dimension along which it is cut.
    count
        Number of pieces.
    result_dim
        The dimension along which their results are joined.
    """

    run: Callable[[Sequence[Tensor]], list[Tensor]]
    tensors: Sequence[Tensor]
    dims: Mapping[int, int]
    count: int
    result_dim: int

    def difference(self) -> float | None:
        """Return the relative difference if the tensors are cut; None where the model cannot run."""
        try:
            whole = self.run(self.tensors)
            pieces = {k: self.tensors[k].chunk(self.count, dim) for k, dim in self.dims.items()}
            parts = [
                self.run([pieces[k][i] if k in pieces else t for k, t in enumerate(self.tensors)])
                for i in range(self.count)
            ]
        except Exception:  # the model's own, on a batch that it was not made for
            return None
        return _difference(whole, parts, self.result_dim)


def _difference(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], dim: int) -> float | None:
    """Return the largest relative difference of the results that can be joined; None where there is none."""
    found: list[float] = []
    for k, expected in enumerate(whole):
        pieces = [part[k] for part in parts if len(part) == len(whole)]
        if len(pieces) < len(parts) or not expected.is_floating_point() or expected.dim() <= dim:
            continue
        if any(piece.dim() != expected.dim() for piece in pieces):
            continue
        joined = torch.cat(pieces, dim) if all(_joinable(p, expected, dim) for p in pieces) else None
        if joined is None or joined.shape != expected.shape:
            continue
        scale = max(1.0, torch.finfo(expected.dtype).eps * 8 / _SAME)  # of narrower numbers
        difference = (joined.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
        found.append(float(difference) / scale)
    return max(found, default=None)


def _joinable(piece: Tensor, whole: Tensor, dim: int) -> bool:
    return all(a == b for i, (a, b) in enumerate(zip(piece.shape, whole.shape, strict=True)) if i != dim)


def _check_square(batch: _Cut, square: int, name: str) -> None:
    as_cut = batch.difference()
    if as_cut is None or not as_cut > 10 * _SAME:
        return
    kept = replace(batch, dims={k: dim for k, dim in batch.dims.items() if k != square}).difference()
    if kept is not None and kept <= _SAME:
        raise UsageError(
            "an argument would be cut into microbatches, but it has no batch dimension",
            where=name,
            needed="the untouched model's results on the whole batch, as with the argument kept whole",
            given=f"results that differ by {as_cut:.1e} relative if it is cut",
            fix="name it in compile(..., whole=[...]): positions of args, names of kwargs",
        )


def _check_first(batch: _Cut, name: str) -> None:
    as_cut = batch.difference()
    if as_cut is None or not as_cut > 10 * _SAME:
        return
    first, cut = next(iter(batch.dims.items()))
    other = 1 - cut
    size = batch.tensors[first].shape[other]
    along = {
        k: other for k in batch.dims if batch.tensors[k].dim() > 1 and batch.tensors[k].shape[other] == size
    }
    pieces = next(p for p in range(2, size + 1) if size % p == 0)
    across = replace(batch, dims=along, count=pieces, result_dim=other).difference()
    if across is not None and across <= _SAME:
        raise UsageError(
            f"the batch is dimension {other} of an argument, and microbatches are cut along dimension {cut}",
            where=name,
            needed="the untouched model's results on two microbatches together, "
            f"as if cut along dimension {other}",
            given=f"results that differ by {as_cut:.1e} relative if dimension {cut} is cut",
            fix=f"give compile(..., batch_dim={other}); if the model mixes samples on purpose, "
            "compile with verify=False",
        )
