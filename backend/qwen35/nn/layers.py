"""Modules that hold weights: matrices of any kind, norms, and their application through the operations.

Buffers carry the checkpoint's names, so that a module's buffers are found by them before and after `torch.export`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qwen35.kernels.ops import Ops
from qwen35.nvfp4 import FP8Tensor, LinearWeight, NVFP4Panels, NVFP4Tensor


class Matrix(nn.Module):
    """A weight [..., N, K], dense or packed, in buffers named as ModelOpt names them on disk."""

    weight: Tensor

    def __init__(self, weight: LinearWeight) -> None:
        super().__init__()
        for name, part in _parts(weight).items():
            self.register_buffer(name, part)
        self._packed = None if isinstance(weight, Tensor) else weight
        self.num_rows = weight.num_rows if isinstance(weight, NVFP4Panels) else None

    @property
    def value(self) -> LinearWeight:
        """The weight as the operations take it; put together from the buffers where those were replaced."""
        if self._packed is None:
            return self.weight
        return weight_of(self) if torch.compiler.is_exporting() else self._packed

    def _apply(self, fn, recurse: bool = True) -> Matrix:
        super()._apply(fn, recurse)
        if self._packed is not None:
            self._packed = weight_of(self)
        return self


class Linear(Matrix):
    """x [..., K] -> [..., N]."""

    def __init__(self, weight: LinearWeight, ops: Ops) -> None:
        super().__init__(weight)
        self.ops = ops

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return self.ops.linear(x, self.value, out_dtype=out_dtype)


class RMSNorm(nn.Module):
    """Zero-centred root mean square norm: x [..., H] -> x / rms(x) * (1 + w)."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, eps: float, ops: Ops) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", 1.0 + weight.float(), persistent=False)
        self.eps, self.ops = eps, ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.scale, self.eps)


def weight_of(module: nn.Module) -> LinearWeight:
    """The weight in a module's buffers, be it a `Matrix` or what `torch.export` made of one."""
    buffers = dict(module.named_buffers(recurse=False))
    weight, input_scale = buffers["weight"], buffers.get("input_scale")
    num_rows = getattr(module, "num_rows", None)
    if num_rows is not None:
        return NVFP4Panels(weight, buffers["weight_scale"], num_rows, buffers["weight_scale_2"], input_scale)
    if "weight_scale_2" in buffers:
        return NVFP4Tensor(weight, buffers["weight_scale"], buffers["weight_scale_2"], input_scale)
    return FP8Tensor(weight, buffers["weight_scale"], input_scale) if "weight_scale" in buffers else weight


def _parts(weight: LinearWeight) -> dict[str, Tensor | None]:
    if isinstance(weight, (NVFP4Tensor, NVFP4Panels)):
        return {
            "weight": weight.codes,
            "weight_scale": weight.scales,
            "weight_scale_2": weight.global_scale,
            "input_scale": weight.input_scale,
        }
    if isinstance(weight, FP8Tensor):
        return {"weight": weight.weight, "weight_scale": weight.weight_scale, "input_scale": weight.input_scale}
    return {"weight": weight}
