"""The manager's threads: one frees what is overdue and notices dead holders, one has their model reloaded.

Knows no Triton: what a reload is comes as a function."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from qwen35.state.holder import HolderInfo
from qwen35.state.manager import Manager
from qwen35.state.stats import Stats

FIRST_DELAY_SECONDS = 1.0  # before the second reload in a row; the first comes at once
MAX_DELAY_SECONDS = 60.0
CALM_SECONDS = 120.0  # without a death: the next one is a first one again

Log = Callable[[str], None]


class Backoff:
    """How long to wait before the next reload: 0, 1, 2, 4, … 60 seconds; back to 0 after a calm time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = 0.0
        self._last: float | None = None

    def delay(self) -> float:
        now = self._clock()
        if self._last is not None and now - self._last > CALM_SECONDS:
            self._next = 0.0
        delay = self._next
        self._next = min(max(2 * delay, FIRST_DELAY_SECONDS), MAX_DELAY_SECONDS)
        self._last = now + delay
        return delay


class Watch:
    """``reload`` is called, from a thread of its own, after a holder died without finishing; while it fails, again."""

    def __init__(
        self,
        manager: Manager,
        *,
        period_seconds: float,
        reload: Callable[[], None],
        on_stats: Callable[[Stats], None],
        log: Log,
        backoff: Backoff | None = None,
    ) -> None:
        self._manager = manager
        self._period_seconds = period_seconds
        self._reload = reload
        self._on_stats = on_stats
        self._log = log
        self._backoff = backoff or Backoff()
        self._stopping = threading.Event()
        self._death = threading.Event()
        self._threads = [
            threading.Thread(target=self._reap_until_stopped, name="state-reaper", daemon=True),
            threading.Thread(target=self._reload_after_deaths, name="state-reloader", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """False when a thread (one that waits for a reload, say) has not ended in time."""
        self._stopping.set()
        self._death.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def _reap_until_stopped(self) -> None:
        while not self._stopping.is_set():
            try:
                died = self._manager.reap()
                stats = self._manager.stats()
                self._notice(died, successors={holder.instance for holder in stats.holders if not holder.is_done})
                self._on_stats(stats)
            except Exception as error:  # the lock is held by a stopped process, say: the next round may succeed
                self._log(f"reaper: {error}")
            self._stopping.wait(self._period_seconds)

    def _notice(self, died: list[HolderInfo], successors: set[str]) -> None:
        """A dead holder whose instance has been started anew by somebody else needs no reload."""
        for holder in died:
            has_successor = holder.instance in successors
            self._log(f"{describe(holder)} died; its blocks and slots are free again"
                      f"{'; its successor runs' if has_successor else ''}")  # fmt: skip
            if not has_successor:
                self._death.set()

    def _reload_after_deaths(self) -> None:
        while not self._stopping.is_set():
            self._death.wait()
            if self._stopping.wait(self._backoff.delay()):
                return
            self._death.clear()
            try:
                self._reload()
            except Exception as error:  # the server refuses for now, or does so always (no explicit model control)
                self._log(f"reload: {error}")
                self._death.set()


def describe(holder: HolderInfo) -> str:
    return f"{holder.instance} (pid {holder.pid}, last heartbeat {holder.heartbeat_age_seconds:.1f} s ago)"
