"""Whether a load fits, asked before the first byte is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen35.errors import CheckpointError


def held_bytes(weights: Any) -> int:
    """Bytes of all tensors in a record of weights (dataclasses and tuples), one that is used twice counted once."""
    tensors = {id(tensor): tensor for tensor in _tensors_in(weights)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _tensors_in(weights: Any) -> Iterator[Tensor]:
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, tuple):
        for item in weights:
            yield from _tensors_in(item)
    elif is_dataclass(weights):
        for part in fields(weights):
            yield from _tensors_in(getattr(weights, part.name))


def refuse_what_does_not_fit(checkpoint: str, num_bytes: int, device: torch.device) -> None:
    """Raises CheckpointError with both numbers when `device` has less memory than the weights take."""
    available = available_bytes(device)
    if available is not None and num_bytes > available:
        raise CheckpointError(
            f"{checkpoint}: expected {num_bytes} bytes of memory on {device} for the weights, got {available} free; "
            "free memory or use a smaller checkpoint"
        )


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device: for a CPU what the kernel and the control group allow. None when it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    limits = [limit for limit in (_kernel_limit(), _control_group_limit()) if limit is not None]
    return min(limits, default=None)


def _kernel_limit() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return values[0] if values else None


def _control_group_limit() -> int | None:
    """Limit minus use of this process's control group (version 2); page cache in it counts as use that can be freed."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get("file", 0))
