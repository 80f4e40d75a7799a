"""Arguments that are no tensors: taken as they are, and refused where they hold another value later."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zbcompile
from zbcompile.errors import UsageError

MSE = nn.functional.mse_loss


class Sign(Enum):
    PLUS = 1
    MINUS = 2


@dataclass
class Settings:
    scale: float
    shift: Tensor | None = None


class Scaled(nn.Module):
    """A factor comes from a value that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor, given: Any) -> Tensor:
        if isinstance(given, Sign):
            factor = -1.0 if given is Sign.MINUS else 1.0
        elif isinstance(given, np.ndarray):
            factor = float(given.sum())
        else:
            factor = given.scale if hasattr(given, "scale") else float(len(given))
        shift = getattr(given, "shift", None)
        result: Tensor = self.layers(x) * factor
        return result if shift is None else result + shift


def compiled(model: nn.Module, given: Any) -> tuple[zbcompile.Pipeline, Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    options = {"loss_fn": MSE, "num_microbatches": 4, "time_limit": 0.3}
    return zbcompile.compile(model, 2, example_args=(x, given), example_target=x, **options), x  # type: ignore[arg-type]


SHIFT = torch.linspace(0, 1, 48).view(8, 6)


def space(scale: float) -> SimpleNamespace:
    return SimpleNamespace(scale=scale, shift=SHIFT)


@pytest.mark.parametrize(
    ("given", "other", "where"),
    [
        (Settings(2.0), Settings(3.0), r"args\[1\].scale\)\n.*2.0, as compiled; given: 3.0"),
        (Settings(2.0, SHIFT), Settings(3.0, SHIFT), r"args\[1\].scale"),
        (space(2.0), space(3.0), r"args\[1\].scale"),
        (Settings(float("nan")), Settings(1.0), r"args\[1\].scale"),
        (Settings(1), Settings(True), r"args\[1\].scale"),
        (np.ones(2), np.ones(3), r"args\[1\]"),
        ({"a", "b"}, {"a"}, r"args\[1\]"),
        (range(3), range(4), r"args\[1\].stop"),
        (Sign.MINUS, Sign.PLUS, r"args\[1\].*\n.*MINUS.*PLUS"),
    ],
    ids=["object", "with a tensor", "namespace", "nan", "type", "array", "set", "range", "enum"],
)  # fmt: skip
def test_an_object_means_what_it_means_to_the_model_and_another_one_is_refused(
    given: Any, other: Any, where: str
) -> None:
    model = Scaled()
    pipeline, x = compiled(model, given)
    output = pipeline.step(x, given, target=x, return_outputs=True)
    assert torch.equal(output.isnan(), model(x, given).isnan())
    assert torch.allclose(
        output, model(x, given), atol=1e-6, equal_nan=True
    )  # rows of 2 add in another order
    with pytest.raises(UsageError, match=f"has another value.*{where}"):
        pipeline.step(x, other, target=x)


def test_an_object_that_is_changed_in_place_is_refused_in_every_shape() -> None:
    settings = Settings(1.0)
    pipeline, x = compiled(Scaled(), settings)
    settings.scale = 2.0
    for rows, given in ((8, settings), (5, settings), (5, Settings(1.0))):
        with pytest.raises(UsageError, match=r"args\[1\].scale(?s:.)*1.0, as compiled; given: 2.0"):
            pipeline.step(x[:rows], given, target=x[:rows])
    pipeline.step(x, Settings(1.0), target=x)
    settings.scale = 1.0
    pipeline.step(x[:5], settings, target=x[:5])
