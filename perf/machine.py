"""What a run ran on, as far as numbers depend on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from build.backends import ROOT

_PACKAGES = ("torch", "transformers", "nvidia-pytriton", "tritonclient")


def describe() -> dict[str, Any]:
    """Processor, cores, memory, versions, commit, and how busy the machine was already."""
    cpu = _first_line("/proc/cpuinfo", "model name")
    flags = _first_line("/proc/cpuinfo", "flags").split()
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    return {
        "processor": cpu,
        "instructions": [flag for flag in wanted if flag in flags],
        "num_cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def _first_line(path: str, key: str) -> str:
    lines = (line.partition(":") for line in Path(path).read_text(encoding="utf-8").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "unknown")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    """Of the tree that was measured; `+` when it had changes."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
