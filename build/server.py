"""One tritonserver: launched on a model repository, waited for until it answers, stopped with nothing left behind.

Of the models it knows only the request that tells whether they can answer (`Probe`), and the one that ends all others.
"""

import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from build.backends import CACHE, ROOT, assemble_backends, find_wheel, server_environment
from build.processes import (
    Process,
    mapped_shared_memory,
    processes_of_user,
    session_members,
    shared_memory_with_prefix,
    wait_until,
)

MODEL_REPOSITORY = ROOT / "model_repository"
# Streams run on until this timeout after SIGTERM, and a model that once had a request refused by the core never
# unloads: the timeout is then what a stop takes.
EXIT_TIMEOUT_S = 10
# What the server may need beyond its exit timeout before it is killed, and its stubs beyond the server's end.
_EXIT_GRACE_S, _STUB_GRACE_S, _SHARED_MEMORY_GRACE_S = 15.0, 10.0, 3.0
# Prefix of Triton's own regions, followed by the launcher's pid.
_REGION_PREFIX = "triton-qwen35-"
# How long a server that is up may go on answering the probe with errors.
_PROBE_ERROR_GRACE_S = 20.0
_LOG_TAIL_LINES = 40
_NUM_LOGS_KEPT = 20


class ServerError(RuntimeError):
    """The server did not start, or left something behind; the message holds the reason and the log's tail."""


@dataclass(frozen=True)
class Ports:
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    @classmethod
    def free(cls) -> "Ports":
        """Three ports that nobody listens on now."""
        sockets = [socket.socket() for _ in range(3)]
        try:
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            return cls(*(each.getsockname()[1] for each in sockets))
        finally:
            for each in sockets:
                each.close()


@dataclass(frozen=True)
class Probe:
    """A request to Triton's `generate` endpoint that a model able to serve answers with HTTP 200."""

    model: str = "qwen35"
    body: Mapping[str, Any] = field(default_factory=lambda: {"text_input": "Hello", "max_tokens": 1, "stream": False})


# Before a stop running requests get a while to end, then they are cancelled: one that ran on until the exit timeout
# would end without a word, and could keep the server from ending.
_STATS = Probe("state_manager", {"operation": "stats"})
_DRAIN = Probe("state_manager", {"operation": "drain"})
_DRAIN_GRACE_S, _DRAIN_TIMEOUT_S = 5.0, 2.0


@dataclass(frozen=True)
class StopReport:
    """How a stop went. `leftover_*` is what was still there after the grace periods."""

    exit_code: int
    seconds: float
    was_killed: bool
    leftover_processes: tuple[int, ...]
    leftover_shared_memory: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        return not (self.was_killed or self.leftover_processes or self.leftover_shared_memory)


class Server:
    """One tritonserver. As a context manager it is started on entry; leaving it unclean raises ServerError.

    `settings` reach the models as QWEN35_<UPPER NAME>; `checkpoint` is one of them. The log is `log_path`.
    """

    def __init__(
        self,
        model_repository: Path = MODEL_REPOSITORY,
        *,
        checkpoint: Path | None = None,
        ports: Ports | None = None,
        address: str = "127.0.0.1",
        settings: Mapping[str, str] | None = None,
        probe: Probe | None = None,
        start_timeout_s: float = 180.0,
        extra_arguments: Sequence[str] = (),
    ) -> None:
        self.model_repository = Path(model_repository).resolve()
        self.ports = ports or Ports.free()
        self.address = address
        self.settings = dict(settings or {})
        if checkpoint is not None:
            self.settings["checkpoint"] = str(Path(checkpoint).resolve())
        self.probe = probe or Probe()
        self.start_timeout_s = start_timeout_s
        self.extra_arguments = tuple(extra_arguments)
        self.region_prefix = f"{_REGION_PREFIX}{os.getpid()}-{secrets.token_hex(4)}-"
        self.log_path = CACHE / "logs" / f"tritonserver-{self.ports.http}.log"
        self._popen: subprocess.Popen[bytes] | None = None
        self._report: StopReport | None = None

    @property
    def http_url(self) -> str:
        return f"{self._client_host}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        return f"{self._client_host}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self._client_host}:{self.ports.metrics}/metrics"

    @property
    def pid(self) -> int:
        if self._popen is None:
            raise ServerError("tritonserver: expected a started server, got none; call start()")
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def processes(self) -> list[Process]:
        """The server's stubs, one per Python model instance, and what they started."""
        return session_members(self.pid)

    @property
    def shared_memory(self) -> set[Path]:
        """Files in /dev/shm that are this server's: Triton's regions, our arena, and whatever its stubs have mapped."""
        return shared_memory_with_prefix(self._owned_prefixes) | mapped_shared_memory(self.processes)

    @property
    def report(self) -> StopReport | None:
        """How the stop went; None while nobody has stopped the server."""
        return self._report

    def start(self) -> "Server":
        """Launch, and return when a real inference has been answered. Raises ServerError with the log's tail."""
        if self._popen is not None:
            raise ServerError("tritonserver: expected a new Server for each start, got one that was started before")
        self._refuse_busy_ports()
        sweep_regions_of_dead_servers()
        command, environment = self._command(), server_environment(os.environ, self.settings)
        working_directory = CACHE / "run"  # empty: a stub's sys.path begins with the directory it is started in
        for directory in (working_directory, self.log_path.parent):
            directory.mkdir(parents=True, exist_ok=True)
        _remove_old_logs(self.log_path.parent)
        with self.log_path.open("wb") as log:
            # A session of its own: Ctrl-C in the terminal must reach the launcher alone, which then stops in order.
            self._popen = subprocess.Popen(
                command,
                cwd=working_directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_answering()
        except BaseException:
            self.stop()
            raise
        return self

    def wait(self) -> int:
        """Block until the server ends by itself; its exit code."""
        assert self._popen is not None
        return self._popen.wait()

    def stop(self) -> StopReport:
        """SIGTERM, then wait for the processes to be gone and /dev/shm to be clean; kill what stays. Idempotent."""
        if self._report is None:
            assert self._popen is not None, "stop() before start()"
            self._report = self._stop(self._popen)
        return self._report

    def kill(self) -> None:
        """SIGKILL to the server process alone, for tests of what happens then."""
        os.kill(self.pid, signal.SIGKILL)

    def log_tail(self, num_lines: int = _LOG_TAIL_LINES) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        was_stopped = self._report is not None
        report = self.stop()
        if error is None and not was_stopped and not report.is_clean:
            raise ServerError(f"tritonserver: expected a clean stop, got {report}; log {self.log_path}")

    @property
    def _client_host(self) -> str:
        return "127.0.0.1" if self.address == "0.0.0.0" else self.address

    @property
    def _owned_prefixes(self) -> tuple[str, str]:
        return self.region_prefix, f"qwen35-{self.pid}-"

    def _command(self) -> list[str]:
        return [
            str(find_wheel().binary),
            f"--model-repository={self.model_repository}",
            f"--backend-directory={assemble_backends()}",
            f"--backend-config=python,shm-region-prefix-name={self.region_prefix}",
            "--disable-auto-complete-config",
            "--model-control-mode=explicit",
            "--load-model=*",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            f"--http-address={self.address}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={self.address}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={self.address}",
            f"--metrics-port={self.ports.metrics}",
            *self.extra_arguments,
        ]

    def _refuse_busy_ports(self) -> None:
        for name in ("http", "grpc", "metrics"):
            port = getattr(self.ports, name)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
                try:
                    probe.bind((self.address, port))
                except OSError as error:
                    raise ServerError(
                        f"{name} port: expected {self.address}:{port} to be free, got {error.strerror};"
                        f" choose another with {name.upper()}_PORT=…"
                    ) from error

    def _wait_until_answering(self) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        answer = "no answer"
        while time.monotonic() < deadline:
            if not self.is_running:
                raise self._start_error(f"got an exit with code {self.wait()}")
            status, text = self._ask(self.probe)
            if status == http.client.OK:
                return
            if status is not None and answer == "no answer":  # it is up: from now on errors are given a shorter time
                deadline = min(deadline, time.monotonic() + _PROBE_ERROR_GRACE_S)
            answer = text if status is None else f"HTTP {status} {text}"
            time.sleep(0.1)
        raise self._start_error(f"got none in time (last answer: {answer})")

    def _ask(self, probe: Probe, timeout_s: float = 30.0) -> tuple[int | None, str]:
        """Status and body of one probe; status None while the server is not up. An `error` body counts as 500."""
        connection = http.client.HTTPConnection(self._client_host, self.ports.http, timeout=timeout_s)
        try:
            body = json.dumps(dict(probe.body))
            connection.request("POST", f"/v2/models/{probe.model}/generate", body)
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            return None, str(error)
        finally:
            connection.close()
        if response.status == http.client.OK and "error" in json.loads(text):
            return http.client.INTERNAL_SERVER_ERROR, text
        return response.status, text

    def _start_error(self, reason: str) -> ServerError:
        return ServerError(
            f"tritonserver: expected an answer of model {self.probe.model!r} within {self.start_timeout_s:.0f} s,"
            f" {reason}; the end of {self.log_path}:\n{self.log_tail()}"
        )

    def _stop(self, popen: "subprocess.Popen[bytes]") -> StopReport:
        begin = time.monotonic()
        stubs, mapped = self.processes, mapped_shared_memory(self.processes)
        was_killed = False
        if popen.poll() is None:
            self._drain()
            popen.terminate()
        try:
            popen.wait(EXIT_TIMEOUT_S + _EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            was_killed = True
            popen.kill()
            popen.wait()
        wait_until(lambda: not any(stub.is_alive for stub in stubs), _STUB_GRACE_S)
        surviving = [stub for stub in stubs if stub.is_alive]
        for stub in surviving:
            stub.kill()
        wait_until(lambda: not any(stub.is_alive for stub in surviving), _SHARED_MEMORY_GRACE_S)
        leftover = self._leftover_shared_memory(mapped)
        return StopReport(
            exit_code=popen.returncode,
            seconds=time.monotonic() - begin,
            was_killed=was_killed,
            leftover_processes=tuple(stub.pid for stub in surviving),
            leftover_shared_memory=tuple(sorted(str(path) for path in leftover)),
        )

    def _drain(self) -> None:
        if not wait_until(lambda: not self._has_live_requests(), _DRAIN_GRACE_S):
            self._ask(_DRAIN, _DRAIN_TIMEOUT_S)

    def _has_live_requests(self) -> bool:
        """False also where nobody can tell: another repository has no such model."""
        status, text = self._ask(_STATS, _DRAIN_TIMEOUT_S)
        if status != http.client.OK:
            return False
        stats = json.loads(json.loads(text)["result"])
        return stats["num_open_leases"] + stats["num_claimed_leases"] > 0

    def _leftover_shared_memory(self, mapped: set[Path]) -> set[Path]:
        """What is still in /dev/shm. Files that bear this server's own names are removed: nobody alive uses them."""

        def present() -> set[Path]:
            return shared_memory_with_prefix(self._owned_prefixes) | {path for path in mapped if path.exists()}

        wait_until(lambda: not present(), _SHARED_MEMORY_GRACE_S)
        leftover = present()
        for path in shared_memory_with_prefix(self._owned_prefixes):
            path.unlink(missing_ok=True)
        return leftover


def sweep_regions_of_dead_servers() -> list[Path]:
    """Remove Triton's regions whose launcher is gone and that no process has mapped; returns them.

    Nobody else removes the regions of a server that was killed: its stubs may be killed, too, before they can.
    """
    regions = shared_memory_with_prefix([_REGION_PREFIX])
    launchers = {path: path.name.removeprefix(_REGION_PREFIX).split("-")[0] for path in regions}
    orphans = {path for path, launcher in launchers.items() if not Path("/proc", launcher).exists()}
    swept = sorted(orphans - mapped_shared_memory(processes_of_user())) if orphans else []
    for path in swept:
        path.unlink(missing_ok=True)
    return swept


def _remove_old_logs(directory: Path) -> None:
    """Keep the newest logs: servers of tests have new ports, and so new names, every time."""
    times = []
    for path in directory.glob("tritonserver-*.log"):
        with contextlib.suppress(FileNotFoundError):  # another launcher does the same
            times.append((path.stat().st_mtime, path))
    for _, path in sorted(times)[:-_NUM_LOGS_KEPT]:
        path.unlink(missing_ok=True)
