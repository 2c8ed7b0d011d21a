"""`ReferenceOps`: the protocol `kernels.ops.Ops` in plain torch, row-invariant on a CPU bit for bit."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from qwen35.kernels.library import exportable, register
from qwen35.kernels.reference import attention, elementwise, gated_delta, moe
from qwen35.kernels.reference.dense import DenseWeights
from qwen35.kernels.reference.linear import linear
from qwen35.kernels.reference.plan import BatchPlan, plan_batch
from qwen35.kernels.weight_layout import PlainLayout
from qwen35.nvfp4 import LinearWeight
from qwen35.views import BatchView, GatedDeltaView, KVView

DEFAULT_CACHE_BYTES = 256 << 20


class ReferenceOps:
    """Methods and shapes: see `kernels.ops.Ops`.

    `dense_cache_bytes` bounds the dense copies kept of packed weights (0: none are kept; results are the same).
    `activations`: what inputs of packed weights are rounded to: dense (not at all), int8 and int11 (of NVFP4 weights, a
    scale for each 16), nvfp4 (of NVFP4 and FP8 weights, with the checkpoint's static scales where there are any).
    """

    def __init__(self, dense_cache_bytes: int = DEFAULT_CACHE_BYTES, activations: str = "dense") -> None:
        self._dense = DenseWeights(dense_cache_bytes)
        self._activations = activations
        self.identity = f"reference/{activations}"
        self.weight_layout = PlainLayout()
        self.name = self.identity
        register(self.name, self)
        self.row_scan = None
        self._planned: tuple[weakref.ref[BatchView], BatchPlan] | None = None

    @exportable
    def linear(
        self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        return linear(self._dense, x, weight, bias, out_dtype or x.dtype, self._activations)

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, scale, eps)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, scale: Tensor, eps: float) -> Tensor:
        return elementwise.gated_rms_norm(x, gate, scale, eps)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return elementwise.silu_mul(gate, up)

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        return elementwise.sigmoid_mul(gate, x)

    def rotary_tables(self, positions: Tensor, inv_freq: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
        return elementwise.rotary_tables(positions, inv_freq, axes)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return elementwise.rotate(x, cos, sin)

    @exportable
    def paged_attention(
        self, query: Tensor, key: Tensor, value: Tensor, view: KVView, batch: BatchView, scale: float
    ) -> Tensor:
        return attention.paged_attention(query, key, value, view, self._plan(batch), scale)

    def delta_gates(self, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        return elementwise.delta_gates(a, b, rate, dt_bias)

    @exportable
    def gated_delta(
        self, inputs: Tensor, decay: Tensor, beta: Tensor, taps: Tensor, view: GatedDeltaView, batch: BatchView
    ) -> Tensor:
        return gated_delta.gated_delta(inputs, decay, beta, taps, view, self._plan(batch))

    @exportable
    def route(self, x: Tensor, gate: Tensor, num_experts_per_tok: int) -> tuple[Tensor, Tensor]:
        logits = linear(self._dense, x, gate, None, elementwise.compute_dtype(x.dtype), "dense")
        return moe.choose(logits.float(), num_experts_per_tok)

    @exportable
    def moe_experts(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        gate_proj: LinearWeight,
        up_proj: LinearWeight,
        down_proj: LinearWeight,
    ) -> Tensor:
        projections = (gate_proj, up_proj, down_proj)
        return moe.moe_experts(self._dense, x, experts, weights, projections, self._activations)

    def _plan(self, batch: BatchView) -> BatchPlan:
        """The last batch's plan is kept: all layers of a pass ask for the same one."""
        if self._planned is None or self._planned[0]() is not batch:
            self._planned = (weakref.ref(batch), plan_batch(batch))
        return self._planned[1]
