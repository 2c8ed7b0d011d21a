"""Rotary positions of a prompt on three axes (temporal, height, width).

Text advances all axes together. An image of h x w merged patches stands still in time, walks rows and columns from
where the text stopped, and the text goes on after max(h, w). Source: transformers `Qwen3_5MoeModel.get_rope_index`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from qwen35.prompt.types import ImageInput


def rotary_positions(num_tokens: int, images: Iterable[ImageInput]) -> tuple[Tensor, int]:
    """Positions int64 [3, num_tokens] and the position of the next token. `images` in ascending order of offset."""
    positions = torch.empty(3, num_tokens, dtype=torch.int64)
    token, position = 0, 0
    for image in images:
        position = _text(positions, token, image.offset, position)
        token = image.offset + image.num_tokens
        _, height, width = (side // image.config.merge_size for side in image.grid)
        positions[0, image.offset : token] = position
        positions[1, image.offset : token] = position + torch.arange(height).repeat_interleave(width)
        positions[2, image.offset : token] = position + torch.arange(width).repeat(height)
        position += max(height, width)
    return positions, _text(positions, token, num_tokens, position)


def _text(positions: Tensor, start: int, end: int, position: int) -> int:
    """Fills tokens start to end, ascending from `position`; returns the position after them."""
    positions[:, start:end] = torch.arange(position, position + end - start)
    return position + end - start
