"""Megatron-Core's layout string: from names of parameters, from pieces, and what it cannot say."""

from __future__ import annotations

import pytest

from zbcompile.errors import UsageError
from zbcompile.formats.megatron_layout import dumps, holdings, of_cuts
from zbcompile.schedule.costs import Profile, StageCost
from zbcompile.schedule.cuts import Cuts
from zbcompile.schedule.ir import Placement

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def layers(low: int, high: int) -> list[str]:
    """Parameters of some layers of a Llama."""
    ends = ("self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight")
    return [f"model.layers.{k}.{end}" for k in range(low, high) for end in ends]


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ([[EMBED, *layers(0, 3)], layers(3, 8), [*layers(8, 9), NORM, HEAD]], "Ettt|t*5|tL"),
        ([[EMBED, *layers(0, 2), NORM, HEAD]], "EttL"),
        ([[EMBED], layers(0, 4), [*layers(4, 6), NORM], [HEAD]], "E|t*4|tt|L"),
        ([[EMBED, *layers(0, 1)], [], [*layers(1, 2), NORM, HEAD]], "Et||tL"),
        ([[EMBED, "wpe.weight", *layers(0, 1)], [*layers(1, 2), NORM, EMBED]], "Et|tL"),  # a tied head
    ],
)
def test_layouts(stages: list[list[str]], text: str) -> None:
    assert dumps(stages, Placement.linear(len(stages))) == text
    if len(stages) % 2 == 0:
        assert dumps(stages, Placement.looped(len(stages) // 2)) == text


@pytest.mark.parametrize(
    ("stages", "word"),
    [
        ([[EMBED, *layers(0, 2)[:-1]], [*layers(1, 3), HEAD]], "model.layers.1 is cut: stages 0 and 1"),
        ([[EMBED, *layers(0, 1)], layers(1, 2)], "the last stage holds no head"),
        ([layers(0, 1), [*layers(1, 2), HEAD]], "stage 0 holds no embedding"),
        ([[EMBED], [NORM], [*layers(0, 2), HEAD]], "model.norm stands in stage 1"),
        ([[EMBED, *layers(1, 2)], [*layers(0, 1), HEAD]], "in the order of the stages"),
        ([[EMBED, "encoder.layers.0.w"], ["decoder.layers.0.w", HEAD]], "several lists: decoder.layers, enc"),
        ([[EMBED], [HEAD]], "no parameter belongs to a numbered layer"),
    ],
)
def test_what_it_cannot_say_is_refused_by_name(stages: list[list[str]], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        dumps(stages, Placement.linear(len(stages)))


def test_another_placement_is_refused() -> None:
    with pytest.raises(UsageError, match="stage k on rank k mod p"):
        dumps([[EMBED], layers(0, 1), layers(1, 2), [HEAD]], Placement.v(2))


def test_pieces_say_what_they_hold_and_stages_are_made_of_them() -> None:
    first, second, third = [EMBED, *layers(0, 1)[:1]], [*layers(0, 1)[1:], *layers(1, 5)], [NORM, HEAD]
    names = holdings([first, second, third])
    assert names == [
        "model.embed_tokens, part of model.layers.0",
        "part of model.layers.0, model.layers.1-4",
        "model.norm, lm_head",
    ]
    costs = tuple(StageCost(1, 1, 1, 2, 1, 1, name=name) for name in names)
    assert of_cuts(Cuts(Profile(costs), (2, 1)), Placement.linear(2)) == "Et*5|L"
    with pytest.raises(UsageError, match="model.layers.0 is cut"):
        of_cuts(Cuts(Profile(costs), (1, 2)), Placement.linear(2))
    numbered = tuple(
        StageCost(1, 1, 1, 2, 1, 1, name=n) for n in ("enc2.emb, enc2.layers.0-1", "enc2.layers.2, h1")
    )
    assert of_cuts(Cuts(Profile(numbered), (1, 1)), Placement.linear(2)) == "Ett|tL"
    wide = tuple(StageCost(1, 1, 1, 2, 1, 1, name=f"a, b.0-{10**6 - 1}") for _ in range(2))
    with pytest.raises(UsageError, match="name too many layers"):
        of_cuts(Cuts(Profile(wide), (1, 1)), Placement.linear(2))
    with pytest.raises(UsageError, match="do not say which layers"):
        of_cuts(Cuts(Profile((StageCost.simple(1, 1, 1),) * 2), (1, 1)), Placement.linear(2))
