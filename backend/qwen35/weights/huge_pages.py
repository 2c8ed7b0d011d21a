"""Anonymous memory in huge pages, in which weights lie: kernels read it at twice the rate of ordinary pages."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64  # of every tensor: a cache line, and a vector of AVX-512
_HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python does not name it
_POPULATED_BYTES = 32 << 20  # at once


def aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that a tensor takes in a `HugePageMemory`."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class HugePageMemory:
    """One mapping of a known size, handed out from its beginning. It lives as long as one of its tensors does.

    Pages exist from their first write on. Where the system has no huge pages it gives ordinary ones.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise()
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        self._next = self._first = -self._address % _HUGE_PAGE_BYTES  # the first byte of a huge page
        self._end = self._next + num_bytes

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor, zeros. Raises MemoryError when it is more than what is left."""
        num_bytes, taken = math.prod(shape) * dtype.itemsize, aligned_bytes(shape, dtype)
        if self._next + taken > self._end:
            raise MemoryError(f"expected at most {self._end - self._next} bytes of weights to come, got {taken}")
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=self._next)
        self._next += taken
        return flat.view(dtype).view(shape)

    @contextmanager
    def populating(self) -> Iterator[None]:
        """A thread makes the pages while the block fills them: in a virtual machine a new page can cost more than the
        disk's reading it."""
        stop = threading.Event()
        thread = threading.Thread(target=self._populate, args=(stop,), name="weights_pages", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _populate(self, stop: threading.Event) -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise  # unlike mmap's own it lets other threads run
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for begin in range(self._first, self._end, _POPULATED_BYTES):
            num_bytes = min(_POPULATED_BYTES, self._end - begin)
            if stop.is_set() or madvise(self._address + begin, num_bytes, _MADV_POPULATE_WRITE) != 0:
                return  # an older kernel, or no memory: whoever writes then finds out

    def _advise(self) -> None:
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return  # a kernel without huge pages: slower, not wrong
