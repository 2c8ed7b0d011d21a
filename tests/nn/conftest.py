"""The tiny checkpoint, loaded by the project and by transformers, once for all tests of the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qwen35.config import ModelConfig
from qwen35.kernels.reference import ReferenceOps
from qwen35.nn.draft import DraftModel
from qwen35.nn.language import LanguageModel
from qwen35.weights.loader import load_language
from tests.tiny_checkpoint import make_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1, dtype=torch.float32)


@pytest.fixture(scope="session")
def tiny_config(tiny_directory: Path) -> ModelConfig:
    return ModelConfig.from_directory(tiny_directory)


@pytest.fixture(scope="session")
def load_models(tiny_directory: Path, tiny_config: ModelConfig) -> Callable[..., tuple[LanguageModel, DraftModel]]:
    """Target and draft with dense weights of a given type."""
    loaded: dict[torch.dtype, tuple[LanguageModel, DraftModel]] = {}

    def load(dtype: torch.dtype = torch.float32) -> tuple[LanguageModel, DraftModel]:
        if dtype not in loaded:
            target, draft, _ = load_language(tiny_directory, tiny_config, with_draft=True, dtype=dtype)
            ops, text = ReferenceOps(), tiny_config.text
            loaded[dtype] = LanguageModel(text, target, ops).eval(), DraftModel(text, draft, ops).eval()
        return loaded[dtype]

    return load


@pytest.fixture(scope="session")
def oracle(tiny_directory: Path) -> torch.nn.Module:
    """transformers' model of the same weights, in float64: its own rounding in float32 reaches 6e-5 here."""
    from transformers import Qwen3_5MoeForConditionalGeneration

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = Qwen3_5MoeForConditionalGeneration.from_pretrained(tiny_directory, dtype=torch.float32).eval().double()
    model.set_experts_implementation("eager")  # its batched experts take no float64
    return model


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield
