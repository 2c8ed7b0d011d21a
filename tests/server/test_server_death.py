"""SIGKILL of tritonserver itself: its model processes end without help, and the next start finds nothing of it."""

import signal

from build.processes import shared_memory_with_prefix, wait_until
from qwen35.client import Client

SETTINGS = {"kv_cache_bytes": str(16 << 20), "num_slots": "4"}


def test_model_processes_end_when_their_server_is_killed(server_factory):
    server = server_factory(settings=SETTINGS)
    Client(server.grpc_url).chat("hello", max_tokens=4)
    stubs = server.processes
    assert len(stubs) == 3
    server.kill()
    assert wait_until(lambda: not any(stub.is_alive for stub in stubs), 20)
    report = server.stop()
    assert report.exit_code == -signal.SIGKILL and not report.leftover_processes

    successor = server_factory(settings=SETTINGS)
    assert Client(successor.grpc_url).chat("hello", max_tokens=4).num_output_tokens > 0
    assert not shared_memory_with_prefix([f"qwen35-{server.pid}-"])
