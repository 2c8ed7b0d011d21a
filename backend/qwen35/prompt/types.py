"""What the other parts see of a prompt: plain records."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen35.prompt.pixels import PixelConfig, to_patches


@dataclass(frozen=True)
class PromptLimits:
    """Bounds that hold for one request. `max_image_bytes` is of the encoded file, `max_image_pixels` of the decoded
    image and is checked before decoding; a video may hold `max_video_pixels` in all of its source frames."""

    max_context_tokens: int
    max_image_bytes: int = 20 << 20
    max_image_pixels: int = 64_000_000
    max_video_pixels: int = 512_000_000


@dataclass(frozen=True)
class ImageInput:
    """One image, or one temporal patch of a video, as the vision tower reads it.

    `digest` is the SHA-256 of grid and resized pixels: equal digests mean equal embeddings for one checkpoint. Its
    placeholders are the tokens ``offset`` to ``offset + num_tokens``.
    """

    pixels: Tensor  # uint8 [frames, channels, height, width], resized
    config: PixelConfig
    grid: tuple[int, int, int]  # (1, patches in height, patches in width)
    digest: str  # 64 hexadecimal digits
    num_tokens: int
    offset: int = 0

    @property
    def patches(self) -> Tensor:
        """float32 [patches, channels * temporal patch size * patch size ** 2], computed anew at each call."""
        return to_patches(self.pixels, self.config)

    def at(self, offset: int) -> ImageInput:
        return replace(self, offset=offset)


@dataclass(frozen=True)
class Prompt:
    """A request's input, ready for the model. Placeholders are expanded: one token for each row of an image."""

    token_ids: tuple[int, ...]
    positions: Tensor  # int64 [3, tokens]: temporal, height, width
    next_position: int  # rotary position, on all three axes, of the first generated token
    images: tuple[ImageInput, ...]  # in the order of their placeholders
    text: str  # as given or as rendered, placeholders of images unexpanded

    @property
    def num_image_tokens(self) -> int:
        return sum(image.num_tokens for image in self.images)

    def scatter(self, rows: Tensor) -> Tensor:
        """Image rows [num_image_tokens, H] to [tokens, H], zeros at the text tokens."""
        full = torch.zeros(len(self.token_ids), rows.shape[-1], dtype=rows.dtype, device=rows.device)
        start = 0
        for image in self.images:
            full[image.offset : image.offset + image.num_tokens] = rows[start : start + image.num_tokens]
            start += image.num_tokens
        return full
