"""Errors that callers see. Each has a code (the gRPC status names that Triton uses) and a message that says
what was expected, what came, and where it helps the remedy. No other module invents error codes."""

from __future__ import annotations


class Qwen35Error(Exception):
    """Base of every error raised for a caller. ``str(error)`` is ``CODE: message`` as it goes on the wire."""

    code = "INTERNAL"

    def __init__(self, message: str) -> None:
        message = message.encode("utf-8", "backslashreplace").decode("utf-8")  # it must travel as UTF-8
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class InvalidArgument(Qwen35Error):
    """A field of a request is missing, unknown, of the wrong type or out of range."""

    code = "INVALID_ARG"

    @classmethod
    def field(cls, name: str, expected: str, got: object) -> InvalidArgument:
        """The standard form: ``name: expected …, got …`` (the value is shortened to 80 characters)."""
        shown = repr(got)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return cls(f"{name}: expected {expected}, got {shown}")


class Unsupported(Qwen35Error):
    """A valid request for something that this server does not do."""

    code = "UNSUPPORTED"


class Unavailable(Qwen35Error):
    """The server can't take the request now: queue full, no free block, engine down, lease expired."""

    code = "UNAVAILABLE"


class Cancelled(Qwen35Error):
    """The request was cancelled by its client or by a cancel operation."""

    code = "CANCELLED"

    def __init__(self, message: str = "Request was cancelled") -> None:
        super().__init__(message)


class DeadlineExceeded(Qwen35Error):
    """The request's deadline passed before it was finished."""

    code = "DEADLINE_EXCEEDED"


class InternalError(Qwen35Error):
    """A fault of ours. The message names what failed, never a traceback."""

    code = "INTERNAL"


class CheckpointError(Qwen35Error):
    """A checkpoint can't be loaded: missing, unexpected or corrupt tensors, a config that does not fit."""

    code = "INVALID_ARG"


class ConfigError(Qwen35Error):
    """A setting or a model config is missing, unknown or out of range."""

    code = "INVALID_ARG"


class StateError(Qwen35Error):
    """The shared state can't be created or attached: geometry or fingerprint differ, not enough memory."""

    code = "UNAVAILABLE"
