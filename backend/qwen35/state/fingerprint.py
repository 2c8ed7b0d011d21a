"""What the contents of a cache depend on beside its geometry: the checkpoint and the code that computes with it."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_CONTENTS = ("config.json", "hf_quant_config.json", "model.safetensors.index.json")  # small: read whole


def fingerprint(checkpoint: Path, arithmetic: str) -> str:
    """32 hex digits over the checkpoint's small JSON files, the names, sizes and times of its weight files, the
    versions of this package and torch, and ``arithmetic``: whatever else the bits of a pass depend on. Reads no
    weights."""
    digest = hashlib.blake2b(f"{arithmetic}\n".encode(), digest_size=16)
    for name in _CONTENTS:
        path = checkpoint / name
        digest.update(path.read_bytes() if path.is_file() else b"-")
    for path in sorted(checkpoint.glob("*.safetensors")):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    for package in ("qwen35", "torch"):
        digest.update(f"{package} {_version(package)}\n".encode())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
