"""The seam between the model's mathematics and whoever computes it.

Rows. Every operation takes T independent rows (tokens). The bits of an output row depend on that row alone, and for
`gated_delta` and `paged_attention` on its sequence's past: never on T, on the row's place, on its company, on how a
prompt was cut into chunks, or on the number of draft tokens. Every value that a cache holds is rounded to the cache's
type before its first use, inside its own chunk too.

Types. Activations have the model's dtype (bfloat16, float32 or float64); arithmetic is at least float32; the recurrent
state, its decay and beta are float32 always. Weights of `linear` and `moe_experts` are dense, NVFP4 or FP8.

A `BatchView` and its tensors must not change while a forward pass uses them; implementations may keep what they derive
from one object for as long as that object lives.

Letters: T tokens, H hidden, K/N input/output features, E experts, k experts a token, I expert width, Hq/Hkv query/KV
heads, D head dim, R rotated dims, Hk/Hv GDN key/value heads, Dk/Dv GDN key/value dims, Cc conv channels, W conv width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from qwen35.kernels.scan import RowScan
from qwen35.kernels.weight_layout import WeightLayout
from qwen35.nvfp4 import LinearWeight
from qwen35.views import BatchView, GatedDeltaView, KVView


class Ops(Protocol):
    """One implementation of the model's arithmetic. Methods return new tensors and write only into cache views."""

    row_scan: RowScan | None  # for the sampler, which does without where there is none
    identity: str  # of the arithmetic: implementation, instruction set, activations; what a cache holds depends on it
    weight_layout: WeightLayout  # in which weights are best loaded; every operation takes rows as on disk, too

    def linear(
        self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N] in `out_dtype`, by default that of x."""
        ...

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """x [..., H] over its root mean square, times scale [H]; a zero-centred norm passes 1 + w."""
        ...

    def gated_rms_norm(self, x: Tensor, gate: Tensor, scale: Tensor, eps: float) -> Tensor:
        """x [..., H] normalised, times scale [H], times silu(gate [..., H]) -> gate's dtype."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, both of one shape."""
        ...

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """sigmoid(gate) * x with broadcasting -> x's dtype."""
        ...

    def rotary_tables(self, positions: Tensor, inv_freq: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
        """Interleaved mrope: positions [3, T] int64, inv_freq [R/2] float32, axes [R/2] (axis of each frequency)
        -> cos, sin [T, R/2] float32."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, heads, D], its first R dimensions rotated (halves paired) by cos, sin [T, R/2]."""
        ...

    def paged_attention(
        self, query: Tensor, key: Tensor, value: Tensor, view: KVView, batch: BatchView, scale: float
    ) -> Tensor:
        """Writes key and value [T, Hkv, D] into `view` (rounded to its dtype), then attends with query [T, Hq, D]
        -> [T, Hq, D]. Cache entries beyond a sequence's length are never read as values, whatever they hold."""
        ...

    def delta_gates(self, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """a, b [T, Hv], rate = -exp(A_log) [Hv], dt_bias [Hv] -> log decay g = rate * softplus(a + dt_bias) and
        beta = sigmoid(b), both [T, Hv] float32."""
        ...

    def gated_delta(
        self, inputs: Tensor, decay: Tensor, beta: Tensor, taps: Tensor, view: GatedDeltaView, batch: BatchView
    ) -> Tensor:
        """Causal convolution with silu, then the gated delta rule: inputs [T, Cc] before the convolution (queries,
        keys, values), decay and beta [T, Hv], taps [W, Cc] float32, oldest first -> [T, Hv, Dv] float32.

        In place, for each sequence: its accepted pending inputs are applied; then its own inputs are either left
        pending (`defer`) or applied as well. A sequence at KV position 0 with nothing pending starts from the zero
        state, whatever its slot holds. A sequence may have no tokens: then only its pending inputs are applied.
        """
        ...

    def route(self, x: Tensor, gate: Tensor, num_experts_per_tok: int) -> tuple[Tensor, Tensor]:
        """x [T, H], router gate [E, H] -> expert ids [T, k] int64, ascending in each row, and their weights [T, k]
        float32. Softmax over all experts, top k (ties to the lowest id), renormalised."""
        ...

    def moe_experts(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        gate_proj: LinearWeight,
        up_proj: LinearWeight,
        down_proj: LinearWeight,
    ) -> Tensor:
        """Gated MLPs of the routed experts: x [T, H], experts and weights [T, k] from `route`, gate_proj and up_proj
        [E, I, H], down_proj [E, H, I] -> [T, H]; a token's experts are added in ascending id."""
        ...
