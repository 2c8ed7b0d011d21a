"""Batches and cache views as the native library takes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen35.kernels.cpu.library import Attention, GatedDelta
from qwen35.views import BatchView, GatedDeltaView, KVView

_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Sequences:
    """A batch as the library takes it."""

    records: NDArray[np.int64]  # [S, 7]: `Sequence` of common.h

    @classmethod
    def of(cls, batch: BatchView) -> Sequences:
        """Raises ValueError for a token before the first KV position that it may see."""
        bounds = batch.cu_tokens.numpy()
        records = np.empty((len(bounds) - 1, 7), np.int64)
        places = (batch.kv_start, batch.first_kv, batch.slots, batch.num_pending, batch.defer)
        for column, values in enumerate((bounds[:-1], bounds[1:], *(place.numpy() for place in places))):
            records[:, column] = values
        counts = records[:, 1] - records[:, 0]
        for _, _, kv_start, first_kv, *_ in records[(counts > 0) & (records[:, 2] < records[:, 3])]:
            raise ValueError(f"kv_start: expected at least first_kv ({first_kv}), got {kv_start}")
        return cls(records)

    def check_room(self, num_inputs: int) -> None:
        """Raises ValueError when a sequence would leave more inputs pending than a slot has room for."""
        counts = (self.records[:, 1] - self.records[:, 0]) * self.records[:, 6]
        for count, record in zip(counts, self.records, strict=True):
            if count > num_inputs:
                raise ValueError(
                    f"deferred inputs of slot {record[4]}: expected at most {num_inputs} (largest draft length + 1), "
                    f"got {count}"
                )


def takes_state(view: GatedDeltaView) -> bool:
    """Whether the library can work on a gated delta state."""
    dtypes = (view.recurrent.dtype, view.conv.dtype, view.pending_inputs.dtype, view.pending_beta.dtype)
    _, _, key_width, value_width = view.recurrent.shape
    fits = key_width % 16 == 0 and value_width % 16 == 0
    return (
        fits
        and dtypes == (torch.float32, _BF16, _BF16, torch.float32)
        and all(part.is_contiguous() for part in vars(view).values())
    )


def takes_cache(view: KVView) -> bool:
    """Whether the library can attend to paged keys and values."""
    keys, values = view.keys, view.values
    is_whole = keys.is_contiguous() and values.is_contiguous()
    return keys.dtype in (_BF16, _FP8) and keys.shape[-1] % 32 == 0 and is_whole


def attention_record(view: KVView, num_heads: int, scale: float) -> Attention:
    """All that does not change from pass to pass."""
    keys, is_fp8 = view.keys, view.keys.dtype == _FP8
    _, block_tokens, num_kv_heads, width = keys.shape
    scales = (view.key_scale, view.value_scale) if is_fp8 else (1.0, 1.0)
    record = Attention(keys=keys.data_ptr(), values=view.values.data_ptr(), block_tokens=block_tokens)
    record.num_heads, record.num_kv_heads, record.head_dim, record.is_fp8 = num_heads, num_kv_heads, width, is_fp8
    record.key_scale, record.value_scale, record.scale = *scales, scale
    return record


def gated_delta_record(view: GatedDeltaView, taps: Tensor) -> GatedDelta:
    """All that does not change from pass to pass."""
    _, num_heads, key_width, value_width = view.recurrent.shape
    record = GatedDelta(taps=taps.data_ptr(), num_heads=num_heads, key_width=key_width, value_width=value_width)
    for name, part in vars(view).items():
        setattr(record, name, part.data_ptr())
    record.conv_width, record.channels = taps.shape
    record.max_pending = view.pending_inputs.shape[1]
    return record
