"""Qwen3.5-MoE vision-language models behind Triton's Python backend.

`LLM` and what it takes are resolved on first use: importing `qwen35` or one of its light modules (the client, the
state manager's) must not import torch and the engine.
"""

import importlib
from typing import Any

_EXPORTS = {
    "LLM": "qwen35.llm",
    "SamplingParams": "qwen35.engine.request",
    "StructuredOutputs": "qwen35.engine.request",
}

__all__ = ["LLM", "SamplingParams", "StructuredOutputs"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'qwen35' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
