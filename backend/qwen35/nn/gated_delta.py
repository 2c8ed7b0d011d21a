"""Gated delta net (transformers `Qwen3_5MoeGatedDeltaNet`).

Letters: T tokens, H hidden, Hv value heads, Dv value dim, Cc conv channels, W conv width."""

from __future__ import annotations

from torch import Tensor, nn

from qwen35.config import TextConfig
from qwen35.kernels.ops import Ops
from qwen35.nn.layers import Linear
from qwen35.nn.weight_types import GatedDeltaWeights
from qwen35.views import BatchView, GatedDeltaView


class GatedDeltaNet(nn.Module):
    """x [T, H] -> [T, H]; advances the state of the batch's slots in the view."""

    taps: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Tensor

    def __init__(self, config: TextConfig, weights: GatedDeltaWeights, ops: Ops) -> None:
        super().__init__()
        self.in_proj_qkv, self.in_proj_z = Linear(weights.in_proj_qkv, ops), Linear(weights.in_proj_z, ops)
        self.in_proj_a, self.in_proj_b = Linear(weights.in_proj_a, ops), Linear(weights.in_proj_b, ops)
        self.out_proj = Linear(weights.out_proj, ops)
        self.register_buffer("taps", weights.conv1d.squeeze(1).t().float().contiguous())  # [W, Cc]
        self.register_buffer("rate", -weights.A_log.float().exp())  # [Hv]
        self.register_buffer("dt_bias", weights.dt_bias.float())
        self.register_buffer("norm", weights.norm.float())
        self.num_heads, self.value_width = config.linear_num_value_heads, config.linear_value_head_dim
        self.eps, self.ops = config.rms_norm_eps, ops

    def forward(self, x: Tensor, batch: BatchView, view: GatedDeltaView) -> Tensor:
        decay, beta = self.ops.delta_gates(self.in_proj_a(x), self.in_proj_b(x), self.rate, self.dt_bias)  # [T, Hv]
        mixed = self.ops.gated_delta(self.in_proj_qkv(x), decay, beta, self.taps, view, batch)  # [T, Hv, Dv]
        gate = self.in_proj_z(x).unflatten(-1, (self.num_heads, self.value_width))  # [T, Hv, Dv]
        return self.out_proj(self.ops.gated_rms_norm(mixed, gate, self.norm, self.eps).flatten(1))

    def apply_pending(self, batch: BatchView, view: GatedDeltaView) -> None:
        """Applies the accepted pending inputs of a batch without tokens."""
        inputs = view.pending_inputs.new_empty(0, self.taps.shape[1])
        gates = self.rate.new_empty(0, self.num_heads)
        self.ops.gated_delta(inputs, gates, gates, self.taps, view, batch)
