"""The models of data/models.md in tiny configurations, with the reason where a result is not bitwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 61


@dataclass(frozen=True)
class Case:
    """How to build a model, a microbatch and its loss.

    ``divided``: every cut divides the uses of a parameter, and a stage may have several. It adds its own
    up first, and then the stages' sums are added: another order than autograd's.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[tuple[Any, ...], dict[str, Any], Any]]
    loss: Callable[..., Tensor] | None = None
    train: bool = True
    divided: bool = False


def tokens(length: int = 8, **extra: Any) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any], Any]]:
    def batch() -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        ids = torch.randint(3, VOCABULARY, (2, length))
        return (), {"input_ids": ids, **extra}, None

    return batch


def labelled(length: int = 8) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any], Any]]:
    def batch() -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        ids = torch.randint(3, VOCABULARY, (2, length))
        return (), {"input_ids": ids, "labels": ids}, None

    return batch


def first_mean(output: Any, target: Any) -> Tensor:
    """A loss for models without one: the mean square of their first tensor."""
    value = output[0] if isinstance(output, tuple) else output.get("last_hidden_state", None)
    value = value if isinstance(value, Tensor) else next(v for v in output.values() if isinstance(v, Tensor))
    return value.float().pow(2).mean()


def causal(kind: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        settings = {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        } | config  # fmt: skip
        made = getattr(transformers, f"{kind}Config")(**settings)
        return getattr(transformers, f"{kind}ForCausalLM")(made)

    return build


def hugging(config: str, model: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=3,
            n_embd=32,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=32,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def gpt2_checkpointed() -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable()
    return model


BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip


def images(channels: int = 3, size: int = 16) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any], Any]]:
    return lambda: ((), {"pixel_values": torch.randn(2, channels, size, size)}, None)


def whisper_batch() -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    ids = torch.randint(3, VOCABULARY, (2, 6))
    return (), {"input_features": torch.randn(2, 8, 40), "labels": ids}, None


TRANSFORMERS: dict[str, Case] = {
    "gpt2": Case(gpt2, labelled()),
    "gpt2 checkpointed": Case(gpt2_checkpointed, labelled()),
    "llama": Case(causal("Llama"), labelled()),
    "mistral": Case(causal("Mistral"), labelled()),
    "qwen2": Case(causal("Qwen2"), labelled()),
    "gemma2": Case(causal("Gemma2", head_dim=8), labelled()),
    "phi": Case(causal("Phi"), labelled()),
    "phi3": Case(causal("Phi3"), labelled()),
    "bloom": Case(
        hugging("BloomConfig", "BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=32, n_layer=2,
                n_head=4),
        labelled(),
    ),
    "gpt_neox": Case(causal("GPTNeoX"), labelled()),
    "mixtral": Case(causal("Mixtral", num_local_experts=4), labelled()),
    "qwen2_moe": Case(
        causal("Qwen2Moe", num_experts=4, num_experts_per_tok=2,
               moe_intermediate_size=16, shared_expert_intermediate_size=16),
        labelled(),
    ),
    "deepseek_v3": Case(
        causal("DeepseekV3", num_key_value_heads=4, n_routed_experts=4,
               num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=16,
               first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
               qk_nope_head_dim=4, v_head_dim=8),
        labelled(),
    ),
    "mamba2": Case(
        hugging("Mamba2Config", "Mamba2ForCausalLM", vocab_size=VOCABULARY, hidden_size=32,
                num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=4,
                bos_token_id=1, eos_token_id=2, pad_token_id=0),
        labelled(),
    ),
    "bert": Case(hugging("BertConfig", "BertModel", **BERT), tokens(), first_mean),
    "bert with labels": Case(hugging("BertConfig", "BertForMaskedLM", **BERT), labelled()),
    "roberta": Case(hugging("RobertaConfig", "RobertaForMaskedLM", **BERT), labelled()),
    "distilbert": Case(
        hugging("DistilBertConfig", "DistilBertForMaskedLM", vocab_size=VOCABULARY, dim=32, hidden_dim=64,
                n_layers=2, n_heads=4, max_position_embeddings=40, pad_token_id=0),
        labelled(),
    ),
    "albert": Case(
        hugging("AlbertConfig", "AlbertForMaskedLM", embedding_size=16, **BERT), labelled(), divided=True
    ),
    "t5": Case(
        hugging("T5Config", "T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64,
                num_layers=2, num_heads=4, decoder_start_token_id=0),
        labelled(),
    ),
    "whisper": Case(
        hugging("WhisperConfig", "WhisperForConditionalGeneration", vocab_size=VOCABULARY, d_model=32,
                encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=20,
                max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                decoder_start_token_id=1),
        whisper_batch,
    ),
    "vit": Case(
        hugging("ViTConfig", "ViTForImageClassification", hidden_size=32, intermediate_size=64,
                num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4),
        images(), first_mean,
    ),
    "convnext": Case(
        hugging("ConvNextConfig", "ConvNextForImageClassification", hidden_sizes=[8, 16, 16, 32],
                depths=[1, 1, 2, 1]),
        images(size=32), first_mean,
    ),
    "resnet": Case(
        hugging("ResNetConfig", "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16],
                depths=[2, 2], layer_type="basic"),
        images(), first_mean,
    ),
    "wav2vec2": Case(
        hugging("Wav2Vec2Config", "Wav2Vec2Model", hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3),
                num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
                layerdrop=0.0, mask_time_prob=0.0, mask_feature_prob=0.0),
        lambda: ((), {"input_values": torch.randn(2, 400)}, None), first_mean,
    ),
    "dinov2": Case(
        hugging("Dinov2Config", "Dinov2ForImageClassification", hidden_size=32, num_hidden_layers=2,
                num_attention_heads=4, mlp_ratio=2, image_size=16, patch_size=4),
        images(), first_mean,
    ),
    "cohere": Case(causal("Cohere"), labelled()),
    "stablelm": Case(causal("StableLm"), labelled()),
    "granite": Case(causal("Granite"), labelled()),
    "modernbert": Case(
        hugging("ModernBertConfig", "ModernBertForMaskedLM", global_attn_every_n_layers=2, local_attention=4,
                cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2, **BERT),
        labelled(),
    ),
}  # fmt: skip


def square(output: Any, target: Any) -> Tensor:
    return F.mse_loss(output, target)


def cross(output: Any, target: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(16, 4, 2, 2, 32, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.body(source, target)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.MultiheadAttention(16, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, x, x)[0]
        return x


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 16), nn.Linear(16, 8)
        self.rnn = kind(16, 16, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(self.rnn(self.inside(x).relu())[0]).tanh()


def cnn(norm: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for inside, outside in ((3, 8), (8, 8), (8, 8)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), norm(outside), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 64, 4))

    return build


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, padding=1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 8, 2, 2), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x).relu()
        b = self.down2(a).relu()
        c = self.middle(b).relu()
        d = self.up2(torch.cat([c, b], 1)).relu()
        return self.up1(torch.cat([d, a], 1))


class TiedFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16)
        self.table.weight.requires_grad_(False)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.table(ids)))


def frozen_start() -> nn.Module:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(6)))
    for parameter in model[:2].parameters():
        parameter.requires_grad_(False)
    return model


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8)) for _ in range(4)
        )
        self.inside = nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.inside(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class ClippedGradient(torch.autograd.Function):
    """Identity whose backward clips and scales: not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad.clamp(-1e-3, 1e-3) * ctx.scale + 1e-4 * x, None


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = ClippedGradient.apply(layer(x).tanh(), 2.0)
        return x


class HalfAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x).tanh()
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers[2:5]:
                x = layer(x).tanh()
        return self.layers[5](x.float())


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.frozen(x) + self.up(self.down(x)))


def floats(*shape: int, out: tuple[int, ...] | None = None) -> Callable[[], Any]:
    return lambda: ((torch.randn(*shape),), {}, torch.randn(*(out or shape)))


PLAIN: dict[str, Case] = {
    "nn.Transformer": Case(
        Seq2Seq, lambda: ((torch.randn(2, 5, 16), torch.randn(2, 6, 16)), {}, torch.randn(2, 6, 16)), square
    ),
    "TransformerEncoder in eval": Case(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 3),
        floats(2, 5, 16), square, train=False,
    ),
    "nn.MultiheadAttention": Case(SelfAttention, floats(5, 2, 16), square),
    "LSTM": Case(Recurrent, floats(2, 5, 8), square),
    "CNN with BatchNorm": Case(cnn(nn.BatchNorm2d), floats(2, 3, 8, 8, out=(2, 4)), square),
    "CNN with GroupNorm": Case(cnn(lambda n: nn.GroupNorm(2, n)), floats(2, 3, 8, 8, out=(2, 4)), square),
    "U-Net": Case(UNet, floats(2, 3, 8, 8), square),
    "tied table, frozen": Case(
        TiedFrozen,
        lambda: ((torch.randint(VOCABULARY, (2, 6)),), {}, torch.randint(VOCABULARY, (2, 6))),
        cross,
    ),
    "first layers frozen": Case(frozen_start, floats(4, 8), square),
    "checkpoint": Case(Checkpointed, floats(4, 8), square),
    "checkpoint, reentrant": Case(lambda: Checkpointed(reentrant=True), floats(4, 8), square),
    "custom Function": Case(WithFunction, floats(4, 8), square),
    "autocast bf16 over half": Case(HalfAutocast, floats(4, 16), square),
    "LoRA": Case(lambda: nn.Sequential(*(Adapter() for _ in range(4))), floats(4, 16), square),
}  # fmt: skip


class Branching(nn.Module):
    """A branch on data, as in Longformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 0:
                x = x * 2
        return x
