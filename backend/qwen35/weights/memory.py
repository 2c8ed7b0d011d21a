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
    """Raises CheckpointError with both numbers when `device` has less memory than a load takes."""
    available = available_bytes(device)
    if available is not None and num_bytes > available:
        raise CheckpointError(
            f"{checkpoint}: expected {num_bytes} bytes of memory on {device} for the weights and to read them, "
            f"got {available} free; free memory or use a smaller checkpoint"
        )


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device: for a CPU what kernel and control groups allow. None when it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    kernel = _kernel_limit()
    limits = ([] if kernel is None else [kernel]) + list(control_group_limits())
    return min(limits, default=None)


def _kernel_limit() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return values[0] if values else None


def control_group_limits(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """What each control group that this process is in, and each above it, has left; page cache can be freed.

    Version 2 has one tree, version 1 one for memory; inside a container the own group may be mounted as the root.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers == "":
            root, names = mount, _VERSION_2
        elif "memory" in controllers.split(","):
            root, names = mount / "memory", _VERSION_1
        else:
            continue
        parts = Path(path).parts[1:]
        for depth in range(len(parts), -1, -1):
            left = _left(root.joinpath(*parts[:depth]), *names)
            if left is not None:
                yield left


# Files of a limit and of the use, and the entry of memory.stat that counts page cache.
_VERSION_2 = ("memory.max", "memory.current", "file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2^63 instead of a word


def _left(group: Path, limit_file: str, use_file: str, cache_entry: str) -> int | None:
    try:
        limit = (group / limit_file).read_text().strip()
        used = int((group / use_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        if limit == "max" or int(limit) >= _NO_LIMIT:
            return None
        return int(limit) - used + int(stat.get(cache_entry, 0))
    except (OSError, ValueError):
        return None
