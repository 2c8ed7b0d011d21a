"""Full attention with a query gate (transformers `Qwen3_5MoeAttention`).

Letters: T tokens, H hidden, Hq/Hkv query/KV heads, D head dim, R rotated dims."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from qwen35.config import TextConfig
from qwen35.kernels.ops import Ops
from qwen35.nn.layers import Linear, RMSNorm
from qwen35.nn.weight_types import AttentionWeights
from qwen35.views import BatchView, KVView


class Attention(nn.Module):
    """x [T, H] -> [T, H]; writes the tokens' keys and values into the view."""

    def __init__(self, config: TextConfig, weights: AttentionWeights, ops: Ops) -> None:
        super().__init__()
        self.q_proj, self.k_proj = Linear(weights.q_proj, ops), Linear(weights.k_proj, ops)
        self.v_proj, self.o_proj = Linear(weights.v_proj, ops), Linear(weights.o_proj, ops)
        self.q_norm = RMSNorm(weights.q_norm, config.rms_norm_eps, ops)
        self.k_norm = RMSNorm(weights.k_norm, config.rms_norm_eps, ops)
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.ops = config.head_dim, ops
        scales = {"key_scale": weights.k_scale, "value_scale": weights.v_scale}
        self.kv_scales = {name: float(scale) for name, scale in scales.items() if scale is not None}

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], batch: BatchView, view: KVView) -> Tensor:
        """rotary: cos, sin [T, R/2]."""
        view = self.scaled(view)
        # The rows of q_proj are interleaved per head: D of query, then D of gate.
        both = self.q_proj(x).unflatten(-1, (self.num_heads, 2 * self.head_dim))  # [T, Hq, 2D]
        query, gate = both.chunk(2, -1)
        key = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))  # [T, Hkv, D]
        value = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        query = self.ops.rotate(self.q_norm(query), *rotary)
        key = self.ops.rotate(self.k_norm(key), *rotary)
        mixed = self.ops.paged_attention(query, key, value, view, batch, self.head_dim**-0.5)  # [T, Hq, D]
        return self.o_proj(self.ops.sigmoid_mul(gate, mixed).flatten(1))

    def scaled(self, view: KVView) -> KVView:
        """The checkpoint's scales of FP8 keys and values, if any, replace the view's."""
        return replace(view, **self.kv_scales) if self.kv_scales else view
