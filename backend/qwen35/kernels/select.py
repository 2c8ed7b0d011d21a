"""Chooses the implementation of the model's arithmetic, once, when a model is initialised."""

from __future__ import annotations

import torch

from qwen35.kernels.ops import Ops
from qwen35.kernels.reference import ReferenceOps
from qwen35.settings import Settings


def select_ops(settings: Settings, device: torch.device | str) -> Ops:
    """Operations for `settings.kernels` on `device`; the reference runs on every device of torch."""
    torch.device(device)  # an unknown device is an error here, not at the first layer
    return ReferenceOps(quantize_inputs=settings.activations == "nvfp4")
