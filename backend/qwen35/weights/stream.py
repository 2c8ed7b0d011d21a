"""Streams pieces of checkpoint files to where they belong: in the order of the disk, in large reads, ahead of use.

Threads read while this one stores. Reads go past the page cache (O_DIRECT) where the file system lets them, and leave
it at once where it does not: a load takes no more memory than what it fills and a few buffers.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qwen35.errors import CheckpointError

READ_BYTES = 16 << 20  # of one read, and the largest piece
NUM_BUFFERS = 4
NUM_THREADS = 2
_PAGE_BYTES = 4096  # offset, length and address of a direct read are multiples of it
_BUFFER_BYTES = READ_BYTES + 2 * _PAGE_BYTES  # of one: the pages around a run as well
BUFFER_BYTES = NUM_BUFFERS * _BUFFER_BYTES
Progress = Callable[[int, int], None]  # (bytes read, bytes to read)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of a file, at most READ_BYTES, and what takes them: a uint8 tensor that is valid for the call
    only and starts at any address."""

    file: Path
    offset: int
    num_bytes: int
    store: Callable[[Tensor], None]


def stream(pieces: Sequence[Piece], progress: Progress | None = None) -> None:
    """Reads and stores all pieces. Raises CheckpointError for a file that is shorter than its pieces."""
    runs = list(_runs(sorted(pieces, key=lambda piece: (piece.file, piece.offset))))
    num_bytes, num_read = sum(piece.num_bytes for piece in pieces), 0
    with ExitStack() as stack:
        files = {path: stack.enter_context(_File(path)) for path in dict.fromkeys(run[0].file for run in runs)}
        readahead = stack.enter_context(_Readahead(files))
        for run, data in readahead.read(runs):
            for piece in run:
                begin = piece.offset - run[0].offset
                piece.store(data[begin : begin + piece.num_bytes])
            num_read += sum(piece.num_bytes for piece in run)
            if progress is not None:
                progress(num_read, num_bytes)


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Neighbours in one file, up to READ_BYTES together."""
    run: list[Piece] = []
    for piece in pieces:
        assert 0 < piece.num_bytes <= READ_BYTES, piece
        if run:
            end = run[-1].offset + run[-1].num_bytes
            fits = piece.offset + piece.num_bytes - run[0].offset <= READ_BYTES
            if piece.file != run[0].file or piece.offset != end or not fits:
                yield run
                run = []
        run.append(piece)
    if run:
        yield run


class _Readahead:
    """Threads that read runs in order into a ring of buffers; a context manager that ends them."""

    def __init__(self, files: dict[Path, _File]) -> None:
        self._files = files
        self._memory = [mmap.mmap(-1, _BUFFER_BYTES) for _ in range(NUM_BUFFERS)]
        self._buffers = [torch.frombuffer(memory, dtype=torch.uint8) for memory in self._memory]
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights")

    def __enter__(self) -> _Readahead:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def read(self, runs: Sequence[list[Piece]]) -> Iterator[tuple[list[Piece], Tensor]]:
        """Each run with its bytes, valid until the next one is asked for."""
        waiting: deque[tuple[list[Piece], int, Future[int]]] = deque()
        for number, run in enumerate(runs):
            slot = number % NUM_BUFFERS
            waiting.append((run, slot, self._threads.submit(self._fill, run, slot)))
            if len(waiting) == NUM_BUFFERS:
                yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    def _next(self, waiting: deque[tuple[list[Piece], int, Future[int]]]) -> tuple[list[Piece], Tensor]:
        run, slot, first = waiting.popleft()
        return run, self._buffers[slot][first.result() :]

    def _fill(self, run: list[Piece], slot: int) -> int:
        """Where in the buffer the run begins."""
        return self._files[run[0].file].read(run[0].offset, run[-1].offset + run[-1].num_bytes, self._memory[slot])


class _File:
    """A file that is read once and leaves nothing in the page cache; a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = _open(path)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def read(self, begin: int, end: int, buffer: mmap.mmap) -> int:
        """Bytes [begin, end) and the rest of their pages; returns the place of the first in `buffer`."""
        first = begin // _PAGE_BYTES * _PAGE_BYTES
        stop = -(-end // _PAGE_BYTES) * _PAGE_BYTES
        view, at = memoryview(buffer), first
        while at < end:
            count = os.preadv(self._descriptor, [view[at - first : stop - first]], at)
            if count == 0:
                size = os.fstat(self._descriptor).st_size
                raise CheckpointError(
                    f"{self._path}: expected {end} bytes or more, got {size}: the file was cut short while it was read"
                )
            at += count
        os.posix_fadvise(self._descriptor, first, stop - first, os.POSIX_FADV_DONTNEED)
        return begin - first


def _open(path: Path) -> int:
    """For direct reads, or through the page cache: tmpfs and some file systems of containers refuse the first."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return os.open(path, os.O_RDONLY)
        raise CheckpointError(f"{path}: expected a readable file, got {error}") from error
