"""Threads that take work in order, with a bound on what may wait. Knows nothing of the work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from qwen35.errors import Unavailable


class WorkerPool:
    """``work`` must answer for its own errors: nobody looks at what it returns or raises."""

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._name = name
        self._max_live = num_threads + max_waiting
        self._num_live = 0
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    def submit(self, work: Callable[..., None], *args: Any) -> None:
        """Raises Unavailable when too much waits already."""
        with self._lock:
            if self._num_live >= self._max_live:
                raise Unavailable(f"{self._name} queue: expected fewer than {self._max_live} prompts; try again later")
            self._num_live += 1
        self._executor.submit(work, *args).add_done_callback(self._done)

    def close(self) -> None:
        """Finishes what was taken."""
        self._executor.shutdown(wait=True)

    def _done(self, _: Future[None]) -> None:
        with self._lock:
            self._num_live -= 1
