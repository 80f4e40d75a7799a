"""Diffusion models of diffusers: U-Nets, transformers and autoencoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.model_cases.case import BATCH, Inputs, ModelCase, mean_square

__all__ = ["DIFFUSION"]


def _case(
    name: str, inputs: Callable[[], dict[str, Any]], variant: str = "", prepare: Any = None, **settings: Any
) -> ModelCase:
    def build() -> nn.Module:
        import diffusers

        model = getattr(diffusers, name)(**settings)
        if prepare is not None:
            prepare(model)
        return model

    def batch(model: Any) -> Inputs:
        kwargs = inputs()
        return Inputs(kwargs=kwargs, whole=tuple(k for k in ("img_ids", "txt_ids") if k in kwargs))

    label = f"{name}, {variant}" if variant else name
    return ModelCase(label, "diffusion", build, batch, mean_square, "diffusers")


def _noise(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape)


def _times() -> Tensor:
    return torch.randint(0, 1000, (BATCH,))


def _ids(*shape: int) -> Tensor:
    return torch.zeros(*shape)


def _flux(**more: Any) -> dict[str, Any]:
    return {
        "hidden_states": _noise(16, 16), "encoder_hidden_states": _noise(6, 32),
             "timestep": torch.rand(BATCH),
        "img_ids": _ids(16, 3), "txt_ids": _ids(6, 3), **more,
    }  # fmt: skip


def _sizes() -> dict[str, Tensor]:
    return {
        "original_size": torch.tensor([[64.0, 64.0]] * BATCH), "target_size": torch.tensor([[64.0,
             64.0]] * BATCH),
        "crop_coords": torch.zeros(BATCH, 2),
    }  # fmt: skip


_TWO = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
_DIT = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}

DIFFUSION: list[ModelCase] = [
    _case("UNet2DModel", lambda: {"sample": _noise(3, 16, 16), "timestep": _times()}, **_TWO,
         down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D",
         "UpBlock2D")),
    _case("UNet2DModel", lambda: {"sample": _noise(3, 16, 16), "timestep": _times(),
         "class_labels": torch.randint(0, 4, (BATCH,))}, "classes, scale and shift", **_TWO,
         down_block_types=("ResnetDownsampleBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D",
         "ResnetUpsampleBlock2D"),
         num_class_embeds=4, resnet_time_scale_shift="scale_shift"),
    _case("UNet2DConditionModel", lambda: {"sample": _noise(4, 16, 16), "timestep": _times(),
         "encoder_hidden_states": _noise(6, 32)}, **_TWO,
         down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D",
         "CrossAttnUpBlock2D"), cross_attention_dim=32, attention_head_dim=8),
    _case("UNet2DConditionModel", lambda: {"sample": _noise(4, 16, 16), "timestep": _times(),
         "encoder_hidden_states": _noise(6, 32)}, "checkpointed",
         lambda model: model.enable_gradient_checkpointing(), **_TWO,
         down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D",
         "CrossAttnUpBlock2D"), cross_attention_dim=32, attention_head_dim=8),
    _case("UNet3DConditionModel", lambda: {"sample": _noise(4, 2, 16, 16), "timestep": _times(),
         "encoder_hidden_states": _noise(6, 32)}, **_TWO,
         down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D",
         "CrossAttnUpBlock3D"), cross_attention_dim=32, attention_head_dim=8),
    _case("UNetSpatioTemporalConditionModel", lambda: {"sample": _noise(2, 8, 16, 16), "timestep": _times(),
         "encoder_hidden_states": _noise(1, 32), "added_time_ids": torch.rand(BATCH, 3)},
         block_out_channels=(32, 64), layers_per_block=1, num_attention_heads=(2, 4),
         cross_attention_dim=32, addition_time_embed_dim=8, projection_class_embeddings_input_dim=24,
         down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
         up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")),
    _case("UVit2DModel", lambda: {"input_ids": torch.randint(0, 32, (BATCH, 8, 8)),
         "encoder_hidden_states": _noise(6, 32), "pooled_text_emb": _noise(32),
         "micro_conds": torch.rand(BATCH, 5)},
         hidden_size=32, cond_embed_dim=32, micro_cond_encode_dim=8, micro_cond_embed_dim=40,
         encoder_hidden_size=32, vocab_size=33, codebook_size=32, in_channels=32,
         block_out_channels=32,
         num_res_blocks=1, block_num_heads=4, num_hidden_layers=2, num_attention_heads=4,
         intermediate_size=64, sample_size=8),
    _case("DiTTransformer2DModel", lambda: {"hidden_states": _noise(4, 8, 8), "timestep": _times(),
         "class_labels": torch.randint(0, 8, (BATCH,))}, **_DIT, sample_size=8, num_embeds_ada_norm=8,
         out_channels=8),
    _case("PixArtTransformer2DModel", lambda: {"hidden_states": _noise(4, 8, 8), "timestep": _times(),
         "encoder_hidden_states": _noise(6, 32), "added_cond_kwargs": {"resolution": None,
         "aspect_ratio": None}}, **_DIT, sample_size=8, cross_attention_dim=32, caption_channels=32,
         use_additional_conditions=False),
    _case("Transformer2DModel", lambda: {"hidden_states": _noise(32, 8, 8),
         "encoder_hidden_states": _noise(6, 32)}, **_DIT, in_channels=32, norm_num_groups=8,
         cross_attention_dim=32),
    _case("FluxTransformer2DModel", lambda: _flux(pooled_projections=_noise(32),
         guidance=torch.rand(BATCH)), **(_DIT | {"num_layers": 2}), in_channels=16, num_single_layers=2,
         joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(2, 2, 4)),
    _case("ChromaTransformer2DModel", _flux, **(_DIT | {"num_layers": 2}), in_channels=16,
         num_single_layers=2, joint_attention_dim=32, axes_dims_rope=(2, 2, 4),
         approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1),
    _case("Flux2Transformer2DModel", lambda: _flux(guidance=torch.rand(BATCH)) | {"img_ids": _ids(16, 4),
         "txt_ids": _ids(6, 4)}, **(_DIT | {"num_layers": 2}), in_channels=16, num_single_layers=2,
         joint_attention_dim=32, timestep_guidance_channels=16, axes_dims_rope=(2, 2, 2, 2)),
    _case("SD3Transformer2DModel", lambda: {"hidden_states": _noise(4, 8, 8),
         "encoder_hidden_states": _noise(6, 32), "pooled_projections": _noise(32), "timestep": _times()},
         **_DIT, sample_size=8, in_channels=4, out_channels=4, joint_attention_dim=32,
         caption_projection_dim=32, pooled_projection_dim=32, pos_embed_max_size=8, qk_norm="rms_norm",
         dual_attention_layers=(0,)),
    _case("AuraFlowTransformer2DModel", lambda: {"hidden_states": _noise(4, 8, 8),
         "encoder_hidden_states": _noise(6, 32), "timestep": torch.rand(BATCH)}, sample_size=8,
         num_mmdit_layers=1, num_single_dit_layers=2, attention_head_dim=8, num_attention_heads=4,
         joint_attention_dim=32, caption_projection_dim=32, pos_embed_max_size=16),
    _case("SanaTransformer2DModel", lambda: {"hidden_states": _noise(4, 8, 8),
         "encoder_hidden_states": _noise(6, 32), "timestep": _times()}, **_DIT, in_channels=4,
         out_channels=4, num_cross_attention_heads=4, cross_attention_head_dim=8, cross_attention_dim=32,
         caption_channels=32, sample_size=8),
    _case("WanTransformer3DModel", lambda: {"hidden_states": _noise(4, 2, 8, 8), "timestep": _times(),
         "encoder_hidden_states": _noise(6, 32)}, num_attention_heads=2, attention_head_dim=12,
         num_layers=2, in_channels=4, out_channels=4, text_dim=32, freq_dim=32, ffn_dim=32,
         rope_max_seq_len=32),
    _case("LTXVideoTransformer3DModel", lambda: {"hidden_states": _noise(8, 4),
         "encoder_hidden_states": _noise(6, 32), "timestep": _times(),
         "encoder_attention_mask": torch.ones(BATCH, 6), "num_frames": 2, "height": 2, "width": 2}, **_DIT,
         in_channels=4, out_channels=4, cross_attention_dim=32, caption_channels=32),
    _case("CogView3PlusTransformer2DModel", lambda: {"hidden_states": _noise(4, 8, 8),
         "encoder_hidden_states": _noise(6, 32), "timestep": _times(), **_sizes()}, **_DIT, in_channels=4,
         out_channels=4, text_embed_dim=32, time_embed_dim=32, condition_dim=8, pos_embed_max_size=16,
         sample_size=8),
    _case("CogView4Transformer2DModel", lambda: {"hidden_states": _noise(4, 8, 8),
         "encoder_hidden_states": _noise(6, 32), "timestep": _times(), **_sizes()}, **_DIT, in_channels=4,
         out_channels=4, text_embed_dim=32, time_embed_dim=32, condition_dim=8, pos_embed_max_size=16,
         sample_size=8, rope_axes_dim=(8, 8)),
    _case("CogVideoXTransformer3DModel", lambda: {"hidden_states": _noise(2, 4, 8, 8),
         "encoder_hidden_states": _noise(6, 32), "timestep": _times()}, **_DIT, in_channels=4,
         out_channels=4, time_embed_dim=8, text_embed_dim=32, sample_width=8, sample_height=8,
         sample_frames=5, max_text_seq_length=6),
    _case("Lumina2Transformer2DModel", lambda: {"hidden_states": _noise(4, 8, 8),
         "timestep": torch.rand(BATCH), "encoder_hidden_states": _noise(6, 32),
         "encoder_attention_mask": torch.ones(BATCH, 6, dtype=torch.bool)}, sample_size=8, in_channels=4,
         hidden_size=24, num_layers=2, num_refiner_layers=1, num_attention_heads=3, num_kv_heads=1,
         multiple_of=2, axes_dim_rope=(4, 2, 2), axes_lens=(32, 32, 32), cap_feat_dim=32),
    _case("MochiTransformer3DModel", lambda: {"hidden_states": _noise(4, 2, 8, 8),
         "encoder_hidden_states": _noise(6, 32), "timestep": _times(),
         "encoder_attention_mask": torch.ones(BATCH, 6, dtype=torch.bool)}, **_DIT, in_channels=4,
         out_channels=4, pooled_projection_dim=16, text_embed_dim=32, time_embed_dim=16),
    _case("HunyuanVideoTransformer3DModel", lambda: {"hidden_states": _noise(4, 2, 8, 8),
         "timestep": _times(), "encoder_hidden_states": _noise(6, 32),
         "encoder_attention_mask": torch.ones(BATCH, 6), "pooled_projections": _noise(32),
         "guidance": torch.rand(BATCH)}, **(_DIT | {"num_layers": 1}), num_single_layers=1,
         num_refiner_layers=1, in_channels=4, out_channels=4, text_embed_dim=32, pooled_projection_dim=32,
         rope_axes_dim=(2, 2, 4)),
    _case("PriorTransformer", lambda: {"hidden_states": _noise(32), "timestep": _times(),
         "proj_embedding": _noise(32), "encoder_hidden_states": _noise(6, 32)}, **_DIT, embedding_dim=32,
         num_embeddings=6),
    _case("StableAudioDiTModel", lambda: {"hidden_states": _noise(4, 8), "timestep": torch.rand(BATCH),
         "encoder_hidden_states": _noise(6, 32), "global_hidden_states": _noise(1, 32),
         "rotary_embedding": (torch.ones(9, 4), torch.zeros(9, 4))}, sample_size=8, in_channels=4,
         num_layers=2, attention_head_dim=8, num_attention_heads=4, num_key_value_attention_heads=2,
         out_channels=4, cross_attention_dim=32, time_proj_dim=16, global_states_input_dim=32,
         cross_attention_input_dim=32),
    _case("QwenImageTransformer2DModel", lambda: {"hidden_states": _noise(16, 16),
         "encoder_hidden_states": _noise(6, 32), "encoder_hidden_states_mask": torch.ones(BATCH, 6,
         dtype=torch.bool), "timestep": torch.rand(BATCH), "img_shapes": [(1, 4, 4)] * 2}, **_DIT,
         in_channels=16, out_channels=4, joint_attention_dim=32, axes_dims_rope=(2, 2, 4)),
    _case("LatteTransformer3DModel", lambda: {"hidden_states": _noise(4, 2, 8, 8), "timestep": _times(),
         "encoder_hidden_states": _noise(6, 32)}, **_DIT, in_channels=4, out_channels=8,
         cross_attention_dim=32, sample_size=8, patch_size=2, norm_type="ada_norm_single",
         caption_channels=32, video_length=2, attention_bias=True, num_embeds_ada_norm=1000),
    _case("AutoencoderKL", lambda: {"sample": _noise(3, 16, 16)}, **_TWO,
         down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
    _case("AutoencoderKL", lambda: {"sample": _noise(3, 16, 16), "sample_posterior": True},
         "posterior sampled", **_TWO, down_block_types=("DownEncoderBlock2D",) * 2,
         up_block_types=("UpDecoderBlock2D",) * 2),
    _case("AutoencoderTiny", lambda: {"sample": _noise(3, 16, 16)}, encoder_block_out_channels=(16, 16),
         decoder_block_out_channels=(16, 16), num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)),
    _case("AutoencoderDC", lambda: {"sample": _noise(3, 32, 32)}, latent_channels=8, attention_head_dim=8,
         encoder_block_types=("ResBlock", "EfficientViTBlock"), decoder_block_types=("ResBlock",
         "EfficientViTBlock"), encoder_block_out_channels=(16, 32), decoder_block_out_channels=(16, 32),
         encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), (5,
         )), decoder_qkv_multiscales=((), (5,))),
    _case("AutoencoderOobleck", lambda: {"sample": _noise(2, 64)}, encoder_hidden_size=8,
         downsampling_ratios=[2, 4], channel_multiples=[1, 2], decoder_channels=8,
         decoder_input_channels=4),
    _case("AutoencoderKLWan", lambda: {"sample": _noise(3, 5, 16, 16)}, base_dim=8, z_dim=4, dim_mult=[1,
         2], num_res_blocks=1, temperal_downsample=[True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
    _case("VQModel", lambda: {"sample": _noise(3, 16, 16)}, **_TWO, down_block_types=("DownEncoderBlock2D",
         ) * 2, up_block_types=("UpDecoderBlock2D",) * 2, num_vq_embeddings=16),
]  # fmt: skip
