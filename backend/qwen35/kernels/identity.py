"""Names an arithmetic: where two processes have one name, the same inputs give the same bits."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import torch

from qwen35.kernels.cpu.library import ISA_VARIABLE, find_library
from qwen35.kernels.select import DEFAULT_ACTIVATIONS
from qwen35.settings import Settings


def arithmetic_of(settings: Settings, device: torch.device | str) -> str:
    """All that the choice of kernels and their results depend on beside the checkpoint: settings, the build of the
    native library and the instruction path asked of it, the processor. Loads nothing."""
    device, library = torch.device(device), find_library()
    activations = DEFAULT_ACTIVATIONS if settings.activations == "auto" else settings.activations
    parts = [settings.kernels, activations, settings.dtype, settings.kv_cache_dtype]
    parts += [f"{settings.num_threads} threads", device.type, _processor(device)]
    parts += [library.parent.name if library.is_file() else "no library", os.environ.get(ISA_VARIABLE, "")]
    return ", ".join(parts)


def _processor(device: torch.device) -> str:
    """A CPU by its instruction sets, from which torch and the library choose; no GPU is woken for its name."""
    if device.type != "cpu":
        return f"CUDA {torch.version.cuda}"
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {hashlib.blake2b(features.encode(), digest_size=8).hexdigest()}"
