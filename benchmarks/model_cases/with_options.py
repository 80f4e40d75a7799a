"""Configurations that compile with an option that their refusal names, and that option."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from benchmarks.model_cases.case import ModelCase

__all__ = ["with_options"]

_FIXED: dict[str, Any] = {"options": {"fixed_branches": True}}
_RAN_ONCE: dict[str, Any] = {"ran_once": True}
_CHANGES: dict[str, dict[str, Any]] = {
    "LongformerForMaskedLM": _FIXED,
    "LEDForConditionalGeneration": _FIXED,
    "FSMTForConditionalGeneration": _FIXED,
    "DetrForObjectDetection": _FIXED,
    "DeformableDetrForObjectDetection": _FIXED,
    "Ovis2ForConditionalGeneration": _FIXED,
    "a clamp if anything is infinite": _FIXED,
    "IBertForMaskedLM": {**_FIXED, **_RAN_ONCE},
    "BigBirdPegasusForConditionalGeneration": _RAN_ONCE,
    "x-transformers alibi": _RAN_ONCE,
    "Mistral3ForConditionalGeneration": {"options": {"constant": ("image_sizes",)}},
    "Lumina2Transformer2DModel": {"options": {"constant": ("encoder_attention_mask",)}},
    "SuperPointForKeypointDetection": {"joined": False},
}


def with_options(cases: Iterable[ModelCase]) -> Iterator[ModelCase]:
    """Yield configurations with what they need besides the model and a batch."""
    for case in cases:
        yield replace(case, **_CHANGES.get(case.name, {}))
