"""`kernels.scan` in native code."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from qwen35.kernels.cpu.library import RowRecord
from qwen35.kernels.scan import DEPTHS_PER_NAT, NUM_DEPTHS

_MAX_CONTENDERS = 1024  # sums that were the best so far, or nearly, while the row was read: about log V


class NativeRowScan:
    """Any thread may use it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def open(self, values: NDArray[np.float32 | np.float64], peak: float, temperature: float) -> NativeRow:
        return NativeRow(self._library, np.ascontiguousarray(values), peak, temperature)


class NativeRow:
    """See `kernels.scan.ScannedRow`."""

    def __init__(
        self, library: ctypes.CDLL, values: NDArray[np.float32 | np.float64], peak: float, temperature: float
    ) -> None:
        assert values.dtype in (np.float32, np.float64), values.dtype
        self._library = library
        self._values = values
        self._peak, self._rate = float(peak), DEPTHS_PER_NAT / temperature
        is_double = values.dtype == np.float64
        sizes = (len(values), is_double, NUM_DEPTHS)
        self._record = RowRecord(values.ctypes.data, *sizes, self._peak, self._rate, 1.0 / temperature)
        self._address = ctypes.addressof(self._record)

    def weights(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        counts, masses = np.empty(NUM_DEPTHS, np.int64), np.empty(NUM_DEPTHS)
        self._library.qwen35_scan_depths(self._address, counts.ctypes.data, masses.ctypes.data)
        return counts, masses

    def depths(self, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        return (self._peak - self._values[token_ids].astype(np.float64)) * self._rate

    def between(self, low: float, high: float) -> NDArray[np.int64]:
        token_ids = np.empty(len(self._values), np.int64)
        found = self._library.qwen35_scan_between(self._address, low, high, token_ids.ctypes.data)
        return token_ids[:found].copy()

    def contenders(self, limit: float, key: np.uint64) -> NDArray[np.int64] | None:
        token_ids, sums = np.empty(_MAX_CONTENDERS, np.int64), np.empty(_MAX_CONTENDERS)
        buffers = (token_ids.ctypes.data, sums.ctypes.data)
        found = self._library.qwen35_scan_contenders(self._address, limit, int(key), _MAX_CONTENDERS, *buffers)
        return None if found < 0 else token_ids[:found]
