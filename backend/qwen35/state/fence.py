"""Ends a holder that is stopped (SIGSTOP) while a request waits for it.

Triton's side waits a second for a stub to take a request, then gives the request up and frees its memory. A stub that
goes on after that takes it all the same: it reads and writes freed shared memory, and the whole server dies of it (seen
with 2.51). A stopped holder without a request on its way is left alone, however long: what it holds stays its own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from qwen35.state.holder import Clock
from qwen35.state.locks import process_start_time
from qwen35.state.tables import HOLDER_ACTIVE, LEASE_OPEN, Tables

PERIOD_SECONDS = 0.2
PATIENCE_SECONDS = 0.5  # of an unclaimed lease; with the period well below Triton's second


class Fence:
    """Reads the tables without a lock: a wrong look is put right by the next one, and only stopped processes die."""

    def __init__(
        self,
        tables: Tables,
        log: Callable[[str], object],
        *,
        clock: Clock = time.monotonic,
        kill: Callable[[int, int], None] = os.kill,
    ) -> None:
        self._tables = tables
        self._log = log
        self._clock = clock
        self._kill = kill
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="state-fence", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def look(self) -> list[int]:
        """Pids that were ended by this look."""
        leases, holders = self._tables.leases, self._tables.holders
        is_open = leases["state"] == LEASE_OPEN
        if not np.any(is_open & (leases["opened"] <= self._clock() - PATIENCE_SECONDS)):
            return []
        active = holders[holders["state"] == HOLDER_ACTIVE]
        stopped = [int(row["pid"]) for row in active if is_stopped(int(row["pid"]), int(row["start_time"]))]
        for pid in stopped:
            self._kill(pid, signal.SIGKILL)
            self._log(f"llm (pid {pid}) was stopped while a request waited for it; it has been ended to be loaded anew")
        return stopped

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_SECONDS):
            self.look()


def is_stopped(pid: int, start_time: int) -> bool:
    """Whether the process of that pid and start time is stopped by a signal; False when it is gone."""
    if process_start_time(pid) != start_time:
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] == "T"
