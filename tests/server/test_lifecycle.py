"""Queues, reloads and deaths, on a server of their own: four slots, one loader thread, quick heartbeats."""

import contextlib
import http.client
import os
import signal
import time
from pathlib import Path

import pytest

from build.server import Server
from tests.server.clients import (
    Stream,
    encode,
    generate,
    idle_stats,
    operate,
    picture,
    send_llm,
    send_vllm,
    stats,
    vllm,
)

SHORT = {"max_tokens": 3, "ignore_eos": True, "temperature": 0}
LONG = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
UNCLAIMED_SECONDS = 1.5
SETTINGS = {
    "num_slots": "4",
    "kv_cache_bytes": str(16 << 20),
    "heartbeat_seconds": "0.3",
    "unclaimed_lease_seconds": str(UNCLAIMED_SECONDS),
}


@pytest.fixture(scope="module")
def small_server(nvfp4_checkpoint):
    """Left by the tests in the order of this file; its stop must be clean after all of it."""
    with Server(
        checkpoint=nvfp4_checkpoint, settings=SETTINGS, extra_arguments=["--model-load-thread-count=1"]
    ) as running:
        yield running


def works(server):
    answer = vllm(server, "What is this?", images=[picture()], sampling=SHORT, stream=True)
    assert answer.error is None
    return answer.text


def llm_pid(server):
    return next(holder["pid"] for holder in stats(server)["holders"] if not holder["is_done"])


def control(server, model, action, timeout=60.0):
    connection = http.client.HTTPConnection(server.http_url, timeout=timeout)
    try:
        connection.request("POST", f"/v2/repository/models/{model}/{action}", "{}", {"Connection": "close"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()
    finally:
        connection.close()


def wait_until_it_answers(server, timeout):
    deadline = time.monotonic() + timeout
    while True:
        try:
            status, body = generate(server, text_input="Hello", max_tokens=2, timeout=5.0)
            if status == 200 and "error" not in body:
                return
        except OSError as error:
            body = error
        assert time.monotonic() < deadline, body
        time.sleep(0.2)


def test_a_hundred_requests_on_four_slots(small_server):
    with Stream(small_server) as connection:
        for index in range(100):
            send_vllm(connection, "Hello", SHORT, request_id=str(index), stream=True)
        num_finals, errors, most_claimed = 0, [], 0
        while num_finals < 100:
            _, _, is_final, error = connection.next()
            num_finals += is_final
            errors += [error] if error else []
            if num_finals % 20 == 10:
                most_claimed = max(most_claimed, stats(small_server)["num_claimed_leases"])
    assert errors == []
    assert most_claimed > 4, "they wait for slots, not for each other's end"
    idle_stats(small_server)


@pytest.mark.parametrize("model", ["vision_encoder", "state_manager", "llm"])
def test_reload(small_server, model):
    text = works(small_server)
    control(small_server, model, "unload")
    control(small_server, model, "load")
    wait_until_it_answers(small_server, 60.0)
    assert works(small_server) == text
    idle_stats(small_server)


def test_reload_of_both_doors(small_server):
    for model in ("qwen35", "ensemble"):
        control(small_server, model, "unload")
        control(small_server, model, "load")
    works(small_server)


def test_a_stopped_llm_goes_on_past_the_expiry_of_leases(small_server):
    """SIGSTOP for longer than a lease lives, SIGCONT: what ran goes on as if nothing had been. A lease that has expired
    is refused."""
    whole = vllm(small_server, "Hello", sampling=LONG, stream=True).text
    encoded = encode(small_server, "Hello")
    lease = operate(small_server, "open", {"request_id": "", "deadline_unix_ns": time.time_ns() + 10**11})
    time.sleep(UNCLAIMED_SECONDS + 0.5)
    pid = llm_pid(small_server)
    with Stream(small_server) as running, Stream(small_server) as late:
        send_vllm(running, "Hello", LONG, stream=True)
        first = running.next()[1]["text_output"][0].decode()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(UNCLAIMED_SECONDS + 1.0)
        during = stats(small_server)
        os.kill(pid, signal.SIGCONT)
        rest = running.collect()
        send_llm(late, encoded, lease)
        refused = late.collect()
    assert (during["num_claimed_leases"], during["num_dead_holders"]) == (1, 0)
    assert during["blocks"]["held"] > 0, "what a stopped process holds stays its own"
    assert rest.error is None and first + rest.text == whole
    assert refused.error.startswith("UNAVAILABLE: lease: expected a live one"), refused
    assert llm_pid(small_server) == pid
    idle_stats(small_server)


def test_a_request_to_a_stopped_llm_has_it_replaced(small_server):
    """Triton gives such a request up, and a stub that took it afterwards would end the whole server."""
    text = works(small_server)
    pid = llm_pid(small_server)
    with Stream(small_server) as waiting:
        os.kill(pid, signal.SIGSTOP)
        send_vllm(waiting, "Hello", SHORT, stream=True)
        assert "not healthy" in waiting.collect().error
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    wait_until_it_answers(small_server, 60.0)
    assert works(small_server) == text
    assert llm_pid(small_server) != pid
    idle_stats(small_server)


def test_a_killed_llm_is_loaded_again(small_server):
    text = works(small_server)
    pid = llm_pid(small_server)
    connection = Stream(small_server)
    send_vllm(connection, "Hello", {"max_tokens": 400, "ignore_eos": True}, stream=True)
    assert connection.next()[3] is None
    # Not amid an exchange of messages: a stub that dies while it holds the lock of one takes the whole server along.
    time.sleep(0.03)
    os.kill(pid, signal.SIGKILL)
    wait_until_it_answers(small_server, 60.0)
    connection.close()  # nobody tells this client anything
    assert works(small_server) == text
    assert idle_stats(small_server)["num_dead_holders"] >= 1
    assert llm_pid(small_server) != pid


def test_the_stop_leaves_nothing(small_server):
    """A model whose stub was killed never unloads in this version of the server: the stop takes its whole timeout, and
    the region of the killed stub is left to the launcher."""
    report = small_server.stop()
    assert not report.leftover_processes, report
    leftover = [Path(name) for name in report.leftover_shared_memory]
    assert not any(path.exists() or path.name.startswith("qwen35-") for path in leftover), report
