"""Image models of timm: one architecture each, small by its own arguments or by the smallest size it has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.model_cases.case import BATCH, Inputs, ModelCase

__all__ = ["TIMM"]

_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": _VIT,
    "deit3_small_patch16_224": _VIT,
    "beit_base_patch16_224": _VIT,
    "eva02_tiny_patch14_224": _VIT,
    "cait_xxs24_224": {**_VIT, "depth": 2, "drop_path_rate": 0.1},
    "xcit_nano_12_p16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (1, 2),
        "num_heads": (2, 4),
    },
    "convnext_atto": {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)},
    "resnet50": {"layers": [1, 1, 1, 1]},
    "resnetv2_50": {"layers": [1, 1, 1, 1]},
    "resnest14d": {},
    "res2net50_26w_4s": {"layers": [1, 1, 1, 1]},
    "densenet121": {"growth_rate": 8, "block_config": (2, 2, 2)},
    "densenet121, checkpointed": {"growth_rate": 8, "block_config": (2, 2, 2), "memory_efficient": True},
    "efficientnet_b0": {},
    "mobilenetv3_small_050": {},
    "ghostnet_050": {},
    "regnety_002": {},
    "rexnet_100": {"width_mult": 0.25},
    "hrnet_w18_small": {},
    "inception_next_atto": {},
    "edgenext_xx_small": {},
    "efficientformer_l1": {},
    "fastvit_t8": {},
    "mobilevit_xxs": {},
    "repvit_m0_9": {},
}  # fmt: skip


def _build(name: str, settings: dict[str, Any]) -> Any:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name.partition(",")[0], pretrained=False, num_classes=5, **settings)

    return build


def _batch(model: Any) -> Inputs:
    fixed = model.default_cfg.get("fixed_input_size", False) or hasattr(model, "patch_embed")
    own = (
        getattr(getattr(model, "patch_embed", None), "img_size", None) or model.default_cfg["input_size"][1:]
    )
    size = own if fixed else (64, 64)
    return Inputs((torch.randn(BATCH, 3, *size),), target=torch.randint(0, 5, (BATCH,)))


def _classes(output: Any, target: Tensor) -> Tensor:
    outputs = output if isinstance(output, tuple | list) else (output,)
    return sum((F.cross_entropy(value, target) for value in outputs), torch.zeros(()))


TIMM: list[ModelCase] = [
    ModelCase(f"timm {name}", "timm", _build(name, settings), _batch, _classes, "timm")
    for name, settings in MODELS.items()
]
