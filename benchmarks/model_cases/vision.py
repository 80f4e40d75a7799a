"""Vision models of transformers: classification, self-supervision, segmentation, detection, depth, video."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.model_cases.case import BATCH, Inputs, ModelCase, mean_square
from benchmarks.model_cases.hugging_face import Settings, case, cases, images, images_and_labels

__all__ = ["VISION"]

CLASSIFIERS = """
BeitForImageClassification BitForImageClassification ConvNextForImageClassification
ConvNextV2ForImageClassification CvtForImageClassification Data2VecVisionForImageClassification
DeiTForImageClassification Dinov2ForImageClassification Dinov2WithRegistersForImageClassification
DonutSwinForImageClassification EfficientNetForImageClassification FocalNetForImageClassification
HGNetV2ForImageClassification HieraForImageClassification IJepaForImageClassification
MobileNetV1ForImageClassification MobileNetV2ForImageClassification
MobileViTForImageClassification PoolFormerForImageClassification
PvtForImageClassification PvtV2ForImageClassification RegNetForImageClassification
ResNetForImageClassification SegformerForImageClassification SiglipForImageClassification
SwiftFormerForImageClassification SwinForImageClassification Swinv2ForImageClassification
TextNetForImageClassification ViTForImageClassification ViTMSNForImageClassification
CLIPForImageClassification
"""
OTHERS = """
DINOv3ViTModel DINOv3ConvNextModel Aimv2VisionModel ViTMAEForPreTraining
DPTForDepthEstimation GLPNForDepthEstimation DepthAnythingForDepthEstimation
SegformerForSemanticSegmentation BeitForSemanticSegmentation
DetrForObjectDetection DeformableDetrForObjectDetection
YolosForObjectDetection
Swin2SRForImageSuperResolution
SuperPointForKeypointDetection
"""
_STAGED: dict[str, Any] = {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 16, 32, 32]}
SETTINGS: dict[str, Settings] = {
    "BitForImageClassification": {**_STAGED, "embedding_size": 16, "num_groups": 4},
    "ConvNextForImageClassification": _STAGED,
    "ConvNextV2ForImageClassification": _STAGED,
    "ResNetForImageClassification": {**_STAGED, "embedding_size": 8},
    "RegNetForImageClassification": {**_STAGED, "embedding_size": 8, "groups_width": 8},
    "SwinForImageClassification": {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4],
         "window_size": 4},
    "Swinv2ForImageClassification": {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4],
         "window_size": 4},
    "DonutSwinForImageClassification": {
        "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4,
    },
    "FocalNetForImageClassification": {"embed_dim": 16, "depths": [1, 1, 2, 1], "hidden_sizes": [16, 32, 32,
         64]},
    "EfficientNetForImageClassification": {
        "hidden_dim": 1280, "width_coefficient": 1.0, "depth_coefficient": 0.1, "num_block_repeats": [1, 1,
             1, 1, 1, 1, 1],
    },
    "HieraForImageClassification": {
        "image_size": [32, 32], "embed_dim": 16, "num_heads": [1, 1, 2], "depths": [1, 1, 1],
             "num_query_pool": 2,
        "masked_unit_size": [4, 4], "masked_unit_attention": [True, True, False],
    },
    "MobileViTForImageClassification": {"patch_size": 2},
    "PoolFormerForImageClassification": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32]},
    "PvtForImageClassification": {"depths": [1, 1, 1, 1]},
    "PvtV2ForImageClassification": {"depths": [1, 1, 1, 1]},
    "SegformerForImageClassification": {"depths": [1, 1, 1, 1]},
    "SegformerForSemanticSegmentation": {"depths": [1, 1, 1, 1]},
    "DPTForDepthEstimation": {
        "neck_hidden_sizes": [16, 16, 32, 32], "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
        "backbone_config": None,
    },
    "DepthAnythingForDepthEstimation": {
        "backbone_config": {"out_indices": [1, 2, 3], "reshape_hidden_states": False}, "patch_size": 4,
        "reassemble_factors": [2, 1, 0.5], "neck_hidden_sizes": [16, 16, 32], "reassemble_hidden_size": 32,
    },
    "Swin2SRForImageSuperResolution": {
        "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 1,
             "image_size": 16,
    },
    "BeitForSemanticSegmentation": {
        "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "auxiliary_channels": 16, "patch_size": 8,
        "reshape_hidden_states": False,
    },
}  # fmt: skip


def _clips(model: Any) -> Inputs:
    return Inputs(kwargs={"pixel_values": torch.randn(BATCH, 2, 3, 32, 32)})


def _masked(model: Any) -> Inputs:
    hidden = torch.rand(BATCH, 64) < 0.5
    return Inputs(kwargs={"pixel_values": torch.randn(BATCH, 3, 32, 32), "bool_masked_pos": hidden})


VISION: list[ModelCase] = [
    *cases("vision", CLASSIFIERS, SETTINGS, batch=images_and_labels()),
    *cases("vision", OTHERS, SETTINGS, batch=images(), loss=mean_square),
    case("ViTForMaskedImageModeling", "vision", batch=_masked),
    case("BeitForMaskedImageModeling", "vision", {"use_mask_token": True}, batch=_masked, loss=mean_square),
    case("ViTForImageClassification", "vision", variant="checkpointed", batch=images_and_labels(),
         prepare=lambda model: model.gradient_checkpointing_enable()),
    case("ImageGPTForCausalImageModeling", "vision"),
    case("VideoMAEForVideoClassification", "vision", batch=_clips, loss=mean_square),
    case("TimesformerForVideoClassification", "vision", batch=_clips, loss=mean_square),
    case("VivitForVideoClassification", "vision", {"tubelet_size": [2, 8, 8]}, batch=_clips,
         loss=mean_square),
    case("VJEPA2Model", "vision", batch=lambda m: Inputs(kwargs={"pixel_values_videos": torch.randn(BATCH,
         2, 3, 32, 32)}), loss=mean_square),
]  # fmt: skip
