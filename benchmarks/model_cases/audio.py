"""Speech, music and time series of transformers."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.model_cases.case import BATCH, Inputs, ModelCase, mean_square, text
from benchmarks.model_cases.hugging_face import case

__all__ = ["AUDIO"]

AUDIO_FAMILY, SERIES = "audio", "time series"
_WAVES = {
    "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
    "num_conv_pos_embedding_groups": 4, "feat_extract_norm": "group",
}  # fmt: skip


def _wave(model: Any) -> Inputs:
    return Inputs(kwargs={"input_values": torch.randn(BATCH, 400)})


def _wave_classes(model: Any) -> Inputs:
    return Inputs(kwargs={"input_values": torch.randn(BATCH, 400), "labels": torch.randint(0, 2, (BATCH,))})


def _mel_and_labels(length: int = 40, channels_first: bool = True) -> Any:
    shape = (BATCH, 8, length) if channels_first else (BATCH, length, 8)
    return lambda model: Inputs(kwargs={"input_features": torch.randn(shape), "labels": text(6)})


def _mel_and_mask(model: Any) -> Inputs:
    kwargs = {
        "input_features": torch.randn(BATCH, 80, 8),
        "attention_mask": torch.ones(BATCH, 80, dtype=torch.long),
    }
    return Inputs(kwargs={**kwargs, "labels": text(3)})


def _mel(length: int = 40, width: int = 8) -> Any:
    return lambda model: Inputs(kwargs={"input_features": torch.randn(BATCH, length, width)})


def _codes(model: Any) -> Inputs:
    return Inputs(
        kwargs={
            "input_ids": torch.randint(0, 32, (BATCH, 2, 12)),
            "labels": torch.randint(0, 32, (BATCH, 12, 2)),
        }
    )


def _window(past: int, future: int, channels: int | None = None) -> Any:
    tail = () if channels is None else (channels,)

    def batch(model: Any) -> Inputs:
        return Inputs(
            kwargs={
                "past_values": torch.randn(BATCH, past, *tail),
                "past_time_features": torch.randn(BATCH, past, 1),
                "past_observed_mask": torch.ones(BATCH, past, *tail),
                "future_values": torch.randn(BATCH, future, *tail),
                "future_time_features": torch.randn(BATCH, future, 1),
            }
        )

    return batch


def _patch_series(model: Any) -> Inputs:
    return Inputs(
        kwargs={"past_values": torch.randn(BATCH, 32, 2), "future_values": torch.randn(BATCH, 8, 2)}
    )


AUDIO: list[ModelCase] = [
    *(
        case(name, AUDIO_FAMILY, _WAVES, batch=_wave, loss=mean_square)
        for name in (
         "Wav2Vec2Model", "HubertModel", "WavLMModel", "UniSpeechModel", "UniSpeechSatModel",
         "Data2VecAudioModel", "Wav2Vec2ConformerModel", "SEWModel", "SEWDModel",
        )
    ),
    case("Wav2Vec2Model", AUDIO_FAMILY, {**_WAVES, "layerdrop": 0.1}, variant="layerdrop 0.1", batch=_wave,
         loss=mean_square),
    case("Wav2Vec2Model", AUDIO_FAMILY, {**_WAVES, "mask_time_prob": 0.05}, variant="masked in time",
         batch=_wave,
         loss=mean_square),
    case("Wav2Vec2Model", AUDIO_FAMILY,
         {**_WAVES, "do_stable_layer_norm": True, "feat_extract_norm": "layer"},
         variant="stable layer norm",
         batch=_wave, loss=mean_square),
    case("Wav2Vec2ForSequenceClassification", AUDIO_FAMILY, _WAVES, batch=_wave_classes),
    case("Wav2Vec2ForCTC", AUDIO_FAMILY, _WAVES,
         batch=lambda m: Inputs(kwargs={"input_values": torch.randn(BATCH, 400), "labels": text(5)})),
    case("Wav2Vec2BertModel", AUDIO_FAMILY, {"feature_projection_input_dim": 8}, batch=_mel(),
         loss=mean_square),
    case("ASTForAudioClassification", AUDIO_FAMILY, {"max_length": 40, "frequency_stride": 4,
         "time_stride": 4},
         batch=lambda m: Inputs(kwargs={"input_values": torch.randn(BATCH, 40, 8),
         "labels": torch.randint(0, 2, (BATCH,))})),
    case("WhisperForConditionalGeneration", AUDIO_FAMILY, {"max_source_positions": 20},
         batch=_mel_and_labels()),
    case("WhisperForAudioClassification", AUDIO_FAMILY, {"max_source_positions": 20},
         batch=lambda m: Inputs(kwargs={"input_features": torch.randn(BATCH, 8, 40),
         "labels": torch.randint(0, 2, (BATCH,))})),
    case("Speech2TextForConditionalGeneration", AUDIO_FAMILY, {"input_feat_per_channel": 8,
         "conv_channels": 32}, batch=_mel_and_labels(channels_first=False)),
    case("SpeechT5ForSpeechToText", AUDIO_FAMILY, _WAVES,
         batch=lambda m: Inputs(kwargs={"input_values": torch.randn(BATCH, 400), "labels": text(6)})),
    case("MoonshineForConditionalGeneration", AUDIO_FAMILY,
         batch=lambda m: Inputs(kwargs={"input_values": torch.randn(BATCH, 2000), "labels": text(6)})),
    case("MusicgenForCausalLM", AUDIO_FAMILY, {"num_codebooks": 2, "layerdrop": 0.0},
         batch=lambda m: Inputs(kwargs={"input_ids": torch.randint(0, 60, (BATCH * 2, 12))}),
         loss=mean_square),
    case("EncodecModel", AUDIO_FAMILY, batch=lambda m: Inputs(kwargs={"input_values": torch.randn(BATCH, 1,
         640)}), loss=mean_square),
    case("DacModel", AUDIO_FAMILY, batch=lambda m: Inputs(kwargs={"input_values": torch.randn(BATCH, 1,
         640)}), loss=mean_square),
    case("MimiModel", AUDIO_FAMILY, {"upsample_groups": 32, "num_filters": 8, "codebook_dim": 32,
         "vector_quantization_hidden_dimension": 32, "num_quantizers": 4, "codebook_size": 32},
         batch=lambda m: Inputs(kwargs={"input_values": torch.randn(BATCH, 1, 1920)}), loss=mean_square),
    case("ParakeetForCTC", AUDIO_FAMILY, {"encoder_config": {"subsampling_conv_channels": 16}},
         batch=_mel_and_mask),
    case("PatchTSTForPrediction", SERIES, {"context_length": 32, "prediction_length": 8,
         "num_input_channels": 2, "patch_length": 8, "patch_stride": 8}, batch=_patch_series),
    case("PatchTSTForPretraining", SERIES, {"context_length": 32, "num_input_channels": 2,
         "patch_length": 8, "patch_stride": 8},
         batch=lambda m: Inputs(kwargs={"past_values": torch.randn(BATCH, 32, 2)})),
    case("PatchTSMixerForPrediction", SERIES, {"context_length": 32, "prediction_length": 8,
         "num_input_channels": 2, "patch_length": 8, "patch_stride": 8}, batch=_patch_series),
    case("TimeSeriesTransformerForPrediction", SERIES, {"prediction_length": 4, "context_length": 8,
         "lags_sequence": [1, 2], "num_time_features": 1, "input_size": 1}, batch=_window(10, 4)),
    case("InformerForPrediction", SERIES, {"prediction_length": 4, "context_length": 8, "lags_sequence": [1,
         2], "num_time_features": 1, "input_size": 1}, batch=_window(10, 4)),
    case("DecisionTransformerModel", SERIES, {"state_dim": 4, "act_dim": 2}, batch=lambda m: Inputs(kwargs={
        "states": torch.randn(BATCH, 5, 4), "actions": torch.randn(BATCH, 5, 2),
         "rewards": torch.randn(BATCH, 5, 1),
        "returns_to_go": torch.randn(BATCH, 5, 1), "timesteps": torch.arange(5).expand(BATCH,
         5).contiguous(),
        "attention_mask": torch.ones(BATCH, 5)}), loss=mean_square),
]  # fmt: skip
