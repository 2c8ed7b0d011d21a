"""Weights as the native library sees them: small records of pointers, and NVFP4 weights laid out in panels.

Dense and FP8 weights are read as they lie on disk. NVFP4 weights are read in panels: whoever loads a model lays them
out once (`lay_out`, or `write_codes` and `write_scales` while a file streams in); a weight that comes in rows gets a
copy in panels, kept as long as the weight lives."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from qwen35.kernels.cpu.library import Weight, find_library, load_library
from qwen35.nvfp4 import FP8Tensor, LinearWeight, NVFP4Panels, NVFP4Tensor

_DENSE, _NVFP4, _FP8 = range(3)
_ARITHMETIC = {"dense": 0, "int8": 1, "nvfp4": 2}


def lay_out(weight: NVFP4Tensor) -> NVFP4Panels:
    """A weight [N, K] or [E, N, K] in panels, in memory of its own. Raises OSError without the native library."""
    panels = NVFP4Panels.empty(weight.shape, weight.global_scale, weight.input_scale)
    stacks = (weight.codes, weight.scales, panels.codes, panels.scales)
    parts = zip(*stacks, strict=True) if weight.codes.ndim == 3 else (stacks,)
    for codes, scales, panel_codes, panel_scales in parts:
        write_codes(codes, panel_codes)
        write_scales(scales, panel_scales)
    return panels


def write_codes(codes: Tensor, panels: Tensor) -> None:
    """Codes uint8 [N, K/2] of one matrix -> its place in `NVFP4Panels.codes`, [N/16, K/16, 128]."""
    _write("qwen35_lay_out_codes", codes, panels, codes.shape[1] * 2)


def write_scales(scales: Tensor, panels: Tensor) -> None:
    """Block scales float8_e4m3fn [N, K/16] of one matrix -> its place in `NVFP4Panels.scales`, [N/16, K/16, 16]."""
    _write("qwen35_lay_out_scales", scales, panels, scales.shape[1] * 16)


def _write(function: str, rows: Tensor, panels: Tensor, width: int) -> None:
    assert panels.is_contiguous() and panels.shape[:2] == (-(-len(rows) // 16), width // 16), panels.shape
    rows = rows.contiguous()
    getattr(load_library(find_library()), function)(rows.data_ptr(), panels.data_ptr(), len(rows), width)


class WeightRecords:
    """Records of weights, one for each living weight object, for one choice of `activations`."""

    def __init__(self, activations: str) -> None:
        self._activations = activations
        self._records: dict[int, tuple[weakref.ref, int | None, object]] = {}

    def address(self, weight: LinearWeight) -> int | None:
        """Address of the record; None for a weight that the library does not take."""
        known = self._records.get(id(weight))
        if known is not None and known[0]() is weight:
            return known[1]
        record, owner = self._record_of(weight)
        address = None if record is None else ctypes.addressof(record)
        key = id(weight)
        self._records[key] = (weakref.ref(weight, self._forget(key)), address, (record, owner))
        return address

    def _forget(self, key: int) -> Callable[[weakref.ref], None]:
        records = self._records

        def forget(reference: weakref.ref) -> None:
            if key in records and records[key][0] is reference:
                del records[key]

        return forget

    def _record_of(self, weight: LinearWeight) -> tuple[Weight | None, NVFP4Panels | None]:
        """The record, and what it points to where that is not the weight itself."""
        if isinstance(weight, FP8Tensor):
            rounds = self._activations == "nvfp4" and weight.input_scale is not None
            return None if rounds else _make(weight, _FP8, weight.weight, None, weight.weight_scale), None
        if isinstance(weight, Tensor):
            return _make(weight, _DENSE, weight, None, None) if weight.dtype == torch.bfloat16 else None, None
        if weight.device.type != "cpu":
            return None, None
        panels = lay_out(weight) if isinstance(weight, NVFP4Tensor) else weight
        input_scale = panels.input_scale if self._activations == "nvfp4" else None
        is_dense = self._activations == "nvfp4" and input_scale is None
        arithmetic = _ARITHMETIC["dense" if is_dense else self._activations]
        parts = (panels.codes, panels.scales, panels.global_scale, input_scale)
        return _make(weight, _NVFP4, *parts, arithmetic=arithmetic), panels


def _make(
    weight: LinearWeight,
    kind: int,
    values: Tensor,
    scales: Tensor | None,
    factor: Tensor | None,
    input_scale: Tensor | None = None,
    arithmetic: int = 0,
) -> Weight | None:
    parts = (values, scales, factor, input_scale)
    if not all(part is None or (part.is_contiguous() and part.device.type == "cpu") for part in parts):
        return None
    pointers = (None if part is None else part.data_ptr() for part in parts)
    strides = (1 if part is not None and part.ndim else 0 for part in (factor, input_scale))
    return Weight(kind, *pointers, *strides, *(1, *weight.shape)[-3:], arithmetic)
