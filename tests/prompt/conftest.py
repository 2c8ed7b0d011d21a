"""One processor over the demo checkpoint's files (its weights aren't read)."""

from pathlib import Path

import pytest

from qwen35.config import ModelConfig
from qwen35.prompt.processor import PromptProcessor
from qwen35.prompt.types import PromptLimits

CHECKPOINT = Path(__file__).parents[2] / "build" / "demo" / "checkpoint"


@pytest.fixture(scope="session")
def limits() -> PromptLimits:
    return PromptLimits(
        max_context_tokens=512, max_image_bytes=1 << 20, max_image_pixels=200_000, max_video_pixels=400_000
    )


@pytest.fixture(scope="session")
def processor(limits) -> PromptProcessor:
    return PromptProcessor(CHECKPOINT, ModelConfig.from_directory(CHECKPOINT), limits)


@pytest.fixture(scope="session")
def reference_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(CHECKPOINT)
