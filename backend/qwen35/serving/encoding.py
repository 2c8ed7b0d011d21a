"""The first step without Triton: a validated request to what the later steps take. Knows no threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from qwen35.config import ModelConfig
from qwen35.devices import select_dtype
from qwen35.kernels.select import select_ops
from qwen35.nn.vision import VisionTower
from qwen35.prompt.encoder import ImageEncoder
from qwen35.prompt.processor import PromptProcessor
from qwen35.prompt.types import Prompt, PromptLimits
from qwen35.serving.options import PromptSource
from qwen35.serving.resolved import ImageSpan, ResolvedRequest
from qwen35.settings import Settings
from qwen35.weights.loader import load_vision


@dataclass(frozen=True)
class Encoded:
    """What the later steps take."""

    request: ResolvedRequest
    token_ids: Tensor  # [N] int32
    positions: Tensor  # [3, N] int32
    embeds: Tensor  # [M, H] bf16, one row for each placeholder token, in order


class Processor(Protocol):
    """What is used of ``PromptProcessor``."""

    def from_text(self, text: str, images: Any, images_field: str) -> Prompt: ...

    def from_messages(self, messages: Any, tools: Any, template_kwargs: Any) -> Prompt: ...


class RequestEncoder:
    """Thread-safe, as its parts are. ``images`` is None for a checkpoint without a vision tower."""

    def __init__(self, processor: Processor, images: ImageEncoder | None, hidden_size: int) -> None:
        self._processor = processor
        self._images = images
        self._hidden_size = hidden_size

    @classmethod
    def load(cls, settings: Settings, device: torch.device) -> RequestEncoder:
        """Tokenizer, template and vision tower of a checkpoint."""
        checkpoint = Path(settings.checkpoint)
        config = ModelConfig.from_directory(checkpoint)
        limits = PromptLimits(
            max_context_tokens=settings.max_context_tokens or config.text.max_position_embeddings,
            max_image_bytes=settings.max_image_bytes,
            max_image_pixels=settings.max_image_pixels,
        )
        images = None
        if config.vision is not None:
            weights, _ = load_vision(checkpoint, config, device=device, dtype=select_dtype(settings.dtype))
            tower = VisionTower(config.vision, weights, select_ops(settings, device))
            images = ImageEncoder(tower, settings.image_cache_bytes)
        return cls(PromptProcessor(checkpoint, config, limits), images, config.text.hidden_size)

    def encode(self, request: ResolvedRequest, source: PromptSource) -> Encoded:
        """Raises InvalidArgument or Unsupported with the path of what is wrong in the prompt or its images."""
        if request.is_continued:
            no_ids, no_positions = torch.empty(0, dtype=torch.int32), torch.empty(3, 0, dtype=torch.int32)
            return Encoded(request, no_ids, no_positions, self._no_embeds)
        if source.messages is not None:
            prompt = self._processor.from_messages(source.messages, source.tools, source.template_kwargs)
        else:
            prompt = self._processor.from_text(source.text or "", source.images, source.images_field)
        spans = tuple(ImageSpan(image.digest, image.offset, image.num_tokens) for image in prompt.images)
        return Encoded(
            request=request.with_images(spans),
            token_ids=torch.tensor(prompt.token_ids, dtype=torch.int32),
            positions=prompt.positions.to(torch.int32).contiguous(),
            embeds=self._embeds(prompt),
        )

    @property
    def _no_embeds(self) -> Tensor:
        return torch.zeros(0, self._hidden_size, dtype=torch.bfloat16)

    def _embeds(self, prompt: Prompt) -> Tensor:
        if self._images is None or not prompt.images:
            return self._no_embeds
        return self._images.embed(prompt).to("cpu", torch.bfloat16).contiguous()


def has_images(source: PromptSource) -> bool:
    """Whether the vision tower may have to run; a look at the message parts, their validity is checked later."""
    if source.images:
        return True
    contents = [message.get("content") for message in source.messages or [] if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts)
