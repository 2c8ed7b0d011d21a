"""Locks that the kernel (or, in one process, the interpreter) frees when the owner is gone, and process identity.

`flock` belongs to an open file: threads of a process that open the file twice exclude each other, and a killed process
loses it at once. `lockf` does neither."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Protocol


class Lock(Protocol):
    """An exclusive lock with one owner."""

    def try_acquire(self) -> bool: ...

    def release(self) -> None: ...


class FileLock:
    """Exclusive `flock` on a file of its own, created when missing and never removed here."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """True when the lock is now ours; False when another open file has it. Not to be called while it's held."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not try_flock(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class ThreadLock:
    """The same for a state that lives in one process; ``shared`` is the one lock behind all objects of a name."""

    def __init__(self, shared: threading.Lock) -> None:
        self._shared = shared
        self._is_held = False

    def try_acquire(self) -> bool:
        self._is_held = self._shared.acquire(blocking=False)
        return self._is_held

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._shared.release()


def try_flock(descriptor: int, operation: int) -> bool:
    """`flock` without waiting: False when it is taken. A shared lock held by this descriptor is lost on False."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def acquire_within(lock: Lock, timeout_seconds: float, poll_seconds: float = 0.001) -> bool:
    """Poll ``lock`` until it is ours or the time is over."""
    end = time.monotonic() + timeout_seconds
    while not lock.try_acquire():
        if time.monotonic() >= end:
            return False
        time.sleep(poll_seconds)
    return True


def process_start_time(pid: int) -> int | None:
    """Clock ticks since boot at which the process began (field 22 of /proc/PID/stat); None: no such pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
