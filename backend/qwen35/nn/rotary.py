"""Tables of the interleaved 3-axis rotary embedding. Letters: T tokens, R rotated dims of a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qwen35.config import TextConfig
from qwen35.kernels.ops import Ops


class RotaryTables(nn.Module):
    """positions [3, T] -> cos, sin [T, R/2] float32.

    Frequencies 1, 4, 7, … below 3 * section[1] turn with the height, 2, 5, … below 3 * section[2] with the width, all
    others with the temporal position (transformers `Qwen3_5MoeTextRotaryEmbedding`).
    """

    def __init__(self, config: TextConfig, device: torch.device, ops: Ops) -> None:
        super().__init__()
        width = config.rotary_dim
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        axes = torch.zeros(width // 2, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * config.mrope_section[axis] : 3] = axis
        self.register_buffer("inv_freq", (1.0 / config.rope_theta**exponents).to(device), persistent=False)
        self.register_buffer("axes", axes.to(device), persistent=False)
        self.ops = ops

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.rotary_tables(positions, self.inv_freq, self.axes)
