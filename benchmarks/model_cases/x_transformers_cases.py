"""Code paths of x-transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.model_cases.case import BATCH, VOCABULARY, Inputs, ModelCase, mean_square, text

__all__ = ["X_TRANSFORMERS"]


def _next_token(output: Any, target: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output[0]
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _texts(model: Any) -> Inputs:
    ids = text()
    return Inputs((ids,), target=ids.clone())


def _decoder(name: str, **settings: Any) -> ModelCase:
    def build() -> nn.Module:
        from x_transformers import Decoder, TransformerWrapper

        outer = {k: settings[k] for k in settings if k in _OUTER}
        inner = {k: settings[k] for k in settings if k not in _OUTER}
        layers = Decoder(**({"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8} | inner))
        return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=layers, **outer)

    return ModelCase(f"x-transformers {name}", "x-transformers", build, _texts, _next_token, "x_transformers")


_OUTER = ("use_abs_pos_emb", "num_memory_tokens", "emb_dropout", "scaled_sinu_pos_emb", "tie_embedding")


def _other(name: str, make: Callable[[], nn.Module], batch: Callable[[Any], Inputs], loss: Any) -> ModelCase:
    return ModelCase(f"x-transformers {name}", "x-transformers", make, batch, loss, "x_transformers")


def _encoder() -> nn.Module:
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=4, attn_dim_head=8)
    return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=layers)


def _both() -> nn.Module:
    from x_transformers import XTransformer

    return XTransformer(
        dim=32, enc_num_tokens=VOCABULARY, enc_depth=2, enc_heads=4, enc_max_seq_len=32, enc_attn_dim_head=8,
        dec_num_tokens=VOCABULARY, dec_depth=2, dec_heads=4, dec_max_seq_len=32, dec_attn_dim_head=8,
    )  # fmt: skip


def _autoregressive() -> nn.Module:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8)
    return AutoregressiveWrapper(
        TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=layers)
    )


def _continuous() -> nn.Module:
    from x_transformers import ContinuousTransformerWrapper, Decoder

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8)
    return ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=32, attn_layers=layers)


def _images() -> nn.Module:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=4, attn_dim_head=8)
    return ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=layers)


X_TRANSFORMERS: list[ModelCase] = [
    _decoder("decoder"),
    _decoder("rotary", rotary_pos_emb=True),
    _decoder("alibi", alibi_pos_bias=True, alibi_num_heads=2),
    _decoder("T5 bias", rel_pos_bias=True),
    _decoder("flash", attn_flash=True),
    _decoder("rmsnorm, swiglu", use_rmsnorm=True, ff_swish=True, ff_glu=True),
    _decoder("one key head", attn_one_kv_head=True),
    _decoder("grouped keys", attn_kv_heads=2),
    _decoder("memory key values", attn_num_mem_kv=4),
    _decoder("talking heads", attn_pre_talking_heads=True, attn_post_talking_heads=True),
    _decoder("query and key norm", attn_qk_norm=True),
    _decoder("sparse top-k", attn_sparse_topk=4),
    _decoder("residual attention", residual_attn=True),
    _decoder("shifted tokens", shift_tokens=1),
    _decoder("dropouts", layer_dropout=0.0, attn_dropout=0.1, ff_dropout=0.1, emb_dropout=0.1),
    _decoder("layer dropout", layer_dropout=0.1),
    _decoder("hyper connections", num_residual_streams=2),
    _other("encoder", _encoder, _texts, _next_token),
    _other("encoder-decoder", _both, lambda m: Inputs((text(), text())), None),
    _other("autoregressive wrapper", _autoregressive, lambda m: Inputs((text(),)), None),
    _other("continuous", _continuous, lambda m: Inputs((torch.randn(BATCH, 12, 8),)), mean_square),
    _other("vision", _images, lambda m: Inputs((torch.randn(BATCH, 3, 32, 32),)), mean_square),
]  # fmt: skip
