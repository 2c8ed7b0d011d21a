"""Saved sessions by name: files of one directory, bounded in bytes. Off while no directory is set."""

from __future__ import annotations

from pathlib import Path

from qwen35.engine.session import Session
from qwen35.engine.session_file import load_session, save_session
from qwen35.errors import ConfigError, InvalidArgument, StateError, Unsupported

_RECORD_BYTES = 1 << 16  # of a file, beside its tensors and 16 bytes a token


class SessionStore:
    """``load`` by any thread, ``save`` by one. Names are those of files, checked where a request is read
    (``fields.to_session_name``)."""

    def __init__(self, directory: str, max_bytes: int, fingerprint: str) -> None:
        """``max_bytes``: of all sessions. Makes the directory; raises ConfigError when it can't be made."""
        self._directory = Path(directory) if directory else None
        self._max_bytes = max_bytes
        self._fingerprint = fingerprint
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"session_directory: expected a directory that can be made, got {error}") from error

    def check(self, field: str) -> None:
        """Raises Unsupported, naming the request's ``field``, where sessions are off."""
        self._of(field)

    def load(self, name: str) -> Session:
        """Raises InvalidArgument for a name that nothing was saved under, StateError for a file that does not fit."""
        path = self._of("restore_session") / name
        if not path.is_file():
            raise InvalidArgument.field("restore_session", "the name of a saved session", name)
        return load_session(path, self._fingerprint)

    def save(self, name: str, session: Session) -> None:
        """Replaces what was saved under the name. Raises StateError when there is no room for it."""
        path = self._of("save_session") / name
        others = [other for other in path.parent.iterdir() if other != path and other.is_file()]
        num_bytes = session.num_bytes + 16 * len(session.token_ids) + _RECORD_BYTES
        num_all_bytes = num_bytes + sum(other.stat().st_size for other in others)
        if num_all_bytes > self._max_bytes:
            raise StateError(
                f"save_session: expected at most {self._max_bytes} bytes of sessions in all, got {num_all_bytes} with "
                f"{num_bytes} of this one; remove old ones or raise session_bytes"
            )
        try:
            save_session(session, path, self._fingerprint)
        except OSError as error:
            raise StateError(f"save_session: expected the file to be written, got {error.strerror}") from error

    def _of(self, field: str) -> Path:
        if self._directory is None:
            raise Unsupported(f"{field}: expected it to be left out (the setting session_directory is empty)")
        return self._directory
