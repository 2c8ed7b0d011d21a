"""Devices and types by the names that settings give them."""

from __future__ import annotations

import re

import torch

from qwen35.errors import ConfigError


def select_device(name: str) -> torch.device:
    """``auto``: the first GPU when there is one, else the CPU. Raises ConfigError for other kinds of devices."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    return torch.device(name)


def select_dtype(name: str) -> torch.dtype | None:
    """Of the activations; None keeps the checkpoint's (``auto``)."""
    return None if name == "auto" else getattr(torch, name)
