"""Mixture of experts with a shared expert (transformers `Qwen3_5MoeSparseMoeBlock`).

Letters: T tokens, H hidden, E experts, I expert width."""

from __future__ import annotations

from torch import Tensor, nn

from qwen35.config import TextConfig
from qwen35.kernels.ops import Ops
from qwen35.nn.layers import Linear, Matrix
from qwen35.nn.weight_types import ExpertWeights, MLPWeights, MoEWeights


class Experts(nn.Module):
    """The routed experts' stacks [E, I, H], [E, I, H], [E, H, I]."""

    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Matrix(weights.gate_proj), Matrix(weights.up_proj)
        self.down_proj = Matrix(weights.down_proj)


class GatedMLP(nn.Module):
    """x [T, H] -> [T, H]."""

    def __init__(self, weights: MLPWeights, ops: Ops) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(weights.gate_proj, ops), Linear(weights.up_proj, ops)
        self.down_proj, self.ops = Linear(weights.down_proj, ops), ops

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ops.silu_mul(self.gate_proj(x), self.up_proj(x)))


class SparseMoE(nn.Module):
    """x [T, H] -> [T, H]: the routed experts' weighted sum plus the shared expert behind its sigmoid gate."""

    def __init__(self, config: TextConfig, weights: MoEWeights, ops: Ops) -> None:
        super().__init__()
        self.gate = Matrix(weights.gate)
        self.experts = Experts(weights.experts)
        self.shared_expert = GatedMLP(weights.shared_expert, ops)
        self.shared_expert_gate = Linear(weights.shared_expert_gate, ops)
        self.num_experts_per_tok, self.ops = config.num_experts_per_tok, ops

    def forward(self, x: Tensor) -> Tensor:
        experts, weights = self.ops.route(x, self.gate.value, self.num_experts_per_tok)
        stacks = (self.experts.gate_proj.value, self.experts.up_proj.value, self.experts.down_proj.value)
        routed = self.ops.moe_experts(x, experts, weights, *stacks)
        return routed + self.ops.sigmoid_mul(self.shared_expert_gate(x), self.shared_expert(x))
