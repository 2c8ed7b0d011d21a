"""Functions of single elements and of single rows.

torch's sigmoid, silu, softplus and log1p give other bits in the last few elements of a tensor (scalar code) than before
(vector code), so a row's bits would depend on its place. exp, log, cos, sin and the IEEE operations do not, nor do sums
and maxima over a contiguous last dimension; everything here is composed of these.
"""

from __future__ import annotations

import torch
from torch import Tensor

L2_EPS = 1e-6


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of the arithmetic for activations of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sigmoid(x: Tensor) -> Tensor:
    return x.neg().exp_().add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    return sigmoid(x).mul_(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) in float64, where neither end loses digits that matter in float32."""
    x = x.double()
    return x.abs().neg_().exp_().add_(1.0).log_().add_(x.clamp(min=0.0))


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    wide = x.to(compute_dtype(x.dtype))
    inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * inverse).mul_(scale).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, scale: Tensor, eps: float) -> Tensor:
    dtype = compute_dtype(gate.dtype)
    wide = x.to(dtype)
    inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * inverse).mul_(scale).mul_(silu(gate.to(dtype))).to(gate.dtype)


def l2_norm(x: Tensor) -> Tensor:
    """x [..., D] with D contiguous, over its length."""
    return x * x.square().sum(-1, keepdim=True).add_(L2_EPS).rsqrt_()


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    dtype = compute_dtype(gate.dtype)
    return silu(gate.to(dtype)).mul_(up).to(gate.dtype)


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    return (sigmoid(gate.to(compute_dtype(x.dtype))) * x).to(x.dtype)


def delta_gates(a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    decay = softplus(a.double() + dt_bias).mul_(rate)  # [T, Hv]
    return decay.float(), sigmoid(b.float())


def rotary_tables(positions: Tensor, inv_freq: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.float().index_select(0, axes).t() * inv_freq  # [T, R/2]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, R/2]
    wide = x.to(compute_dtype(x.dtype))
    first, second, rest = wide.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1).to(x.dtype)
