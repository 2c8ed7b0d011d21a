"""Chooses the implementation of the model's arithmetic, once, when a model is initialised."""

from __future__ import annotations

import torch

from qwen35.kernels.ops import Ops
from qwen35.kernels.reference import ReferenceOps
from qwen35.settings import Settings


def select_ops(settings: Settings, device: torch.device | str) -> Ops:
    """Operations for `settings.kernels` on `device`; the reference runs on every device of torch. Sets the number of
    torch's threads in this process: the bits of a matrix product depend on it."""
    torch.device(device)  # an unknown device is an error here, not at the first layer
    torch.set_num_threads(settings.num_threads)
    return ReferenceOps(quantize_inputs=settings.activations == "nvfp4")
