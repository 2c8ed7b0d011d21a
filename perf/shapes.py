"""Random models of known widths in memory, and engines over them: what benchmarks need where no checkpoint is at hand.

All matrices are NVFP4, lm_head included, but for the small ones that no export quantises (routers, gates)."""

from __future__ import annotations

import tokenizers
import torch
from torch import Tensor

from qwen35.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig, TextConfig
from qwen35.engine.engine import Engine
from qwen35.kernels.ops import Ops
from qwen35.nn.language import LanguageModel
from qwen35.nn.program import accelerate
from qwen35.nn.weight_types import (
    AttentionWeights,
    ExpertWeights,
    GatedDeltaWeights,
    LanguageWeights,
    LayerWeights,
    MLPWeights,
    MoEWeights,
)
from qwen35.nvfp4 import NVFP4Tensor
from qwen35.settings import Settings
from qwen35.state.geometry import Geometry
from qwen35.state.local import LocalState

BF16 = torch.bfloat16
_COMMON = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
    "rope_theta": 1e7,
    "rotary_dim": 64,
    "mrope_section": (11, 11, 10),
}


def small(num_layers: int = 8) -> TextConfig:
    """The benchmark shape of 344 M parameters."""
    return TextConfig(
        vocab_size=32_000,
        hidden_size=1024,
        num_hidden_layers=num_layers,
        layer_types=layer_types(num_layers),
        num_attention_heads=8,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
        **_COMMON,
    )


def large(num_layers: int = 4) -> TextConfig:
    """The widths of Qwen3.5-35B-A3B."""
    return TextConfig(
        vocab_size=248_320,
        hidden_size=2048,
        num_hidden_layers=num_layers,
        layer_types=layer_types(num_layers),
        num_attention_heads=16,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        **_COMMON,
    )


def layer_types(num_layers: int) -> tuple[str, ...]:
    return tuple(LINEAR_ATTENTION if (i + 1) % 4 else FULL_ATTENTION for i in range(num_layers))


def model_config(text: TextConfig) -> ModelConfig:
    return ModelConfig(text, None, None, None, None, None, frozenset(), BF16)


def make_engine(text: TextConfig, ops: Ops, **settings: object) -> tuple[Engine, LocalState]:
    """An engine of random weights without a draft."""
    config = model_config(text)
    resolved = Settings(num_draft_tokens=0, **settings)
    state = LocalState(Geometry.derive(config, resolved))
    target = accelerate(LanguageModel(text, language_weights(text), ops), ops)
    return Engine(target, None, state.pool, state.cache, tokenizer(), config, resolved, ops.row_scan), state


def tokenizer() -> tokenizers.Tokenizer:
    """Knows no token: every text is empty."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def language_weights(text: TextConfig) -> LanguageWeights:
    hidden, vocab = text.hidden_size, -(-text.vocab_size // 64) * 64
    return LanguageWeights(
        embed_tokens=torch.randn(vocab, hidden).to(BF16),
        layers=tuple(_layer(text, kind) for kind in text.layer_types),
        norm=torch.randn(hidden) * 0.1,
        lm_head=packed(vocab, hidden),
    )


def packed(*shape: int) -> NVFP4Tensor:
    """Any bytes are a weight; values of about 0.03."""
    *lead, num_rows, width = shape
    codes = torch.randint(0, 256, (*lead, num_rows, width // 2), dtype=torch.uint8)
    scales = torch.randint(48, 64, (*lead, num_rows, width // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return NVFP4Tensor(codes, scales, torch.full(tuple(lead), 0.01))


def _dense(*shape: int) -> Tensor:
    return (torch.randn(*shape) * 0.03).to(BF16)


def _layer(text: TextConfig, kind: str) -> LayerWeights:
    hidden = text.hidden_size
    mixer = _attention(text) if kind == FULL_ATTENTION else _gated_delta(text)
    return LayerWeights(torch.randn(hidden) * 0.1, torch.randn(hidden) * 0.1, mixer, _moe(text))


def _attention(text: TextConfig) -> AttentionWeights:
    hidden, width = text.hidden_size, text.num_attention_heads * text.head_dim
    kv_width = text.num_key_value_heads * text.head_dim
    return AttentionWeights(
        packed(2 * width, hidden),
        packed(kv_width, hidden),
        packed(kv_width, hidden),
        packed(hidden, width),
        torch.randn(text.head_dim) * 0.1,
        torch.randn(text.head_dim) * 0.1,
    )


def _gated_delta(text: TextConfig) -> GatedDeltaWeights:
    hidden, heads = text.hidden_size, text.linear_num_value_heads
    return GatedDeltaWeights(
        in_proj_qkv=packed(text.conv_dim, hidden),
        in_proj_z=packed(text.value_dim, hidden),
        in_proj_a=_dense(heads, hidden),
        in_proj_b=_dense(heads, hidden),
        conv1d=torch.randn(text.conv_dim, 1, text.linear_conv_kernel_dim) * 0.3,
        A_log=torch.rand(heads),
        dt_bias=torch.rand(heads),
        norm=torch.rand(text.linear_value_head_dim),
        out_proj=packed(hidden, text.value_dim),
    )


def _moe(text: TextConfig) -> MoEWeights:
    hidden, width, num_experts = text.hidden_size, text.moe_intermediate_size, text.num_experts
    shared = text.shared_expert_intermediate_size
    return MoEWeights(
        gate=(torch.randn(num_experts, hidden) * 0.1).to(BF16),
        experts=ExpertWeights(
            packed(num_experts, width, hidden), packed(num_experts, width, hidden), packed(num_experts, hidden, width)
        ),
        shared_expert=MLPWeights(packed(shared, hidden), packed(shared, hidden), packed(hidden, shared)),
        shared_expert_gate=_dense(1, hidden),
    )
