"""The language model: embedding, decoder layers, final norm, head (transformers `Qwen3_5MoeTextModel`).

Knows nothing of sequences' lives: tokens, positions and places come in a `BatchView`, state in a `CacheView`.

Letters: T tokens, R rows, H hidden, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen35.config import TextConfig
from qwen35.kernels.ops import Ops
from qwen35.nn.attention import Attention
from qwen35.nn.gated_delta import GatedDeltaNet
from qwen35.nn.layers import Linear, RMSNorm
from qwen35.nn.moe import SparseMoE
from qwen35.nn.rotary import RotaryTables
from qwen35.nn.weight_types import AttentionWeights, LanguageWeights, LayerWeights
from qwen35.views import BatchView, CacheView, GatedDeltaView, KVView


class DecoderLayer(nn.Module):
    """x [T, H] -> [T, H]: mixer (full attention or gated delta net), then experts, each behind a norm."""

    def __init__(self, config: TextConfig, weights: LayerWeights, ops: Ops) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(weights.input_layernorm, config.rms_norm_eps, ops)
        self.post_attention_layernorm = RMSNorm(weights.post_attention_layernorm, config.rms_norm_eps, ops)
        self.is_attention = isinstance(weights.mixer, AttentionWeights)
        if self.is_attention:
            self.self_attn = Attention(config, weights.mixer, ops)
        else:
            self.linear_attn = GatedDeltaNet(config, weights.mixer, ops)
        self.mlp = SparseMoE(config, weights.mlp, ops)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], batch: BatchView, view: KVView | GatedDeltaView
    ) -> Tensor:
        inner = self.input_layernorm(x)
        if self.is_attention:
            x = x + self.self_attn(inner, rotary, batch, view)
        else:
            x = x + self.linear_attn(inner, batch, view)
        return x + self.mlp(self.post_attention_layernorm(x))


class LanguageModel(nn.Module):
    """The target. `forward` is what is exported; embedding and head stay outside, reached by name."""

    embed_tokens: Tensor

    def __init__(self, config: TextConfig, weights: LanguageWeights, ops: Ops) -> None:
        super().__init__()
        self.config = config
        self.dtype = weights.layers[0].mlp.gate.dtype
        self.register_buffer("embed_tokens", weights.embed_tokens)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, ops) for layer in weights.layers)
        self.norm = RMSNorm(weights.norm, config.rms_norm_eps, ops)
        self.lm_head = Linear(weights.lm_head, ops)
        self.rotary = RotaryTables(config, weights.norm.device, ops)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, H] in the model's dtype; of a mapped file only these rows are read."""
        return F.embedding(token_ids, self.embed_tokens).to(self.dtype)

    def forward(self, embeds: Tensor, batch: BatchView, cache: CacheView) -> Tensor:
        """embeds [T, H] -> hidden states after the final norm [T, H]; writes into the cache."""
        x = embeds.to(self.dtype)
        rotary = self.rotary(batch.positions)
        for layer, view in zip(self.layers, self.views(cache), strict=True):
            x = layer(x, rotary, batch, view)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] after the final norm -> [R, V] float32, without the head's padding rows."""
        return self.lm_head(hidden, torch.float32)[:, : self.config.vocab_size]

    def apply_pending(self, batch: BatchView, cache: CacheView) -> None:
        """Applies accepted pending inputs to the gated delta states, for a batch whose sequences have no tokens."""
        for layer, view in zip(self.layers, self.views(cache), strict=True):
            if not layer.is_attention:
                layer.linear_attn.apply_pending(batch, view)

    def views(self, cache: CacheView) -> list[KVView | GatedDeltaView]:
        """The views of the layers, in layer order."""
        attention, gated_delta = iter(cache.attention), iter(cache.gated_delta)
        return [next(attention) if layer.is_attention else next(gated_delta) for layer in self.layers]
