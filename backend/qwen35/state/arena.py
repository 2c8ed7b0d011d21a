"""The shared arena of one server: ownership tables and cache bytes in named files of shared memory.

Whoever comes first makes it, the others attach, in any order; the last one out removes it. What is found without an
owner is taken over when it fits (a warm start after a crash) and made anew when it does not."""

from __future__ import annotations

import json
import mmap
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35.errors import StateError
from qwen35.state import segments
from qwen35.state.geometry import Geometry
from qwen35.state.locks import FileLock, Lock, acquire_within
from qwen35.state.tables import HEADER_BYTES, LAYOUT_VERSION, MAGIC, TableLayout, Tables, header_over

if TYPE_CHECKING:
    from qwen35.views import CacheView

CACHE_LOCK_TIMEOUT_SECONDS = 300.0  # another instance may be zeroing many gigabytes


class Arena:
    """Attached shared memory. ``tables`` is valid until `close`."""

    def __init__(self, directory: Path, name: str, geometry: Geometry, descriptor: int, buffer: mmap.mmap) -> None:
        self.name = name
        self.geometry = geometry
        self.tables = Tables.over(buffer, geometry)
        self._directory = directory
        self._descriptor: int | None = descriptor

    @classmethod
    def open(
        cls, name: str, geometry: Geometry, fingerprint: str, *, directory: Path = segments.SHARED_MEMORY
    ) -> Arena:
        """Create or attach. ``fingerprint`` says whose contents the cache may hold; `StateError` when an arena in use
        has another geometry or fingerprint, with both values."""
        path = directory / f"{segments.check_arena_name(name)}-state"
        while True:
            descriptor, is_exclusive = segments.attach(path)
            try:
                problem = _mismatch(descriptor, geometry, fingerprint)
                if problem and not is_exclusive:
                    if _is_finished(descriptor):
                        raise StateError(f"arena {name}: {problem}; give all models the same settings and checkpoint")
                elif problem:
                    _remove_leftovers(directory, name)
                    _create(path, descriptor, geometry, fingerprint)
                    problem = ""
                if not problem and (not is_exclusive or segments.share(path, descriptor)):
                    return cls(directory, name, geometry, descriptor, _map(descriptor, geometry))
            except BaseException:
                segments.detach(directory, name, descriptor)
                raise
            os.close(descriptor)  # its maker died over it, or it was removed at this moment
            time.sleep(random.uniform(0.002, 0.01))

    def new_lock(self, name: str) -> Lock:
        """A lock among the processes that are attached; ``name``: lower-case letters and digits."""
        if self._descriptor is None:  # its file would stay behind
            raise StateError(f"arena {self.name}: expected it attached, got it closed")
        return FileLock(self._directory / f"{self.name}-{name}.lock")

    def cache_view(self, device: str = "cpu", kv_scales: Sequence[tuple[float, float]] = ()) -> CacheView:
        """Tensors of the cache. On the CPU they alias the arena (made by the first who asks, zero at first); on another
        device this process allocates them, and only the ownership lives in the arena."""
        import torch  # heavy, and the manager needs no tensor

        from qwen35.state.cache import view_of_bytes

        num_bytes = self.geometry.cache_bytes
        if torch.device(device).type != "cpu":
            flat = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            return view_of_bytes(flat, self.geometry, kv_scales)
        path = self._directory / f"{self.name}-cache"
        self._ensure_cache_file(path)
        storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=num_bytes)
        return view_of_bytes(torch.tensor([], dtype=torch.uint8).set_(storage), self.geometry, kv_scales)

    def close(self) -> bool:
        """Detach; True when this was the last process and the arena is gone. Idempotent (then False)."""
        descriptor, self._descriptor = self._descriptor, None
        return descriptor is not None and segments.detach(self._directory, self.name, descriptor)

    def _ensure_cache_file(self, path: Path) -> None:
        lock = self.new_lock("cache")
        if not acquire_within(lock, CACHE_LOCK_TIMEOUT_SECONDS, poll_seconds=0.01):
            raise StateError(f"{path}: expected it made within {CACHE_LOCK_TIMEOUT_SECONDS} s by the process at it")
        try:
            if self.tables.header["is_cache_ready"]:
                return
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                what = f"arena {self.name}, KV blocks and slots"
                segments.reserve_file(path, descriptor, self.geometry.cache_bytes, what)
            finally:
                os.close(descriptor)
            self.tables.header["is_cache_ready"] = 1
        finally:
            lock.release()


def _create(path: Path, descriptor: int, geometry: Geometry, fingerprint: str) -> None:
    """Fresh tables; the magic number comes last."""
    num_bytes = TableLayout.of(geometry).num_bytes
    os.ftruncate(descriptor, 0)
    segments.reserve_file(path, descriptor, num_bytes, f"arena {path.name}, tables")
    header = header_over(_map(descriptor, geometry))
    header["layout_version"] = LAYOUT_VERSION
    header["generation"] = time.time_ns()
    header["fingerprint"] = fingerprint.encode("utf-8")
    header["geometry"] = json.dumps(geometry.as_dict(), sort_keys=True).encode("utf-8")
    header["magic"] = MAGIC


def _remove_leftovers(directory: Path, name: str) -> None:
    """What the dead left of an arena that does not fit, but for the state file, which is locked and made anew."""
    for path in segments.files_of(directory, name)[:-1]:
        path.unlink(missing_ok=True)


def _map(descriptor: int, geometry: Geometry) -> mmap.mmap:
    return mmap.mmap(descriptor, TableLayout.of(geometry).num_bytes)


def _is_finished(descriptor: int) -> bool:
    page = os.pread(descriptor, HEADER_BYTES, 0)
    return len(page) == HEADER_BYTES and int(header_over(page)["magic"]) == MAGIC


def _mismatch(descriptor: int, geometry: Geometry, fingerprint: str) -> str:
    """Why the file can't serve this process; empty when it can."""
    if not _is_finished(descriptor):
        return "expected a finished arena, got one that was never completed"
    header = header_over(os.pread(descriptor, HEADER_BYTES, 0))
    if int(header["layout_version"]) != LAYOUT_VERSION:
        return f"layout: expected version {LAYOUT_VERSION}, got {int(header['layout_version'])}"
    difference = geometry.difference(json.loads(header["geometry"].item()))
    if difference:
        return f"geometry: {difference}"
    stored = header["fingerprint"].item().decode("utf-8")
    return "" if stored == fingerprint else f"fingerprint: expected {fingerprint}, got {stored}"
