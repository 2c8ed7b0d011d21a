"""Requests that end early: cancelled by id, by their client, or by their deadline. Nothing stays behind."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from qwen35.client import Client
from qwen35.errors import Cancelled
from tests.server.clients import Stream, encode, idle_stats, operate, picture, send_llm, send_vllm, stats, vllm

LONG = {"max_tokens": 400, "ignore_eos": True}


def begin(connection, request_id="", **options):
    """A long request whose first text has come."""
    send_vllm(connection, "Hello", LONG, request_id=request_id, stream=True, **options)
    assert connection.next()[3] is None


def test_cancel_by_id_ends_every_request_of_the_id_and_no_other(server):
    with Stream(server) as first, Stream(server) as second, Stream(server) as other:
        begin(first, "twin")
        begin(second, "twin")
        begin(other, "other")
        assert operate(server, "cancel", {"request_id": "twin"}) == {"cancelled": 2}
        for connection in (first, second):
            last = connection.collect(timeout=2.0).last
            assert last["error"][0] == b"CANCELLED: Request was cancelled"
        assert other.next()[3] is None
        assert operate(server, "cancel", {"request_id": "other"}) == {"cancelled": 1}
        assert b"CANCELLED" in other.collect(timeout=2.0).last["error"][0]
    idle_stats(server)


def test_a_cancel_reaches_a_request_that_is_still_in_the_encoder(server):
    with Stream(server) as connection:
        slow = [picture("red", (2048, 2048))] * 8  # a second or more of decoding
        send_vllm(connection, "x", LONG, images=slow, request_id="early", stream=True)
        time.sleep(0.1)
        assert operate(server, "cancel", {"request_id": "early"}) == {"cancelled": 0}
        answer = connection.collect()
    assert answer.responses == [] and answer.error == "CANCELLED: Request was cancelled"
    assert vllm(server, "x", sampling={"max_tokens": 1}, request_id="early").error is None  # the next of that id
    idle_stats(server)


def test_an_empty_id_can_not_be_cancelled(server):
    with pytest.raises(InferenceServerException, match="INVALID_ARG: request_id"):
        operate(server, "cancel", {"request_id": ""})


def test_a_deadline_ends_a_stream_with_an_error_output(server):
    with Stream(server) as connection:
        begin(connection, options={"timeout": 400_000})  # microseconds, Triton's own
        answer = connection.collect(timeout=5.0)
    assert answer.error is None
    assert answer.last["error"][0].startswith(b"DEADLINE_EXCEEDED: ")
    idle_stats(server)


def test_a_cancelled_client_of_the_llm_itself_frees_its_memory(server):
    """Through an ensemble no cancellation arrives in this version of the server; the model itself sees it."""
    encoded = encode(server, "Hello", LONG)
    lease = operate(server, "open", {"request_id": "", "deadline_unix_ns": time.time_ns() + 60 * 10**9})
    with Stream(server) as client:
        send_llm(client, encoded, lease)
        assert client.next()[3] is None
        assert stats(server)["num_claimed_leases"] == 1
    idle_stats(server, timeout=4.0)


def test_the_text_before_a_cancel_is_a_beginning_of_the_whole(server):
    sampling = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
    whole = vllm(server, "Hello", sampling=sampling, stream=True).text
    with Stream(server) as connection:
        send_vllm(connection, "Hello", sampling, request_id="half", stream=True)
        first = connection.next()[1]["text_output"][0].decode()
        operate(server, "cancel", {"request_id": "half"})
        text = first + connection.collect(timeout=5.0).text
    assert whole.startswith(text)


def test_a_stop_ends_long_streams_with_an_error(server_factory):
    server = server_factory()
    texts: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        client = Client(server.grpc_url)
        sampling = {"max_tokens": 4000, "ignore_eos": True}
        answer = pool.submit(client.complete, {"text_input": "A", "stream": True}, on_text=texts.append, **sampling)
        while not texts:
            assert not answer.done(), answer.exception()
            time.sleep(0.01)
        report = server.stop()
        with pytest.raises(Cancelled):
            answer.result(timeout=10.0)
    assert report.is_clean, report
