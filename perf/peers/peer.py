"""What a benchmark needs of an engine, and engines that live in a process of their own (`worker.py`).

A worker stays loaded between its turns but is stopped (SIGSTOP): threads that spin, as OpenMP's do for a while after
their work, can not disturb the peer whose turn it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

WORKER = Path(__file__).with_name("worker.py")
START_SECONDS, TURN_SECONDS, STOP_SECONDS = 420.0, 120.0, 10.0


class PeerError(RuntimeError):
    """A peer does not run; the message holds the end of its log."""


@dataclass(frozen=True)
class Work:
    """Prompts of so many tokens, all streams at once, then `num_decoded_tokens` more of each; what is timed is the
    decoding (`is_decode`) or the prompts with their first token."""

    name: str
    num_streams: int
    num_prompt_tokens: int
    is_decode: bool
    num_decoded_tokens: int = 64

    @property
    def num_timed_tokens(self) -> int:
        return self.num_streams * (self.num_decoded_tokens if self.is_decode else self.num_prompt_tokens)


WORKS = {
    work.name: work
    for work in (
        Work("decode, 1 stream", 1, 32, True),
        Work("decode, 8 streams", 8, 32, True),
        Work("prefill 512", 1, 512, False),
        Work("prefill 4096", 1, 4096, False),
    )
}


@dataclass(frozen=True)
class Timing:
    seconds: float
    cpu_seconds: float  # of all threads

    def __sub__(self, other: Timing) -> Timing:
        return Timing(self.seconds - other.seconds, self.cpu_seconds - other.cpu_seconds)


class Peer(Protocol):
    """One engine on one checkpoint."""

    name: str

    def start(self) -> None:
        """Load whatever stays loaded. Raises PeerError."""
        ...

    def warm_up(self, work: Work) -> None:
        """Before the first measure of each work. Raises PeerError."""
        ...

    def measure(self, work: Work) -> Timing:
        """Of `work.num_timed_tokens` tokens. Raises PeerError."""
        ...

    def close(self) -> None: ...


class WorkerPeer:
    """A `worker.py` under the Python `python`; its log is `log_path`."""

    def __init__(
        self,
        name: str,
        engine: str,
        checkpoint: Path,
        *,
        python: Path,
        log_path: Path,
        num_threads: int,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._command = [str(python), str(WORKER), "--engine", engine, "--checkpoint", str(checkpoint)]
        self._command += ["--threads", str(num_threads), *arguments]
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), **(environment or {})}
        self._log_path = log_path
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._read(START_SECONDS)
        self._pause()

    def measure(self, work: Work) -> Timing:
        """Decoding is the time of all tokens minus that of the first alone."""
        self._continue()
        first = self._run(work, 1)
        timing = self._run(work, work.num_decoded_tokens + 1) - first if work.is_decode else first
        self._pause()
        return timing

    def warm_up(self, work: Work) -> None:
        self._continue()
        self._run(work, 4)
        self._pause()

    def answer(self, prompts: Sequence[str], num_tokens: int) -> Timing:
        """Of whole answers to these texts, prompts included."""
        self._continue()
        timing = self._ask({"prompts": prompts, "num_tokens": num_tokens})
        self._pause()
        return timing

    def close(self) -> None:
        if self._process is None:
            return
        self._continue()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _run(self, work: Work, num_tokens: int) -> Timing:
        sizes = {"num_streams": work.num_streams, "num_prompt_tokens": work.num_prompt_tokens}
        return self._ask({**sizes, "num_tokens": num_tokens})

    def _ask(self, request: Mapping[str, Any]) -> Timing:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what has happened is told by the log
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer = self._read(TURN_SECONDS)
        return Timing(answer["seconds"], answer["cpu_seconds"])

    def _read(self, timeout_seconds: float) -> dict[str, float]:
        assert self._process is not None and self._process.stdout is not None
        is_there, _, _ = select.select([self._process.stdout], [], [], timeout_seconds)
        line = self._process.stdout.readline() if is_there else ""
        if not line:
            found = "the end of its process" if is_there else f"none in {timeout_seconds:.0f} s"
            raise PeerError(f"{self.name}: expected an answer, got {found}; its log ends:\n{self._tail()}")
        return json.loads(line)

    def _tail(self, num_lines: int = 5) -> str:
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-num_lines:])

    def _pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def _continue(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)


def in_rounds(works: Sequence[Work], peers: Sequence[Peer], num_rounds: int) -> list[tuple[int, Work, Peer]]:
    """The order of turns: in each round every peer once at each work, beginning with another peer each time."""
    turns = []
    for round_index in range(num_rounds):
        for work in works:
            shift = round_index % max(len(peers), 1)
            turns += [(round_index, work, peer) for peer in [*peers[shift:], *peers[:shift]]]
    return turns
