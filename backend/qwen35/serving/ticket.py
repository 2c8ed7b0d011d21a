"""One request inside the llm: what it asked for, its lease, and the way back to its client. A plain record."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Protocol

from qwen35.engine.request import Emission, Request, Usage
from qwen35.engine.session import Session
from qwen35.serving.resolved import ResolvedRequest
from qwen35.serving.responses import Response, ResponseBuilder
from qwen35.state.leases import Lease


class Reply(Protocol):
    """The way back to one client; used by the sender thread, but for ``is_cancelled``."""

    def send(self, response: Response) -> None:
        """Raises when the client can't be reached any more."""
        ...

    def is_cancelled(self) -> bool: ...


class Stage(enum.Enum):
    WAITING = "its lease is not claimed yet"
    RUNNING = "the engine has it"
    ENDING = "its last emission is on the way to the sender, or was sent"


@dataclass(eq=False)
class Ticket:
    """``stage`` is changed under the service's lock, what follows it by the sender; all else is fixed."""

    resolved: ResolvedRequest
    request: Request
    lease: Lease
    builder: ResponseBuilder
    reply: Reply
    session: Session | None = None  # restored: what the prompt begins with, or the text that goes on
    submitted: float = field(default_factory=time.monotonic)
    stage: Stage = Stage.WAITING
    num_finished_samples: int = 0
    usage: Usage = Usage(0, 0, 0, 0)  # as the last response said
    last_sent: float | None = None  # time.monotonic()

    @property
    def uid(self) -> int:
        return self.request.uid

    def is_ended_by(self, emission: Emission) -> bool:
        """Counts finished samples: True for the last one, or for an error of any."""
        self.num_finished_samples += emission.is_final
        return emission.error is not None or self.num_finished_samples == self.request.sampling.n


def monotonic_of(unix_ns: int) -> float:
    """time.monotonic() seconds of a moment given in nanoseconds since the epoch."""
    return time.monotonic() + (unix_ns - time.time_ns()) / 1e9
