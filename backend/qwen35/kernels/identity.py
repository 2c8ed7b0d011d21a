"""Names an arithmetic: two processes with one name compute the same bits from the same inputs."""

from __future__ import annotations

import os

import torch

from qwen35.kernels.cpu.library import ISA_VARIABLE, find_library
from qwen35.kernels.ops import Ops
from qwen35.kernels.reference import ReferenceOps
from qwen35.settings import Settings


def arithmetic_of(ops: Ops, settings: Settings, device: torch.device | str) -> str:
    """Implementation and its build, instruction path, activations, types, threads, kind of device: what the contents of
    a cache depend on beside the checkpoint."""
    parts = [type(ops).__name__, settings.activations, settings.dtype, settings.kv_cache_dtype]
    parts += [f"{settings.num_threads} threads", torch.device(device).type]
    if not isinstance(ops, ReferenceOps):
        parts += [find_library().parent.name, os.environ.get(ISA_VARIABLE, "")]
    return " ".join(parts)
