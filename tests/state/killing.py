"""Ends a call at any line of the state's code, as a killed process ends: what it has written stays, its locks go."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import qwen35.state

_DIRECTORY = Path(qwen35.state.__path__[0])
_FILES = {str(_DIRECTORY / f"{name}.py") for name in ("entries", "extents", "leases", "manager", "pins")}
_SKIPPED = ("_tables_locked", "<listcomp>", "<genexpr>")  # its lock; and what is one line with its caller's


class Killed(BaseException):
    """Not an error that anybody handles."""


def killed_at(line: int, call: Callable[[], object]) -> bool:
    """Run ``call`` up to the line that is the ``line``-th to be run; False when it has ended before."""
    count = 0

    def watch(frame: FrameType, event: str, _: Any) -> Callable | None:
        nonlocal count
        code = frame.f_code
        if code.co_filename not in _FILES or code.co_name in _SKIPPED:
            return None
        if event == "line":
            count += 1
            if count == line:
                raise Killed
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        call()
    except Killed:
        return True
    finally:
        sys.settrace(before)
    return False
