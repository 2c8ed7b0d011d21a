"""Weights of any kind as dense matrices, with a cache bounded by bytes.

NVFP4 and FP8 weights stay packed; what is kept beside them is a convenience for models that fit, and never changes a
result: the same matrix is computed again where the cache is too small, or off.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator

import torch
from torch import Tensor

from qwen35.nvfp4 import FP8Tensor, LinearWeight, NVFP4Panels, NVFP4Tensor, dequantize

_BLOCK_BYTES = 32 << 20  # the largest dense piece of a weight that is made at once


class DenseWeights:
    """Dense [K, N] matrices of packed or narrower weights; the least recently used ones are dropped first."""

    def __init__(self, cache_bytes: int) -> None:
        self._cache_bytes = cache_bytes
        self._held_bytes = 0
        self._entries: OrderedDict[tuple, tuple[Tensor, Tensor]] = OrderedDict()
        self._lock = threading.Lock()  # the vision tower's worker threads share one instance

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def blocks(self, weight: LinearWeight, dtype: torch.dtype) -> Iterator[Tensor]:
        """The weight [N, K] transposed, [K, rows] at a time, in pieces that depend on its shape alone."""
        num_rows, width = weight.shape
        step = max(16, _BLOCK_BYTES // (width * dtype.itemsize) // 16 * 16)
        for start in range(0, num_rows, step):
            yield self.matrix(weight, dtype, rows=(start, min(start + step, num_rows)))

    def matrix(
        self, weight: LinearWeight, dtype: torch.dtype, expert: int | None = None, rows: tuple[int, int] | None = None
    ) -> Tensor:
        """[K, N] of a weight [N, K], of one expert of a stack [E, N, K], or of some of its rows."""
        if isinstance(weight, Tensor) and weight.dtype == dtype:
            return _part(weight, expert, rows).t()
        owner = _storage_of(weight)
        key = (id(owner), dtype, expert, rows)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                return entry[1]
        dense = dequantize(_part(weight, expert, rows), dtype).t().contiguous()
        self._keep(key, owner, dense)
        return dense

    def _keep(self, key: tuple, owner: Tensor, dense: Tensor) -> None:
        """Holds the owner too: its id must not be given to another tensor while it is a key."""
        num_bytes = dense.numel() * dense.element_size()
        if num_bytes > self._cache_bytes:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = (owner, dense)
            self._held_bytes += num_bytes
            while self._held_bytes > self._cache_bytes:
                _, (_, dropped) = self._entries.popitem(last=False)
                self._held_bytes -= dropped.numel() * dropped.element_size()


def _storage_of(weight: LinearWeight) -> Tensor:
    if isinstance(weight, (NVFP4Tensor, NVFP4Panels)):
        return weight.codes
    return weight.weight if isinstance(weight, FP8Tensor) else weight


def _part(weight: LinearWeight, expert: int | None, rows: tuple[int, int] | None) -> LinearWeight:
    if expert is not None:
        weight = weight[expert]
    if rows is None or rows == (0, weight.shape[0]):
        return weight
    start, stop = rows
    if isinstance(weight, NVFP4Panels):
        weight = weight.to_rows()
    if isinstance(weight, NVFP4Tensor):
        return NVFP4Tensor(weight.codes[start:stop], weight.scales[start:stop], weight.global_scale)
    if isinstance(weight, FP8Tensor):
        return FP8Tensor(weight.weight[start:stop], weight.weight_scale)
    return weight[start:stop]
