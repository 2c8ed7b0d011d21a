"""Files in shared memory: their names, room for them, and who removes them. Knows no tables and no tensors.

Every process that uses an arena holds a shared `flock` on its state file. Who gets that lock exclusively knows that
nobody else is attached; only then are files removed."""

from __future__ import annotations

import fcntl
import os
import random
import re
import time
from pathlib import Path

from qwen35.errors import StateError
from qwen35.state.locks import process_start_time, try_flock

SHARED_MEMORY = Path("/dev/shm")
NAME_PREFIX = "qwen35"
_SUFFIX = r"-(state|cache|[a-z0-9]+\.lock)"
_ARENA_OF_SERVER = re.compile(rf"({NAME_PREFIX}-(\d+)-(\d+)){_SUFFIX}")


def arena_name_of_server(server_pid: int) -> str:
    """``qwen35-<pid>-<start time>``: unique among the servers of a machine, also when a pid is used again."""
    start_time = process_start_time(server_pid)
    if start_time is None:
        raise StateError(f"arena name: expected a running server process, got pid {server_pid}")
    return f"{NAME_PREFIX}-{server_pid}-{start_time}"


def check_arena_name(name: str) -> str:
    """The name itself when it can be the beginning of file names."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise StateError(f"arena_name: expected 1 to 100 of A-Z a-z 0-9 _ . -, starting with a letter or digit, "
                         f"got {name!r}")  # fmt: skip
    return name


def files_of(directory: Path, name: str) -> list[Path]:
    """All files of one arena, the state file last: while it is there the others are found again."""
    pattern = re.compile(re.escape(name) + _SUFFIX)
    found = [path for path in directory.iterdir() if pattern.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.name == f"{name}-state")


def reserve_file(path: Path, descriptor: int, num_bytes: int, what: str) -> None:
    """Give the empty file ``num_bytes`` zero bytes that are really there, or fail before the first is touched."""
    available = available_bytes(path.parent)
    if num_bytes > available:
        raise StateError(f"{what}: expected at most {available} bytes ({path.parent} and free memory), got {num_bytes};"
                         " lower kv_cache_bytes or num_slots, or give the machine more shared memory")  # fmt: skip
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.ftruncate(descriptor, 0)
        raise StateError(f"{what}: expected {num_bytes} bytes in {path.parent}, got: {error.strerror}") from error


def available_bytes(directory: Path) -> int:
    """What the file system has left, or the machine's available memory when that is less."""
    status = os.statvfs(directory)
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    memory = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    free = status.f_bavail * status.f_frsize
    return free if memory is None else min(free, int(memory[1]) * 1024)


def attach(path: Path, timeout_seconds: float = 30.0) -> tuple[int, bool]:
    """Open (create) the state file and lock it. Returns the descriptor, and whether the lock is exclusive.

    Exclusive: nobody else is attached, and whatever the file holds was left by the dead; call `share` when it is in
    order. Shared: somebody is attached, or has just made the file."""
    end = time.monotonic() + timeout_seconds
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        is_exclusive = try_flock(descriptor, fcntl.LOCK_EX)
        is_locked = is_exclusive or try_flock(descriptor, fcntl.LOCK_SH)
        if is_locked and is_same_file(path, descriptor):
            return descriptor, is_exclusive
        os.close(descriptor)  # its maker is still at work, or the last one out has just removed it
        if time.monotonic() >= end:
            raise StateError(f"{path}: expected its lock within {timeout_seconds} s, got it held by another process")
        time.sleep(random.uniform(0.002, 0.01))


def share(path: Path, descriptor: int) -> bool:
    """From exclusive to shared. The change isn't atomic: False when the file was removed in between."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return is_same_file(path, descriptor)


def detach(directory: Path, name: str, descriptor: int) -> bool:
    """Let go of the state file; the last one out removes the arena's files. True when that was us."""
    is_last = try_flock(descriptor, fcntl.LOCK_EX) and is_same_file(directory / f"{name}-state", descriptor)
    if is_last:
        for path in files_of(directory, name):
            path.unlink(missing_ok=True)
    os.close(descriptor)
    return is_last


def sweep(directory: Path = SHARED_MEMORY) -> list[str]:
    """Remove the arenas of servers that are dead and that no process is attached to; returns their names."""
    swept = []
    matches = (_ARENA_OF_SERVER.fullmatch(path.name) for path in directory.iterdir())
    for name, pid, start_time in sorted({match.group(1, 2, 3) for match in matches if match}):
        if process_start_time(int(pid)) == int(start_time):
            continue
        try:
            descriptor = os.open(directory / f"{name}-state", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except PermissionError:  # another user's
            continue
        if detach(directory, name, descriptor):
            swept.append(name)
    return swept


def is_same_file(path: Path, descriptor: int) -> bool:
    """The descriptor's file is still the one at ``path``."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
