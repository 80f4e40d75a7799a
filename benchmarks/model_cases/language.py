"""Language models of transformers: decoders, mixtures of experts, hybrids, encoders, encoder-decoders."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.model_cases.case import BATCH, Inputs, ModelCase, mean_square, text
from benchmarks.model_cases.hugging_face import Settings, case, cases

__all__ = ["LANGUAGE"]

DECODERS = """
BartForCausalLM BertLMHeadModel BigBirdForCausalLM
BigBirdPegasusForCausalLM BioGptForCausalLM BitNetForCausalLM BloomForCausalLM
CodeGenForCausalLM CohereForCausalLM CpmAntForCausalLM
DiffLlamaForCausalLM DogeForCausalLM
FalconForCausalLM GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3nForCausalLM
Gemma4ForCausalLM GPT2LMHeadModel GPTNeoForCausalLM
GPTNeoXForCausalLM GPTJForCausalLM
LlamaForCausalLM
MistralForCausalLM MiniCPM3ForCausalLM ModernBertDecoderForCausalLM
MptForCausalLM NanoChatForCausalLM NemotronForCausalLM Olmo2ForCausalLM
Olmo3ForCausalLM OpenAIGPTLMHeadModel OPTForCausalLM PersimmonForCausalLM PhiForCausalLM Phi3ForCausalLM
ProphetNetForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM RoFormerForCausalLM
Starcoder2ForCausalLM
XGLMForCausalLM XLNetLMHeadModel
"""
EXPERTS = """
AriaTextForCausalLM Cohere2MoeForCausalLM DeepseekV2ForCausalLM
DeepseekV3ForCausalLM DeepseekV32ForCausalLM DeepseekV4ForCausalLM Ernie4_5_MoeForCausalLM
FlexOlmoForCausalLM GlmMoeDsaForCausalLM
GptOssForCausalLM GraniteMoeSharedForCausalLM
JetMoeForCausalLM Llama4ForCausalLM LongcatFlashForCausalLM MiMoV2FlashForCausalLM
MiniMaxM2ForCausalLM MixtralForCausalLM OlmoeForCausalLM PhimoeForCausalLM Qwen2MoeForCausalLM
Qwen3MoeForCausalLM
"""
HYBRIDS = """
BambaForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GraniteMoeHybridForCausalLM JambaForCausalLM
KimiLinearForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM MambaForCausalLM Mamba2ForCausalLM MiniMaxForCausalLM
NemotronHForCausalLM OlmoHybridForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM RecurrentGemmaForCausalLM
RwkvForCausalLM ZambaForCausalLM Zamba2ForCausalLM ZayaForCausalLM
"""
ENCODERS = """
AlbertForMaskedLM BertForMaskedLM BigBirdForMaskedLM ConvBertForMaskedLM
DebertaForMaskedLM DebertaV2ForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM
EuroBertForMaskedLM FNetForMaskedLM FunnelForMaskedLM
IBertForMaskedLM LongformerForMaskedLM
MobileBertForMaskedLM ModernBertForMaskedLM MPNetForMaskedLM MraForMaskedLM
NystromformerForMaskedLM RemBertForMaskedLM RobertaForMaskedLM
RoFormerForMaskedLM SqueezeBertForMaskedLM XLMWithLMHeadModel
XmodForMaskedLM YosoForMaskedLM LayoutLMForMaskedLM
ReformerForMaskedLM
"""
BOTH = """
BartForConditionalGeneration BigBirdPegasusForConditionalGeneration
FSMTForConditionalGeneration LEDForConditionalGeneration
LongT5ForConditionalGeneration M2M100ForConditionalGeneration MarianMTModel MBartForConditionalGeneration
NllbMoeForConditionalGeneration
PegasusForConditionalGeneration PegasusXForConditionalGeneration
ProphetNetForConditionalGeneration SwitchTransformersForConditionalGeneration T5ForConditionalGeneration
T5GemmaForConditionalGeneration UMT5ForConditionalGeneration
"""

_START = {"decoder_start_token_id": 0}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
SETTINGS: dict[str, Settings] = {
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "BigBirdForCausalLM": {"attention_type": "original_full"},
    "BigBirdForMaskedLM": {"attention_type": "original_full"},
    "GPTNeoForCausalLM": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "Ernie4_5_MoeForCausalLM": {"moe_k": 2},
    "LongcatFlashForCausalLM": {"num_layers": 2, "zero_expert_num": 2, "head_dim": 4, "qk_head_dim": ...},
    "DeepseekV32ForCausalLM": {"num_key_value_heads": 4},
    "GlmMoeDsaForCausalLM": {"num_key_value_heads": 4},
    "BambaForCausalLM": {**_MAMBA, "attn_layer_indices": [1]},
    "FalconH1ForCausalLM": {**_MAMBA, "mamba_d_ssm": 64},
    "GraniteMoeHybridForCausalLM": {
        **_MAMBA,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "Lfm2MoeForCausalLM": {
        "num_dense_layers": 1,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8},
    "ZambaForCausalLM": {
        "num_hidden_layers": 4,
        "layers_block_type": ["hybrid", "mamba", "hybrid", "mamba"],
        "use_mamba_kernels": False,
        "attention_hidden_size": 64,
        "num_key_value_heads": 4,
    },
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "use_mamba_kernels": False,
        "num_key_value_heads": 4,
        "adapter_rank": 8,
        "n_mamba_heads": 8,
    },
    "ZayaForCausalLM": {"num_experts_per_tok": 1, "router_hidden_size": 16, "moe_intermediate_size": 32},
    "MPNetForMaskedLM": {"relative_attention_num_buckets": 32},
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
    "SqueezeBertForMaskedLM": {"embedding_size": 32},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "ReformerForMaskedLM": {
        "axial_pos_shape": [3, 4],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "lsh", "local"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "feed_forward_size": 64,
    },
    "T5ForConditionalGeneration": _START,
    "LongT5ForConditionalGeneration": _START,
    "SwitchTransformersForConditionalGeneration": {
        **_START,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
}


def _classes(model: Any) -> Inputs:
    return Inputs(kwargs={"input_ids": text(), "labels": torch.randint(0, 2, (BATCH,))})


def _padded(model: Any) -> Inputs:
    ids = text()
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    return Inputs(
        kwargs={"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    )


def _positions(model: Any) -> Inputs:
    ids = text()
    places = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    return Inputs(kwargs={"input_ids": ids, "position_ids": places, "labels": ids.clone()})


def _embeddings(model: Any) -> Inputs:
    ids = text()
    return Inputs(kwargs={"inputs_embeds": torch.randn(*ids.shape, 32), "labels": ids})


def _checkpoint(model: Any) -> None:
    model.gradient_checkpointing_enable()


def _spans(model: Any) -> Inputs:
    starts, ends = (torch.randint(0, 12, (BATCH,)) for _ in range(2))
    return Inputs(kwargs={"input_ids": text(), "start_positions": starts, "end_positions": ends})


def _token_classes(model: Any) -> Inputs:
    ids = text()
    return Inputs(kwargs={"input_ids": ids, "labels": torch.randint(0, 2, ids.shape)})


def _choices(model: Any) -> Inputs:
    ids = torch.stack([text(), text()], 1)
    return Inputs(kwargs={"input_ids": ids, "labels": torch.randint(0, 2, (BATCH,))})


_VARIANTS = [
    case("LlamaForCausalLM", "decoder", variant="padded", batch=_padded),
    case("LlamaForCausalLM", "decoder", variant="positions given", batch=_positions),
    case("LlamaForCausalLM", "decoder", variant="embeddings given", batch=_embeddings),
    case("LlamaForCausalLM", "decoder", variant="checkpointed", prepare=_checkpoint),
    case("LlamaForCausalLM", "decoder", {"attn_implementation": "eager"}, variant="eager attention"),
    case("LlamaForCausalLM", "decoder", {"tie_word_embeddings": True}, variant="tied"),
    case(
        "LlamaForCausalLM", "decoder",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
         variant="dynamic rope",
    ),
    case("LlamaForSequenceClassification", "decoder", batch=_classes),
    case("Qwen2ForTokenClassification", "decoder", batch=_token_classes),
    case("GPT2DoubleHeadsModel", "decoder", batch=lambda m: Inputs(kwargs={"input_ids": torch.stack([text(),
         text()], 1)}), loss=mean_square),
    case("GPT2LMHeadModel", "decoder", variant="checkpointed", prepare=_checkpoint),
    case("FalconForCausalLM", "decoder", {"alibi": True, "new_decoder_architecture": False,
         "multi_query": True}, variant="alibi, one key head"),
    case("Gemma2ForCausalLM", "decoder", {"attn_implementation": "eager"}, variant="eager attention"),
    case("MixtralForCausalLM", "mixture of experts", {"experts_implementation": "eager"},
         variant="eager experts"),
    case("Qwen3MoeForCausalLM", "mixture of experts", {"experts_implementation": "eager"},
         variant="eager experts"),
    case("GptOssForCausalLM", "mixture of experts", {"experts_implementation": "eager"},
         variant="eager experts"),
    case("DeepseekV3ForCausalLM", "mixture of experts", {"experts_implementation": "eager"},
         variant="eager experts"),
    case("MixtralForCausalLM", "mixture of experts", {"output_router_logits": True}, variant="router loss"),
    case("Qwen3MoeForCausalLM", "mixture of experts", {"experts_implementation": "batched_mm"},
         variant="batched experts"),
    case("BertForSequenceClassification", "encoder", batch=_classes),
    case("BertForQuestionAnswering", "encoder", batch=_spans),
    case("BertForTokenClassification", "encoder", batch=_token_classes),
    case("BertForMultipleChoice", "encoder", batch=_choices),
    case("BertForMaskedLM", "encoder", variant="padded", batch=_padded),
    case("DebertaV2ForQuestionAnswering", "encoder", batch=_spans),
    case("CanineForSequenceClassification", "encoder", batch=_classes),
    case("XLNetForSequenceClassification", "encoder", batch=_classes),
    case("T5EncoderModel", "encoder", batch=lambda m: Inputs(kwargs={"input_ids": text()}),
         loss=mean_square),
    case("T5ForConditionalGeneration", "encoder-decoder", _START, variant="checkpointed",
         prepare=_checkpoint),
    case("BartForSequenceClassification", "encoder-decoder", batch=_classes),
]  # fmt: skip

LANGUAGE: list[ModelCase] = [
    *cases("decoder", DECODERS, SETTINGS),
    *cases("mixture of experts", EXPERTS, SETTINGS),
    *cases("hybrid and state space", HYBRIDS, SETTINGS),
    *cases("encoder", ENCODERS, SETTINGS),
    *cases("encoder-decoder", BOTH, SETTINGS),
    *_VARIANTS,
]
