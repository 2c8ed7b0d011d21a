"""Reference implementation in torch: oracle of every other one, and the fallback on any device."""

from __future__ import annotations

from qwen35.kernels.reference.ops import ReferenceOps

__all__ = ["ReferenceOps"]
