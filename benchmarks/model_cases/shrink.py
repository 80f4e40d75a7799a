"""Small configurations of transformers' models: every known field of a config class gets a small value.

``LlamaConfig, {}  -->  LlamaConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, ...)``

Sub-configs are made small in the same way. A field that is not in the table keeps its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.model_cases.case import VOCABULARY

__all__ = ["small_config"]

_VALUES: dict[int, str] = {
    0: "pad_token_id pad_index decoder_start_token_id "
    "first_k_dense_replace num_mtp_layers num_nextn_predict_layers "
    "blank_token_id",
    1: "bos_token_id num_key_value_heads_min n_shared_experts num_shared_experts moe_num_shared_experts "
    "temporal_patch_size topk_group decoder_sparse_step encoder_sparse_step mamba_n_groups n_groups "
    "num_nextn_predict_layers merger_times spatial_merge_size",
    2: "eos_token_id sep_token_id num_key_value_heads num_kv_heads n_kv_heads multi_query_group_num "
    "num_hidden_layers n_layer n_layers num_layers depth "
    "num_experts_per_tok moe_topk moe_top_k top_k num_experts_per_token n_group "
    "encoder_layers decoder_layers "
    "num_encoder_layers num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers "
    "mamba_expand expand linear_num_key_heads v_num_hidden_layers resampler_depth "
    "num_adapter_layers num_conv_layers num_block decoder_num_attention_heads "
    "num_frames swa_num_key_value_heads",
    3: "mask_token_id",
    4: "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
    "decoder_attention_heads encoder_num_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts linear_num_value_heads patch_size sliding_window qk_rope_head_dim "
    "qk_nope_head_dim mamba_d_conv index_n_heads index_topk "
    "encoder_stride chunk_size mamba_chunk_size decoder_heads "
    "encoder_heads swa_num_attention_heads",
    8: "head_dim v_head_dim d_kv q_lora_rank kv_lora_rank mamba_d_state state_size "
    "ssm_state_size linear_key_head_dim linear_value_head_dim num_mel_bins index_head_dim kv_channels "
    "rotary_dim relative_attention_num_buckets num_conv_pos_embeddings "
    "relative_attention_max_distance num_queries num_query_tokens swa_head_dim "
    "global_head_dim attention_head_size hidden_size_per_layer_input",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_dim embedding_size "
    "shared_intermediate_size moe_shared_expert_intermediate_size "
    "expert_ffn_hidden_size codevector_dim proj_codevector_dim expert_capacity "
    "num_codevectors_per_group",
    32: "hidden_size d_model n_embd dim embed_dim hidden_dim encoder_hidden_size decoder_hidden_size "
    "projection_dim out_hidden_size image_size emb_dim vision_hidden_size text_hidden_size "
    "classifier_proj_size d_embed word_embed_proj_dim encoder_hidden_dim "
    "text_embed_dim lru_width attention_hidden_size decoder_embed_dim output_hidden_size "
    "projector_hidden_size fusion_hidden_size "
    "mask_feature_size",
    64: "intermediate_size n_inner ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim hidden_mlp_dim "
    "encoder_intermediate_size decoder_intermediate_size mlp_hidden_dim mlp_dim max_position_embeddings "
    "n_positions max_source_positions max_target_positions max_sequence_length n_ctx ffn_hidden_size "
    "intermediate_dim mamba_d_ssm max_seq_len context_length block_ff_dim "
    "dim_feedforward encoder_ffn_hidden_size max_2d_position_embeddings max_seq_length max_2d_positions "
    "original_max_position_embeddings intermediate_size_mlp "
    "dense_intermediate_size",
    VOCABULARY: "vocab_size text_vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size "
    "encoder_vocab_size vocab_size_per_layer_input t2u_vocab_size",
}
_FRACTIONS = "encoder_layerdrop decoder_layerdrop layerdrop mask_time_prob mask_feature_prob"
_SMALL: dict[str, Any] = {
    name: value for value, names in _VALUES.items() for name in names.split()
} | dict.fromkeys(_FRACTIONS.split(), 0.0)
_STEMS = (
    "image", "video", "audio", "vision_start", "vision_end", "image_start", "image_end", "video_start",
    "video_end", "boi", "eoi", "boa", "eoa", "audio_start", "audio_end", "vision", "audio_bos", "audio_eos",
    "boa_start", "image_break", "media", "fake", "image_patch", "downsampled", "speech",
)  # fmt: skip
_SPECIAL = {f"{stem}_token{end}": 64 + k for k, stem in enumerate(_STEMS) for end in ("_id", "_index")}
_KEPT_IN_STEP = ("layer_types", "mlp_layer_types")


def small_config(kind: type[Any], settings: Mapping[str, Any] | None = None) -> Any:
    """Return a small instance of a config class of transformers.

    Parameters
    ----------
    kind
        A subclass of ``PreTrainedConfig``.
    settings
        What to set otherwise. ``text_config={"hidden_size": 16}`` reaches into a sub-config; a value of
        ``...`` keeps the default of the class.
    """
    given = dict(settings or {})
    known = {field.name: field for field in dataclasses.fields(kind)}
    wanted: dict[str, Any] = {}
    for name, sub_kind in _sub_configs(kind):
        own = given.pop(name, {})
        if own is None or own is ...:
            continue
        if isinstance(own, Mapping):
            own = dict(own)
            sub_kind = _config_class(own.pop("model_type")) if "model_type" in own else sub_kind
            own = small_config(sub_kind, own)
        wanted[name] = own
    for name, field in known.items():
        value = _SMALL.get(name, _SPECIAL.get(name))
        if value is not None and not isinstance(field.default, tuple | list):
            wanted[name] = value
    wanted |= given
    wanted = {name: value for name, value in wanted.items() if value is not ...}
    config = kind(**wanted)
    missing = _missing_kinds_of_layers(kind, config, given)
    return kind(**(wanted | missing)) if missing else config


def _missing_kinds_of_layers(kind: type[Any], config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return layer types with one of each kind that the large model has, where the small one lacks some."""
    found: dict[str, Any] = {}
    known = {field.name for field in dataclasses.fields(kind)}
    for name in _KEPT_IN_STEP:
        mine = getattr(config, name, None)
        if not mine or name in given or name not in known:
            continue
        kinds = list(dict.fromkeys(getattr(kind(), name) or ()))
        if len(kinds) > len(set(mine)):
            found[name] = (kinds * len(mine))[: max(len(mine), len(kinds))]
            found["num_hidden_layers"] = len(found[name])
    return found


def _sub_configs(kind: type[Any]) -> Iterator[tuple[str, type[Any]]]:
    for name, spec in getattr(kind, "sub_configs_defaults", {}).items():
        if isinstance(spec, type):
            yield name, spec
        elif spec.model_type and not hasattr(spec.config_class, "model_type"):
            yield name, _config_class(spec.model_type)
        elif getattr(spec.config_class, "model_type", ""):
            yield name, spec.config_class
        elif spec.model_type:
            yield name, _config_class(spec.model_type)


def _config_class(model_type: str) -> type[Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]
