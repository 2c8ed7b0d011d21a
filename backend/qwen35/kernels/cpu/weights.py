"""Weights as the native library sees them: small records of pointers, and NVFP4 weights laid out in panels.

Dense and FP8 weights are read as they lie on disk. NVFP4 weights are read in panels: whoever loads a model lays them
out on the way (`PanelLayout`); a weight that comes in rows gets a copy in panels, kept as long as the weight lives."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from qwen35.kernels.cpu.library import Weight, find_library, load_library
from qwen35.kernels.weight_layout import Allocate, PlainLayout
from qwen35.nvfp4 import BLOCK_WIDTH, PANEL_ROWS, FP8Tensor, LinearWeight, NVFP4Panels, NVFP4Tensor

_DENSE, _NVFP4, _FP8 = range(3)
_ARITHMETIC = {"dense": 0, "int8": 1, "nvfp4": 2, "int11": 3}


class PanelLayout(PlainLayout):
    """NVFP4 weights in panels (`NVFP4Panels`), all others as on disk. Raises OSError without the native library."""

    def target(self, weight: LinearWeight, allocate: Allocate) -> LinearWeight:
        if not isinstance(weight, NVFP4Tensor):
            return super().target(weight, allocate)
        *lead, num_rows, width = weight.shape
        blocks = (*lead, -(-num_rows // PANEL_ROWS), width // BLOCK_WIDTH)
        codes = allocate((*blocks, PANEL_ROWS * BLOCK_WIDTH // 2), weight.codes.dtype)
        scales = allocate((*blocks, PANEL_ROWS), weight.scales.dtype)
        return NVFP4Panels(codes, scales, num_rows, weight.global_scale, weight.input_scale)

    def store(self, target: LinearWeight, part: str, expert: int | None, first_row: int, rows: Tensor) -> None:
        if not isinstance(target, NVFP4Panels):
            return super().store(target, part, expert, first_row, rows)
        matrix = getattr(target, part) if expert is None else getattr(target, part)[expert]
        rows, first_panel = rows.contiguous(), first_row // PANEL_ROWS
        panels = matrix[first_panel : first_panel - (-len(rows) // PANEL_ROWS)]
        assert first_row % PANEL_ROWS == 0 and panels.is_contiguous(), (first_row, panels.stride())
        width = panels.shape[1] * BLOCK_WIDTH
        getattr(load_library(find_library()), f"qwen35_lay_out_{part}")(
            rows.data_ptr(), panels.data_ptr(), len(rows), width
        )


def lay_out(weight: NVFP4Tensor) -> NVFP4Panels:
    """A weight [N, K] or [E, N, K] in panels, in memory of its own."""
    layout = PanelLayout()
    panels = layout.target(weight, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    for part in ("codes", "scales"):
        rows = getattr(weight, part)
        if rows.ndim == 2:
            layout.store(panels, part, None, 0, rows)
        else:
            for expert, matrix in enumerate(rows):
                layout.store(panels, part, expert, 0, matrix)
    return panels


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
