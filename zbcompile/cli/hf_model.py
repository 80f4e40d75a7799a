"""Builds a language model from a Hugging Face configuration without weights, cuts it and counts its costs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zbcompile.errors import UsageError, ZBCompileError
from zbcompile.formats.profile_json import ProfileFile
from zbcompile.formats.streams import say
from zbcompile.schedule.devices import device_named

__all__ = ["Asked", "counted"]

_MOST_LAYERS = 1024
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_FACTORY = "write a function that builds the model, and count it: zbcompile profile FACTORY --device H100"
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a configuration.

    Attributes
    ----------
    path, device
        The file, and the name of the device to count for.
    count, pieces
        Number of stages, or at most so many small pieces.
    sequence, microbatch_size
        Tokens of a sequence (None: as many as the model takes, within a limit), sequences of a microbatch.
    dtype
        Of weights and activations; None: the configuration's.
    num_microbatches
        Of a step, where it is known.
    recompute
        Whether stages are offered at other levels of recompute as well.
    """

    path: str
    device: str
    count: int
    pieces: bool
    sequence: int | None
    microbatch_size: int
    dtype: str | None
    num_microbatches: int | None
    recompute: bool


def counted(asked: Asked, config: Mapping[str, Any], *, most_tokens: int) -> ProfileFile:
    """Return the costs of a configuration's stages, counted, and the device's memory as the cap of all ranks.

    Parameters
    ----------
    config
        The content of the file.
    most_tokens
        Tokens of a sequence where none are asked for and the model takes more.

    Raises
    ------
    UsageError
        transformers knows no causal or masked language model of that kind, or cannot build it.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--hf-config needs {error.name}", fix=f"pip install {error.name}") from None
    from zbcompile.compiler.stages import build_pieces, build_stages
    from zbcompile.compiler.variants import offered_levels
    from zbcompile.passes.profile.counted import counted_profile

    device = device_named(asked.device)
    dtype = asked.dtype or _dtype(config)
    settings = _settings(asked.path, config)
    tokens = asked.sequence or min(most_tokens, _positions(settings) or most_tokens)
    say(f"building {settings.model_type} without weights: {dtype}, {asked.microbatch_size} x {tokens} tokens")
    model = _model(asked.path, settings, dtype)
    with torch.device("meta"):
        ids = torch.zeros(asked.microbatch_size, tokens, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids}
    build = build_pieces if asked.pieces else build_stages
    count = asked.num_microbatches
    staged = build(model, asked.count, (), inputs, verify=False, planned_for=device, num_microbatches=count)
    others = offered_levels(staged) if asked.recompute else None
    costs = counted_profile(staged.stages, device, others=others)
    return ProfileFile(costs, caps=(device.memory_bytes,))


def _settings(path: str, config: Mapping[str, Any]) -> Any:
    """Return the configuration object of transformers."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UsageError(
            f"transformers does not know the model type {str(kind)[:60]!r}",
            where=path,
            fix=_FACTORY,
        )
    if config.get("quantization_config") is not None:
        raise UsageError(
            "quantized weights are not trained", where=f"{path}.quantization_config", fix="leave it out"
        )
    for name in _LAYERS:
        if not isinstance(layers := config.get(name, 1), int) or not 0 < layers <= _MOST_LAYERS:
            raise UsageError(
                "too many layers", where=f"{path}.{name}", needed=f"1 to {_MOST_LAYERS}", given=layers
            )
    left = {key: value for key, value in config.items() if key not in ("model_type", "auto_map", "use_cache")}
    try:
        return AutoConfig.for_model(kind, **left, use_cache=False)
    except Exception as error:
        raise _unbuildable(path, kind, error) from error


def _model(path: str, settings: Any, dtype: str) -> Any:
    """Build the language model of a configuration on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
    )

    kinds = (
        (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
        (MODEL_FOR_MASKED_LM_MAPPING, AutoModelForMaskedLM),
    )
    found = [auto for mapping, auto in kinds if type(settings) in mapping]
    if "MaskedLM" in str(getattr(settings, "architectures", None)):
        found.reverse()
    if not found:
        raise UsageError(
            f"transformers has no causal or masked language model of the type {settings.model_type!r}",
            where=path,
            fix=_FACTORY,
        )
    try:
        with torch.device("meta"):
            auto: Any = found[0]
            return auto.from_config(settings).to(getattr(torch, dtype))
    except ZBCompileError:
        raise
    except Exception as error:
        raise _unbuildable(path, settings.model_type, error) from error


def _unbuildable(path: str, kind: str, error: Exception) -> UsageError:
    lines = str(error).strip().splitlines() or [""]
    return UsageError(
        f"transformers cannot build this {kind}: {type(error).__name__}: {lines[0][:200]}", where=path
    )


def _dtype(config: Mapping[str, Any]) -> str:
    """Return the configuration's dtype, or bfloat16 where it names none."""
    named = config.get("dtype", config.get("torch_dtype")) or "bfloat16"
    if named not in _DTYPES:
        raise UsageError(
            f"a model in {str(named)[:40]!r} is not trained", needed=", ".join(_DTYPES), fix="give --dtype"
        )
    return str(named)


def _positions(settings: Any) -> int | None:
    """Return how many positions the model has; None where it does not say."""
    found = (getattr(settings, name, None) for name in _POSITIONS)
    return next((count for count in found if isinstance(count, int) and count > 0), None)
