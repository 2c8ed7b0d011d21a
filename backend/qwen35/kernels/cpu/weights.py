"""Weights as the native library sees them: pointers into the checkpoint's own layout, no second copy.

NVFP4 codes are read as they lie on disk (two neighbours a byte, scales beside): nothing is laid out anew, and what is
kept for each weight object is one small record."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from qwen35.kernels.cpu.library import Weight
from qwen35.nvfp4 import FP8Tensor, LinearWeight, NVFP4Tensor

_DENSE, _NVFP4, _FP8 = range(3)


class WeightRecords:
    """Records of weights, one for each living weight object."""

    def __init__(self) -> None:
        self._records: dict[int, tuple[weakref.ref, int | None, object]] = {}

    def address(self, weight: LinearWeight) -> int | None:
        """Address of the record; None for a weight that the library does not take."""
        known = self._records.get(id(weight))
        if known is not None and known[0]() is weight:
            return known[1]
        record = _record_of(weight)
        address = None if record is None else ctypes.addressof(record)
        key = id(weight)
        self._records[key] = (weakref.ref(weight, self._forget(key)), address, record)
        return address

    def _forget(self, key: int) -> Callable[[weakref.ref], None]:
        records = self._records

        def forget(reference: weakref.ref) -> None:
            if key in records and records[key][0] is reference:
                del records[key]

        return forget


def _record_of(weight: LinearWeight) -> Weight | None:
    if isinstance(weight, NVFP4Tensor):
        return _make(weight, _NVFP4, weight.codes, weight.scales, weight.global_scale)
    if isinstance(weight, FP8Tensor):
        return _make(weight, _FP8, weight.weight, None, weight.weight_scale)
    return _make(weight, _DENSE, weight, None, None) if weight.dtype == torch.bfloat16 else None


def _make(
    weight: LinearWeight, kind: int, values: Tensor, scales: Tensor | None, factor: Tensor | None
) -> Weight | None:
    parts = [part for part in (values, scales, factor) if part is not None]
    if not all(part.is_contiguous() and part.device.type == "cpu" for part in parts):
        return None
    num_experts, num_rows, width = (1, *weight.shape)[-3:]
    stride = 1 if factor is not None and factor.ndim else 0
    pointers = (None if part is None else part.data_ptr() for part in (values, scales, factor))
    return Weight(kind, *pointers, stride, num_experts, num_rows, width)
