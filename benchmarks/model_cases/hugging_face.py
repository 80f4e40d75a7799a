"""Configurations from transformers' classes: a class name, what its config has otherwise, and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.model_cases.case import BATCH, Inputs, ModelCase, text, text_with_labels
from benchmarks.model_cases.shrink import small_config

__all__ = ["Settings", "case", "cases", "images", "images_and_labels", "texts_and_images", "with_config"]

Settings = Mapping[str, Any]


def with_config(name: str, settings: Settings) -> nn.Module:
    """Build a class of transformers with a small config and random weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, name)
    return kind(small_config(kind.config_class, settings))


def case(
    name: str,
    family: str,
    settings: Settings | None = None,
    *,
    variant: str = "",
    batch: Callable[[Any], Inputs] = text_with_labels,
    loss: Callable[..., Tensor] | None = None,
    prepare: Callable[[Any], None] | None = None,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    stages: int = 2,
) -> ModelCase:
    """Return the configuration of one class; ``variant`` says which other code path of it runs."""

    def build() -> nn.Module:
        model = with_config(name, settings or {})
        if prepare is not None:
            prepare(model)
        return model if wrap is None else wrap(model)

    label = f"{name}, {variant}" if variant else name
    return ModelCase(label, family, build, batch, loss, "transformers", stages)


def cases(
    family: str,
    names: str,
    settings: Mapping[str, Settings],
    *,
    batch: Callable[[Any], Inputs] = text_with_labels,
    loss: Callable[..., Tensor] | None = None,
    stages: int = 2,
) -> list[ModelCase]:
    """Return one configuration per class name."""
    return [
        case(name, family, settings.get(name), batch=batch, loss=loss, stages=stages)
        for name in names.split()
    ]


def images(channels: int = 3, size: int | Sequence[int] = 32) -> Callable[[Any], Inputs]:
    """Images alone: the loss is made of what the model returns."""
    sides = (size, size) if isinstance(size, int) else tuple(size)
    return lambda model: Inputs(kwargs={"pixel_values": torch.randn(BATCH, channels, *sides)})


def images_and_labels(channels: int = 3, size: int = 32) -> Callable[[Any], Inputs]:
    """Images with a class each: the model returns its loss."""
    return lambda model: Inputs(
        kwargs={
            "pixel_values": torch.randn(BATCH, channels, size, size),
            "labels": torch.randint(0, 2, (BATCH,)),
        }
    )


def texts_and_images(
    shape: Sequence[int] = (3, 32, 32), *, count: int | None = None, token: int = 64, types: bool = False
) -> Callable[[Any], Inputs]:
    """Texts with one image each: the image's tokens stand behind the third token of the text.

    Parameters
    ----------
    shape
        Of one sample's ``pixel_values``.
    count
        Tokens of an image; None asks the model's ``get_image_features``.
    token
        Id of the image's tokens.
    types
        Whether the model is told which tokens are an image's (``mm_token_type_ids``).
    """

    def batch(model: Any) -> Inputs:
        pixels = torch.randn(BATCH, *shape)
        ids = text()
        many = _image_tokens(model, pixels) if count is None else count
        ids = torch.cat([ids[:, :3], ids.new_full((BATCH, many), token), ids[:, 3:]], 1)
        more = {"mm_token_type_ids": (ids == token).long()} if types else {}
        labels = ids.masked_fill(ids == token, -100)
        return Inputs(kwargs={"input_ids": ids, "pixel_values": pixels, "labels": labels, **more})

    return batch


def _image_tokens(model: Any, pixels: Tensor) -> int:
    with torch.no_grad():
        found = model.get_image_features(pixel_values=pixels)
    found = getattr(found, "pooler_output", found)
    rows = torch.cat([f.flatten(0, -2) for f in found]) if isinstance(found, list | tuple) else found
    return rows.flatten(0, -2).shape[0] // BATCH
