"""Native kernels for CPUs: C++ behind ctypes, built by ``python -m build.native``."""

from __future__ import annotations

from qwen35.kernels.cpu.ops import CpuOps

__all__ = ["CpuOps"]
