"""Devices and types by the names that settings give them."""

from __future__ import annotations

import torch

from qwen35.errors import ConfigError


def select_device(name: str) -> torch.device:
    """``auto``: the first GPU when there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}") from error


def select_dtype(name: str) -> torch.dtype | None:
    """Of the activations; None keeps the checkpoint's (``auto``)."""
    return None if name == "auto" else getattr(torch, name)
