"""How far a load is: a bar in a terminal, a line in the log every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from tqdm import tqdm

_LOGGER = logging.getLogger(__name__)
_QUIET_SECONDS = 2.0  # a load that is done by then shows nothing
_LOG_SECONDS = 5.0


class LoadProgress:
    """Called with (bytes read, bytes to read); a context manager that clears the bar."""

    def __init__(self, checkpoint: str, is_terminal: bool | None = None) -> None:
        self._checkpoint = checkpoint
        has_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._is_terminal = has_terminal if is_terminal is None else is_terminal
        self._bar: tqdm | None = None
        self._started = self._logged = time.monotonic()

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, num_read: int, num_bytes: int) -> None:
        if self._is_terminal:
            self._draw(num_read, num_bytes)
            return
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            rate = num_read / (now - self._started) / 1e9
            share = 100 * num_read // max(num_bytes, 1)
            sizes = f"{num_read / 1e9:.2f} of {num_bytes / 1e9:.2f} GB"
            _LOGGER.info("%s: loading, %d %% (%s, %.2f GB/s)", self._checkpoint, share, sizes, rate)

    def _draw(self, num_read: int, num_bytes: int) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=num_bytes, desc="loading", unit="B", unit_scale=True, delay=_QUIET_SECONDS, leave=False
            )
        self._bar.update(num_read - self._bar.n)
