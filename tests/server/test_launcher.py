"""The launcher against the real tritonserver, with a model repository that needs none of our models."""

import contextlib
import http.client
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from build.backends import CACHE, ROOT
from build.processes import shared_memory_with_prefix, wait_until
from build.server import Ports, Server, ServerError, sweep_regions_of_dead_servers
from tests.server.echo_repository import write_echo_repository


@pytest.fixture
def echo_repository(tmp_path: Path) -> Path:
    return write_echo_repository(tmp_path / "repository")


def ask(server: Server, prompt: str, timeout_s: float = 10.0) -> dict:
    connection = http.client.HTTPConnection(server.http_url, timeout=timeout_s)
    try:
        connection.request("POST", "/v2/models/qwen35/generate", json.dumps({"text_input": prompt}))
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_start_answer_stop_leaves_nothing(echo_repository: Path):
    with Server(echo_repository) as server:
        assert ask(server, "grüße")["text_output"] == "grüße"
        stubs, regions = server.processes, server.shared_memory
        assert len(stubs) == 1
        assert regions and all(path.name.startswith(server.region_prefix) for path in regions)
        report = server.stop()
    assert report.is_clean and report.exit_code == 0
    assert not any(stub.is_alive for stub in stubs) and not any(path.exists() for path in regions)
    assert list((CACHE / "run").iterdir()) == []  # nothing there that could shadow a Python package


def test_two_servers_side_by_side(echo_repository: Path):
    with Server(echo_repository) as first, Server(echo_repository) as second:
        assert first.shared_memory.isdisjoint(second.shared_memory)
        second.stop()
        assert ask(first, "still here")["text_output"] == "still here"


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_busy_port_is_named(echo_repository: Path, name: str):
    ports = Ports.free()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", getattr(ports, name)))
        holder.listen()
        message = rf"{name} port: expected .*:{getattr(ports, name)} .*{name.upper()}_PORT="
        with pytest.raises(ServerError, match=message):
            Server(echo_repository, ports=ports).start()


def test_model_that_fails_to_load_is_an_error_with_the_log(echo_repository: Path):
    server = Server(echo_repository, settings={"fail": "bad luck"})
    with pytest.raises(ServerError, match=r"(?s)exit with code 1.*told to fail: bad luck"):
        server.start()
    assert server.report is not None and server.report.is_clean


def test_server_that_never_answers_is_stopped(echo_repository: Path):
    server = Server(echo_repository, start_timeout_s=0.01)
    with pytest.raises(ServerError, match="got none in time"):
        server.start()
    assert not server.is_running and not server.processes  # stubs that outlived it have been killed
    assert not shared_memory_with_prefix([server.region_prefix])


def test_shared_memory_left_by_a_model_is_reported_and_removed(echo_repository: Path):
    with Server(echo_repository) as server:
        ask(server, "leak")
        report = server.stop()
    assert report.leftover_shared_memory == (f"/dev/shm/qwen35-{server.pid}-leak",)
    assert not report.is_clean and not Path(report.leftover_shared_memory[0]).exists()


def test_leaving_the_context_unclean_raises(echo_repository: Path):
    with pytest.raises(ServerError, match="expected a clean stop"), Server(echo_repository) as server:
        ask(server, "leak")


def test_dead_stub_does_not_hold_up_the_stop(echo_repository: Path):
    with Server(echo_repository) as server:
        (stub,) = server.processes
        with contextlib.suppress(TimeoutError):  # the client of a stub that died may hear nothing
            ask(server, "crash", timeout_s=2)
        assert wait_until(lambda: not stub.is_alive, 5)
        report = server.stop()
    assert not report.leftover_processes and not report.was_killed
    assert not shared_memory_with_prefix([server.region_prefix])


def test_stop_after_a_kill_ends_the_stubs_and_removes_their_regions(echo_repository: Path):
    with Server(echo_repository) as server:
        (stub,) = server.processes
        server.kill()
        report = server.stop()
    assert report.exit_code == -signal.SIGKILL
    assert not stub.is_alive and not shared_memory_with_prefix([server.region_prefix])


def test_regions_are_swept_only_when_launcher_and_users_are_gone():
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = (f"triton-qwen35-{gone.pid}-orphan", f"triton-qwen35-{gone.pid}-mapped", f"triton-qwen35-{os.getpid()}-own")
    orphan, mapped, own = (Path("/dev/shm", name) for name in names)
    try:
        for path in (orphan, mapped, own):
            path.write_bytes(b"region")
        with mapped.open("r+b") as handle, mmap.mmap(handle.fileno(), 0):
            assert sweep_regions_of_dead_servers() == [orphan]
        assert mapped.exists() and own.exists()
        assert sweep_regions_of_dead_servers() == [mapped]
    finally:
        for path in (orphan, mapped, own):
            path.unlink(missing_ok=True)


def test_stop_lets_a_running_request_finish(echo_repository: Path):
    answers: list[dict] = []
    with Server(echo_repository) as server:
        client = threading.Thread(target=lambda: answers.append(ask(server, "sleep")))
        client.start()
        time.sleep(0.3)
        assert server.stop().is_clean
        client.join()
    assert answers[0]["text_output"] == "sleep"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_command_line_stops_cleanly_on(number: signal.Signals, echo_repository: Path, tmp_path: Path):
    checkpoint = tmp_path / "checkpoint"  # quantised already, as far as the launcher looks
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"quantization_config": {}}', encoding="utf-8")
    (checkpoint / "model.safetensors").write_bytes(b"")
    ports = Ports.free()
    # Whatever the tests run under, a background job or nohup: the launcher sees the default actions.
    command = [
        "env",
        "--default-signal=INT,HUP",
        sys.executable,
        "-m",
        "build.serve",
        "--model-repository",
        str(echo_repository),
    ]
    command += ["--checkpoint", str(checkpoint), "--http-port", str(ports.http)]
    command += ["--grpc-port", str(ports.grpc), "--metrics-port", str(ports.metrics)]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    lines = [launcher.stdout.readline() for _ in range(5)]
    assert f"127.0.0.1:{ports.http}/v2/models/qwen35/generate_stream" in lines[0] and "Ctrl-C" in lines[4], lines
    regions = shared_memory_with_prefix([f"triton-qwen35-{launcher.pid}-"])
    assert regions
    os.kill(launcher.pid, number)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert not any(path.exists() for path in regions)
