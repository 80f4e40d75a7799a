"""Vision-language models of transformers: images behind a language model, and pairs of towers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.model_cases.case import BATCH, Inputs, ModelCase, mean_square, text
from benchmarks.model_cases.hugging_face import case, texts_and_images

__all__ = ["VISION_LANGUAGE"]

FAMILY = "vision-language"


class PerSample(nn.Module):
    """A model that takes the patches of all images in one row: here each sample brings its own.

    ``pixel_values [B, patches, width], image_grid_thw [B, 3]  -->  [B * patches, width], [B, 3]``
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, pixel_values: Tensor, image_grid_thw: Tensor, **more: Any) -> Any:
        return self.model(
            input_ids=input_ids,
            pixel_values=pixel_values.flatten(0, 1),
            image_grid_thw=image_grid_thw,
            **more,
        )


def _patches(width: int, grid: tuple[int, int, int] = (1, 4, 4), merge: int = 2, types: bool = True) -> Any:
    """Texts with an image of ``grid`` patches each, merged ``merge`` x ``merge`` to one token."""

    def batch(model: Any) -> Inputs:
        count = grid[0] * grid[1] * grid[2]
        tokens = count // merge**2
        ids = text()
        ids = torch.cat([ids[:, :3], ids.new_full((BATCH, tokens), 64), ids[:, 3:]], 1)
        more = {"mm_token_type_ids": (ids == 64).long()} if types else {}
        return Inputs(
            kwargs={
                "input_ids": ids,
                "pixel_values": torch.randn(BATCH, count, width),
                "image_grid_thw": torch.tensor([grid] * BATCH),
                "labels": ids.masked_fill(ids == 64, -100),
                **more,
            },
            constant=("image_grid_thw", *more),
        )

    return batch


def _pair(model: Any) -> Inputs:
    return Inputs(kwargs={"input_ids": text(), "pixel_values": torch.randn(BATCH, 3, 32, 32)})


def _tower(model: Any) -> Inputs:
    return Inputs(
        kwargs={"input_ids": text(), "pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": True}
    )


def _prefixed(model: Any) -> Inputs:
    """Images and the first words are read both ways, the rest is predicted."""
    given = texts_and_images()(model)
    ids = given.kwargs["input_ids"]
    suffix = (torch.arange(ids.shape[1]) >= ids.shape[1] - 6).long().expand_as(ids).contiguous()
    return Inputs(kwargs={**given.kwargs, "token_type_ids": suffix})


def _start_tokens(model: Any) -> None:
    model.config.pad_token_id, model.config.decoder_start_token_id = 0, 1


def _sized(model: Any) -> Inputs:
    given = texts_and_images(count=4)(model)
    return Inputs(kwargs={**given.kwargs, "image_sizes": torch.tensor([[32, 32]] * BATCH)})


_QWEN_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4,
                "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_SIGLIP = {"image_size": 32, "patch_size": 8}
_LLAVA = {"vision_config": _SIGLIP}

VISION_LANGUAGE: list[ModelCase] = [
    case("Qwen2VLForConditionalGeneration", FAMILY,
         {"vision_config": {**_QWEN_VISION, "mlp_ratio": 2}, "text_config": _ROPE}, batch=_patches(96),
         wrap=PerSample),
    case("Qwen2_5_VLForConditionalGeneration", FAMILY,
         {"vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [1], "window_size": 8},
         "text_config": _ROPE},
         batch=_patches(96), wrap=PerSample),
    case("Qwen3VLForConditionalGeneration", FAMILY,
         {"vision_config": {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0,
         1]},
         "text_config": _ROPE}, batch=_patches(96), wrap=PerSample),
    case("Qwen3VLMoeForConditionalGeneration", FAMILY,
         {"vision_config": {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
         "text_config": _ROPE}, batch=_patches(96), wrap=PerSample),
    case("Qwen3_5ForConditionalGeneration", FAMILY,
         {"vision_config": {**_QWEN_VISION, "num_position_embeddings": 16},
         "text_config": _ROPE}, batch=_patches(96), wrap=PerSample),
    case("Glm4vForConditionalGeneration", FAMILY,
         {"vision_config": {**_QWEN_VISION, "image_size": 16, "out_hidden_size": 32}, "text_config": _ROPE},
         batch=_patches(96), wrap=PerSample),
    case("Gemma3ForConditionalGeneration", FAMILY,
         {"vision_config": _SIGLIP, "mm_tokens_per_image": 4}, batch=texts_and_images(types=True)),
    case("PaliGemmaForConditionalGeneration", FAMILY, _LLAVA, batch=_prefixed),
    case("SmolVLMForConditionalGeneration", FAMILY, {"vision_config": _SIGLIP, "scale_factor": 2},
         batch=texts_and_images((1, 3, 32, 32))),
    case("Idefics3ForConditionalGeneration", FAMILY, {"vision_config": _SIGLIP, "scale_factor": 2},
         batch=texts_and_images((1, 3, 32, 32))),
    case("Idefics2ForConditionalGeneration", FAMILY, {"vision_config": _SIGLIP},
         batch=texts_and_images((1, 3, 32, 32), count=64)),
    case("LlavaForConditionalGeneration", FAMILY, _LLAVA, batch=texts_and_images()),
    case("VipLlavaForConditionalGeneration", FAMILY, {**_LLAVA, "vision_feature_layers": [-2, -1]},
         batch=texts_and_images()),
    case("AyaVisionForConditionalGeneration", FAMILY, {**_LLAVA, "downsample_factor": 2},
         batch=texts_and_images()),
    case("Cohere2VisionForConditionalGeneration", FAMILY, {**_LLAVA, "downsample_factor": 2},
         batch=texts_and_images()),
    case("Mistral3ForConditionalGeneration", FAMILY, {"vision_config": _SIGLIP, "spatial_merge_size": 2},
         batch=_sized),
    case("InternVLForConditionalGeneration", FAMILY, {"vision_config": {"image_size": [32, 32],
         "patch_size": [8, 8]}},
         batch=texts_and_images()),
    case("GotOcr2ForConditionalGeneration", FAMILY, batch=texts_and_images()),
    case("MllamaForCausalLM", FAMILY),
    case("Blip2ForConditionalGeneration", FAMILY, batch=texts_and_images(count=8)),
    case("BlipForConditionalGeneration", FAMILY, batch=texts_and_images(count=0)),
    case("GitForCausalLM", FAMILY, batch=texts_and_images(count=0)),
    case("Ovis2ForConditionalGeneration", FAMILY, batch=texts_and_images()),
    case("CLIPModel", FAMILY, batch=_tower),
    case("SiglipModel", FAMILY, batch=_tower),
    case("ChineseCLIPModel", FAMILY, batch=_tower),
    case("AltCLIPModel", FAMILY, batch=_tower),
    case("FlavaModel", FAMILY, batch=_pair, loss=mean_square),
    case("ViltModel", FAMILY, batch=_pair, loss=mean_square),
    case("BridgeTowerModel", FAMILY, {"vision_config": {"hidden_size": 64},
         "text_config": {"hidden_size": 64}, "hidden_size": 64}, batch=_pair, loss=mean_square),
    case("OwlViTModel", FAMILY, batch=_tower),
    case("VisionEncoderDecoderModel", FAMILY, {"encoder": {"model_type": "vit"},
         "decoder": {"model_type": "gpt2", "add_cross_attention": True}},
         prepare=_start_tokens,
         batch=lambda m: Inputs(kwargs={"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": text()})),
    case("Pix2StructForConditionalGeneration", FAMILY, {"vision_config": {"patch_embed_hidden_size": 48}},
         batch=lambda m: Inputs(kwargs={"flattened_patches": torch.cat([torch.randint(1, 4, (BATCH, 6,
         2)).float(), torch.randn(BATCH, 6, 48)], 2), "labels": text()})),
    case("LxmertModel", FAMILY, {"visual_feat_dim": 32, "l_layers": 2, "x_layers": 1, "r_layers": 1},
         batch=lambda m: Inputs(kwargs={"input_ids": text(), "visual_feats": torch.randn(BATCH, 4, 32),
         "visual_pos": torch.rand(BATCH, 4, 4)}), loss=mean_square),
]  # fmt: skip
