"""The vision tower: patches of one image to rows of the language model's embedding space.

Knows no files, no caches and no text. One image a call (one temporal patch of a video), so that an image's rows depend
on nothing but the image. Source: transformers `Qwen3_5MoeVisionModel`.

Letters: N patches of the image (h*w), h/w patches in height and width, m merge size, M merged rows (N / m²), S vision
hidden, A heads, D head dimension, P features of one patch, H hidden of the language model, G side of the learned grid.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen35.config import VisionConfig
from qwen35.errors import ConfigError
from qwen35.kernels.ops import Ops
from qwen35.nn.weight_types import AffineWeights, NormWeights, VisionBlockWeights, VisionWeights

_LAYER_NORM_EPS = 1e-6
_ACTIVATIONS = {
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}


class VisionTower:
    """Eager; holds weights only. Results have the dtype and device of `weights.pos_embed`."""

    def __init__(self, config: VisionConfig, weights: VisionWeights, ops: Ops) -> None:
        if config.hidden_act not in _ACTIVATIONS:
            raise ConfigError(
                f"vision_config.hidden_act: expected one of {', '.join(_ACTIVATIONS)}, got {config.hidden_act!r}"
            )
        self.config = config
        self.weights = weights
        self.hidden_size = config.out_hidden_size
        self.dtype = weights.pos_embed.dtype
        self._ops = ops
        self._activation = _ACTIVATIONS[config.hidden_act]

    def forward(self, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """patches [N, P] of grid (1, h, w), merge blocks side by side -> [M, H]."""
        num_frames, height, width = grid
        if num_frames != 1 or patches.shape[0] != height * width:
            raise ValueError(f"patches: expected one image of grid {grid}, got {patches.shape[0]} patches")
        weights = self.weights
        x = self._affine(patches.to(weights.pos_embed.device, self.dtype), weights.patch_embed)  # [N, S]
        rows, columns = merge_order(height, width, self.config.spatial_merge_size, x.device)
        x = x + self._position_embedding(rows, columns, height, width).to(self.dtype)
        cos, sin = self._rotary(rows, columns)
        for block in weights.blocks:
            x = x + self._attention(_layer_norm(x, block.norm1), block, cos, sin)
            hidden = self._activation(self._affine(_layer_norm(x, block.norm2), block.linear_fc1))
            x = x + self._affine(hidden, block.linear_fc2)
        return self._merge(x)

    def _affine(self, x: Tensor, weights: AffineWeights) -> Tensor:
        return self._ops.linear(x, weights.weight, weights.bias)

    def _attention(self, x: Tensor, block: VisionBlockWeights, cos: Tensor, sin: Tensor) -> Tensor:
        """Every patch of the image sees every other."""
        num_heads = self.config.num_heads
        qkv = self._affine(x, block.qkv).view(x.shape[0], 3, num_heads, -1)  # [N, 3, A, D]
        query, key, value = qkv.permute(1, 2, 0, 3).unbind(0)  # each [A, N, D]
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query[None], key[None], value[None])[0]
        return self._affine(mixed.transpose(0, 1).reshape(x.shape), block.proj)

    def _merge(self, x: Tensor) -> Tensor:
        """Joins the m² patches of a merge block, which lie side by side: [N, S] -> [M, H]."""
        merger = self.weights.merger
        x = _layer_norm(x, merger.norm).view(-1, self.config.spatial_merge_size**2 * x.shape[1])  # [M, m²*S]
        return self._affine(F.gelu(self._affine(x, merger.linear_fc1)), merger.linear_fc2)

    def _position_embedding(self, rows: Tensor, columns: Tensor, height: int, width: int) -> Tensor:
        """The learned G x G grid, stretched bilinearly over the image, corners on corners: [N, S]."""
        side = int(self.config.num_position_embeddings**0.5)
        top, bottom, lower = _interpolate(rows, height, side)
        left, right, later = _interpolate(columns, width, side)
        table = self.weights.pos_embed
        corners = torch.stack([top * side + left, top * side + right, bottom * side + left, bottom * side + right], 1)
        shares = torch.stack([(1 - lower) * (1 - later), (1 - lower) * later, lower * (1 - later), lower * later], 1)
        return (table[corners] * shares[:, :, None]).sum(1)  # [N, 4, S] -> [N, S]

    def _rotary(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, D]: the first half of the frequencies turns with the row, the other with the column."""
        half = self.config.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=rows.device) / half
        frequencies = 1.0 / self.config.rope_theta**exponents  # [D / 4]
        angles = torch.cat([rows[:, None] * frequencies, columns[:, None] * frequencies], dim=-1)  # [N, D / 2]
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def merge_order(height: int, width: int, merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, [N] each, in the order in which merge blocks lie side by side."""
    rows, columns = torch.meshgrid(
        torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij"
    )
    blocks = (height // merge, merge, width // merge, merge)
    rows, columns = (grid.reshape(blocks).transpose(1, 2).flatten() for grid in (rows, columns))
    return rows, columns


def _interpolate(index: Tensor, num_targets: int, num_sources: int) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbours of each target place in the source, and the share of the second (float32)."""
    place = index.to(torch.float32) * (num_sources - 1) / max(num_targets - 1, 1)
    first = place.floor().long()
    return first, (first + 1).clamp(max=num_sources - 1), place - first


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [A, N, D] in float32 (float64 stays)."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = values.chunk(2, dim=-1)
    return (values * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def _layer_norm(x: Tensor, weights: NormWeights) -> Tensor:
    """Weights are float32 whatever the dtype of x; the result has x's."""
    kind = torch.promote_types(x.dtype, torch.float32)
    weight, bias = weights.weight.to(kind), weights.bias.to(kind)
    return F.layer_norm(x.to(kind), weight.shape, weight, bias, _LAYER_NORM_EPS).to(x.dtype)
