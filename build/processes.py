"""What a server's processes are and what they hold, read from /proc: session, liveness, shared memory."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_STATE, _SESSION, _USER, _SYSTEM, _START = (
    0,
    3,
    11,
    12,
    19,
)  # fields of /proc/<pid>/stat after the command name, see proc(5)


@dataclass(frozen=True)
class Process:
    """A process by pid and start time (clock ticks since boot): a pid alone may be reused."""

    pid: int
    start_ticks: int

    @property
    def is_alive(self) -> bool:
        """False for a zombie too: it holds nothing any more."""
        fields = _stat(self.pid)
        return fields is not None and int(fields[_START]) == self.start_ticks and fields[_STATE] not in "ZX"

    def kill(self) -> None:
        if self.is_alive:
            os.kill(self.pid, signal.SIGKILL)


def session_members(leader_pid: int) -> list[Process]:
    """Processes of the session that `leader_pid` began, without the leader. They outlive it, also when it is killed."""
    found = []
    for entry in Path("/proc").iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdigit() else None
        if fields is not None and int(fields[_SESSION]) == leader_pid != int(entry.name) and fields[_STATE] not in "ZX":
            found.append(Process(int(entry.name), int(fields[_START])))
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process so far; 0 when it is gone."""
    fields = _stat(pid)
    return 0.0 if fields is None else (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")


def mapped_shared_memory(processes: Iterable[Process]) -> set[Path]:
    """Files below /dev/shm that the processes have mapped and that still have a name."""
    found: set[Path] = set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines()
        except OSError:  # it ended meanwhile, or belongs to somebody else
            continue
        names = (line[line.index("/") :] for line in lines if f" {SHARED_MEMORY}/" in line)
        found.update(Path(name) for name in names if not name.endswith(" (deleted)"))
    return found


def processes_of_user() -> list[Process]:
    """Every live process whose memory map this user may read."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    stats = ((pid, _stat(pid)) for pid in pids if os.access(f"/proc/{pid}/maps", os.R_OK))
    return [Process(pid, int(fields[_START])) for pid, fields in stats if fields is not None]


def shared_memory_with_prefix(prefixes: Iterable[str]) -> set[Path]:
    return {path for prefix in prefixes for path in SHARED_MEMORY.glob(f"{prefix}*")}


def wait_until(condition: Callable[[], bool], timeout_s: float, interval_s: float = 0.05) -> bool:
    """Poll until `condition` holds; False when it did not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
