"""The configurations of `benchmarks/models.py`, as data."""

from benchmarks.model_cases.audio import AUDIO
from benchmarks.model_cases.case import ModelCase
from benchmarks.model_cases.diffusion import DIFFUSION
from benchmarks.model_cases.graphs import GRAPHS
from benchmarks.model_cases.language import LANGUAGE
from benchmarks.model_cases.plain import PLAIN
from benchmarks.model_cases.timm_cases import TIMM
from benchmarks.model_cases.vision import VISION
from benchmarks.model_cases.vision_language import VISION_LANGUAGE
from benchmarks.model_cases.with_options import with_options
from benchmarks.model_cases.x_transformers_cases import X_TRANSFORMERS

__all__ = ["CASES"]

CASES: tuple[ModelCase, ...] = tuple(
    with_options((
        *LANGUAGE, *VISION, *VISION_LANGUAGE, *AUDIO, *DIFFUSION, *TIMM, *X_TRANSFORMERS, *GRAPHS, *PLAIN,
    ))
)  # fmt: skip
