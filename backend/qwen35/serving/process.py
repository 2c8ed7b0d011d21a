"""What every stub process needs at initialize: encodings, settings, names that a server's models share. No Triton."""

from __future__ import annotations

import json
import locale
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path

from qwen35.errors import StateError
from qwen35.settings import Settings
from qwen35.state.segments import arena_name_of_server

_WATCH_SECONDS = 0.1
_EXIT_SECONDS = 5.0  # the stub ends by itself within two, and then removes Triton's own shared memory too


class ServerProcess:
    """The tritonserver that this stub belongs to, its parent.

    A message to a dead server (a response, a metric) never returns and keeps the stub from ending by itself, with all
    the shared memory that it has. So whatever sends looks here first.
    """

    def __init__(self) -> None:
        self._pid = os.getppid()

    @property
    def is_alive(self) -> bool:
        return os.getppid() == self._pid

    def when_gone(self, cleanup: Callable[[], object]) -> None:
        """Run ``cleanup`` soon after the server has died, and see to it that this process ends."""
        threading.Thread(target=self._watch, args=(cleanup,), name="server-watch", daemon=True).start()

    def _watch(self, cleanup: Callable[[], object]) -> None:
        while self.is_alive:
            time.sleep(_WATCH_SECONDS)
        try:
            cleanup()
        finally:
            time.sleep(_EXIT_SECONDS)
            os._exit(1)


def prepare_process() -> None:
    """A stub starts with ASCII as its default encoding whatever LANG says; logs and file names need UTF-8."""
    try:
        locale.setlocale(locale.LC_ALL, "C.UTF-8")
    except locale.Error:  # not every C library has it; the environment's own is the next best
        locale.setlocale(locale.LC_ALL, "")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    # The server's log is where a stub's stderr goes; without this only warnings of the package would reach it.
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("qwen35").setLevel(logging.INFO)


def settings_of(args: Mapping[str, str], environment: Mapping[str, str] | None = None) -> Settings:
    """Settings of one model: defaults, then the parameters of its config.pbtxt, then the environment.

    ``args`` is what Triton gives to ``initialize``. A relative checkpoint is resolved against the model repository's
    root, and an empty arena name becomes the one that all models of this server share.
    """
    parameters = json.loads(args["model_config"]).get("parameters", {})
    texts = {name: value.get("string_value", "") for name, value in parameters.items()}
    settings = Settings.resolve(texts, environment)
    root = Path(args["model_repository"]).parent  # Triton gives the model's own folder
    return replace(
        settings,
        checkpoint=str((root / settings.checkpoint).resolve()),
        arena_name=settings.arena_name or arena_name_of_server(_server_pid()),
    )


def _server_pid() -> int:
    """The parent, which has Triton's libraries mapped. A stub whose server died meanwhile has another one and must not
    name an arena after it: nobody would ever sweep that."""
    pid = os.getppid()
    try:
        is_server = "libtriton" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except PermissionError:  # a server of another user, which this process can't tell from anything else
        is_server = True
    if not is_server:
        raise StateError(f"server: expected tritonserver as the parent of this process, got pid {pid}; is it dead?")
    return pid
