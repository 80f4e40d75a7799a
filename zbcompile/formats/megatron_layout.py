"""Megatron-Core's ``--pipeline-model-parallel-layout``: which layers every stage holds, as a string.

    model.embed_tokens, layers 0-2 | layers 3-6 | layer 7, norm, lm_head   -->   Ettt|t*4|tL

``E`` is the embedding, ``t`` a transformer layer, ``L`` the loss with the head; stages stand in the order of
the forward, stage k on rank k mod p. What a stage holds is told by the names of parameters: a layer is a path
up to its first number. The final norm has no sign: Megatron-Core builds it behind its last layer.

Source: NVIDIA, Megatron-Core developer guide, Custom Pipeline Model Parallel Layout.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from zbcompile.errors import UsageError
from zbcompile.schedule.cuts import Cuts
from zbcompile.schedule.ir import Placement

__all__ = ["dumps", "holdings", "of_cuts"]

_LAYER = re.compile(r"(?:(?P<list>.*)\.)?(?P<number>[0-9]{1,6})")
_RANGE = re.compile(r"(?P<list>(?:.*\.)?)(?P<low>[0-9]{1,6})-(?P<high>[0-9]{1,6})")
_MOST_LAYERS = 1 << 16
"""Most layers and modules that the names of all pieces together may hold."""
_PART = "part of "
_SEPARATOR = ", "


def holdings(parameters: Sequence[Sequence[str]]) -> list[str]:
    """Return what each piece of a model holds, in words that `of_cuts` reads.

    Parameters
    ----------
    parameters
        Names of parameters, per piece.

    Returns
    -------
    list
        For instance ``model.embed_tokens, model.layers.0, part of model.layers.1``.
    """
    pieces = [tuple(dict.fromkeys(map(_group, names))) for names in parameters]
    counts = Counter(group for groups in pieces for group in groups)
    return [
        _SEPARATOR.join(_ranges([_PART * (counts[group] > 1) + group for group in groups]))
        for groups in pieces
    ]


def _ranges(words: Sequence[str]) -> Iterator[str]:
    """``layers.0, layers.1, layers.2, norm  -->  layers.0-2, norm``."""

    def place(item: tuple[int, str]) -> tuple[str, int]:
        match = _LAYER.fullmatch(item[1])
        return (item[1], -1) if match is None else (match["list"], int(match["number"]) - item[0])

    for _, run in groupby(enumerate(words), key=place):
        first, *rest = (word for _, word in run)
        yield f"{first}-{rest[-1].rpartition('.')[2]}" if rest else first


def _expanded(word: str) -> list[str]:
    """``layers.0-2  -->  layers.0, layers.1, layers.2``; what is no range stays."""
    match = _RANGE.fullmatch(word)
    if match is None:
        return [word]
    return [f"{match['list']}{number}" for number in range(int(match["low"]), int(match["high"]) + 1)]


def _count(word: str) -> int:
    """Return how many layers or modules a word of a piece's name stands for."""
    match = _RANGE.fullmatch(word)
    return 1 if match is None else max(0, int(match["high"]) - int(match["low"]) + 1)


def _group(name: str) -> str:
    """``model.layers.3.mlp.up.weight`` --> ``model.layers.3``; without a number, the module's own path."""
    words = name.split(".")
    for k, word in enumerate(words):
        if word.isdigit():
            return ".".join(words[: k + 1])
    return ".".join(words[:-1]) or name


def of_cuts(cuts: Cuts, placement: Placement) -> str:
    """Return the layout of stages that were cut out of named pieces.

    Raises
    ------
    UsageError
        As `dumps`; or a piece has no such name.
    """
    words = [
        [word.removeprefix(_PART) for word in piece.name.split(_SEPARATOR)] for piece in cuts.pieces.stages
    ]
    total = sum(_count(word) for row in words for word in row)
    if total > _MOST_LAYERS:
        raise UsageError(
            "the pieces name too many layers",
            where="cuts.pieces.stages[...].name",
            needed=f"at most {_MOST_LAYERS} on all of them",
            given=total,
        )
    pieces = [[part for word in row for part in _expanded(word) if part] for row in words]
    if not any(_is_layer(word) for words in pieces for word in words):
        raise UsageError(
            "the pieces do not say which layers they hold",
            where="cuts.pieces.stages[...].name",
            needed="names such as model.layers.3",
            given=cuts.pieces.stages[0].name,
            fix="profile the model with `zbcompile profile --pieces`",
        )
    ends = [first + size for first, size in zip(cuts.first_pieces, cuts.sizes, strict=True)]
    stages = [
        [word for words in pieces[first:end] for word in words]
        for first, end in zip(cuts.first_pieces, ends, strict=True)
    ]
    return dumps(stages, placement)


def dumps(stages: Sequence[Iterable[str]], placement: Placement) -> str:
    """Return the layout of stages.

    Parameters
    ----------
    stages
        Per stage, names of parameters that it holds, or of layers and modules.
    placement
        The rank of every stage.

    Raises
    ------
    UsageError
        A layer is cut, layers are out of order or of several lists, something stands between them, the loss
        has a stage without the head, or stage k is not on rank k mod p.
    """
    p, count = placement.num_ranks, placement.num_stages
    if placement.rank_of != tuple(s % p for s in range(count)):
        raise UsageError(
            "Megatron-Core's layout puts stage k on rank k mod p",
            where="placement",
            needed="linear or looped",
            given=placement.name,
            fix="plan with --placement linear or looped",
        )
    held = [tuple(dict.fromkeys(name if _is_layer(name) else _group(name) for name in row)) for row in stages]
    numbers, last = _layers(held)
    for stage, groups in enumerate(held):
        others = [group for group in groups if not _is_layer(group)]
        if stage in (0, count - 1) and not others:
            raise _refused("stage 0 holds no embedding" if stage == 0 else "the last stage holds no head")
        if others and stage not in (0, last, count - 1):
            raise _refused(f"{others[0]} stands in stage {stage}")
    signs = ["t" * number for number in numbers]
    signs[0] = "E" + signs[0]
    signs[-1] += "L"
    return "|".join(map(_short, signs))


def _is_layer(name: str) -> bool:
    return _LAYER.fullmatch(name) is not None


def _layers(held: Sequence[Sequence[str]]) -> tuple[list[int], int]:
    """Return the number of layers of every stage, and the stage of the last one."""
    home: dict[int, int] = {}
    lists = set()
    for stage, groups in enumerate(held):
        for group in groups:
            match = _LAYER.fullmatch(group)
            if match is None:
                continue
            lists.add(match["list"])
            number = int(match["number"])
            if home.setdefault(number, stage) != stage and len(lists) == 1:
                raise _refused(f"{group} is cut: stages {home[number]} and {stage} hold parts of it")
    if len(lists) > 1:
        raise _refused(f"layers stand in several lists: {', '.join(sorted(lists))}")
    if not home:
        raise _refused("no parameter belongs to a numbered layer")
    order = [home[number] for number in sorted(home)]
    if order != sorted(order) or sorted(home) != list(range(len(home))):
        raise _refused("the layers are not numbered from 0 in the order of the stages")
    return [order.count(stage) for stage in range(len(held))], order[-1]


def _refused(what: str) -> UsageError:
    return UsageError(
        f"{what}: Megatron-Core's layout cannot say that",
        needed="cuts between whole layers, the embedding in stage 0 and the head in the last one",
        fix='cut at layers: split_points=["model.layers.4", ...], or fewer pieces',
    )


def _short(signs: str) -> str:
    """``Etttt`` --> ``Et*4``."""
    runs = ((sign, len(list(run))) for sign, run in groupby(signs))
    return "".join(sign * n if n < 4 else f"{sign}*{n}" for sign, n in runs)
