"""Matrix products in fixed tiles of 16 rows.

BLAS libraries choose their kernel, and with it the order of summation, by the number of rows; one fixed shape fixes the
order, and inside it every row is treated alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.kernels.reference.dense import DenseWeights
from qwen35.kernels.reference.elementwise import compute_dtype
from qwen35.nvfp4 import (
    INT8_LEVELS,
    INT11_LEVELS,
    FP8Tensor,
    LinearWeight,
    NVFP4Panels,
    NVFP4Tensor,
    fake_quantize_activation,
    fake_quantize_activation_fp8,
    fake_quantize_activation_levels,
)

TILE_ROWS = 16
_LEVELS = {"int8": INT8_LEVELS, "int11": INT11_LEVELS}


def linear(
    dense: DenseWeights,
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    activations: str,
) -> Tensor:
    """x [..., K] -> [..., N]; `activations` as in `ReferenceOps`."""
    dtype = compute_dtype(x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    num_rows = rows.shape[0]
    tiled = pad_rows(rows, dtype)  # [tiles * 16, K]
    tiled = quantize_activation(tiled, weight, activations)
    blocks = [multiply_tiles(tiled, matrix) for matrix in dense.blocks(weight, dtype)]
    out = blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
    out = out[:num_rows]
    if bias is not None:
        out = out + bias
    out = out.to(out_dtype)
    return out if x.ndim == 2 else out.view(*x.shape[:-1], weight.shape[0])


def pad_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """rows [T, K] -> [T', K] contiguous in `dtype`, zero rows up to a multiple of 16."""
    num_rows, width = rows.shape
    padding = -num_rows % TILE_ROWS
    if not padding:
        return rows.to(dtype).contiguous()
    tiled = rows.new_zeros(num_rows + padding, width, dtype=dtype)
    tiled[:num_rows] = rows
    return tiled


def multiply_tiles(tiled: Tensor, matrix: Tensor) -> Tensor:
    """tiled [T', K] @ matrix [K, N] -> [T', N], a tile at a time."""
    if tiled.shape[0] == TILE_ROWS:
        return torch.mm(tiled, matrix)
    out = tiled.new_empty(tiled.shape[0], matrix.shape[1])
    for rows, result in zip(tiles_of(tiled), tiles_of(out), strict=True):
        torch.mm(rows, matrix, out=result)
    return out


def tiles_of(rows: Tensor) -> tuple[Tensor, ...]:
    """[T', N] -> views of 16 rows each."""
    return (rows,) if rows.shape[0] == TILE_ROWS else rows.unflatten(0, (-1, TILE_ROWS)).unbind(0)


def quantize_activation(x: Tensor, weight: LinearWeight, activations: str, input_scale: Tensor | None = None) -> Tensor:
    """x rounded as `activations` asks for this kind of weight; `input_scale` in the place of the weight's own."""
    is_nvfp4 = isinstance(weight, (NVFP4Tensor, NVFP4Panels))
    if activations in _LEVELS and is_nvfp4:
        return fake_quantize_activation_levels(x, _LEVELS[activations])
    scale = getattr(weight, "input_scale", None) if input_scale is None else input_scale
    if activations != "nvfp4" or scale is None:
        return x
    if is_nvfp4:
        return fake_quantize_activation(x, scale)
    return fake_quantize_activation_fp8(x, scale) if isinstance(weight, FP8Tensor) else x
