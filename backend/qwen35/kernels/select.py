"""Chooses the implementation of the model's arithmetic, once, when a model is initialised."""

from __future__ import annotations

import warnings

import torch

from qwen35.errors import ConfigError
from qwen35.kernels.cpu import CpuOps
from qwen35.kernels.cpu.library import find_library
from qwen35.kernels.ops import Ops
from qwen35.kernels.reference import ReferenceOps
from qwen35.settings import Settings

DEFAULT_ACTIVATIONS = "int11"  # of native kernels, for `auto`: chosen by the measurement in perf/ARITHMETIC.md


def select_ops(settings: Settings, device: torch.device | str) -> Ops:
    """Operations for `settings.kernels` on `device`; the reference runs on every device of torch.

    auto: the native ones for bfloat16 activations on a CPU, the reference otherwise and, with a warning, where they are
    not built. cpu: the native ones, else ConfigError. Sets the number of torch's threads in this process: the bits of
    the reference's matrix products depend on it.
    """
    device = torch.device(device)  # an unknown device is an error here, not at the first layer
    torch.set_num_threads(settings.num_threads)
    activations = settings.activations
    fits = device.type == "cpu" and settings.dtype in ("auto", "bfloat16")
    if settings.kernels == "cpu" and device.type != "cpu":
        raise ConfigError(f"kernels: expected auto or reference on device {device}, got cpu")
    if settings.kernels == "reference" or (settings.kernels == "auto" and not fits):
        return ReferenceOps(activations="dense" if activations == "auto" else activations)
    activations = DEFAULT_ACTIVATIONS if activations == "auto" else activations
    try:
        return CpuOps(settings.num_threads, activations)
    except OSError as error:
        remedy = "run python -m build.native"
        if settings.kernels == "cpu":
            raise ConfigError(f"kernels: expected the native library, got {error}; {remedy}") from error
        warnings.warn(f"no native kernels at {find_library()} ({error}), torch serves instead; {remedy}", stacklevel=2)
        return ReferenceOps(activations="dense" if settings.activations == "auto" else activations)
