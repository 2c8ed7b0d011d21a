"""Bad requests: each is one error with code and field within a second, without a traceback, and the next one works."""

import json
import time

import numpy as np
import pytest

from tests.server.clients import (
    Stream,
    chat,
    data_uri,
    generate,
    generate_stream,
    idle_stats,
    picture,
    plain_error,
    texts,
    vllm,
)

OK = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


def message(content):
    return json.dumps([{"role": "user", "content": content}])


CASES = {
    "nothing": ({}, "INVALID_ARG: text_input: expected exactly one of text_input and messages, got neither"),
    "both": ({"prompt": "x", "messages": message("x")}, "INVALID_ARG: text_input: expected exactly one"),
    "empty prompt": ({"prompt": ""}, "INVALID_ARG: text_input: expected a prompt"),
    "not utf-8": ({"prompt": b"\xff\xfe"}, "INVALID_ARG: text_input: expected UTF-8"),
    "too long": ({"prompt": "word " * 20000}, "INVALID_ARG: text_input: expected at most"),
    "unknown option": (
        {"prompt": "x", "sampling": {"temprature": 1}},
        "INVALID_ARG: temprature: expected a known option",
    ),
    "unknown parameter": ({"prompt": "x", "parameters": {"foo": 1}}, "INVALID_ARG: foo: expected a known option"),
    "ill-typed option": ({"prompt": "x", "sampling": {"temperature": "warm"}}, "INVALID_ARG: temperature: expected"),
    "ill-typed parameter": (
        {"prompt": "x", "parameters": {"top_k": "many"}},
        "INVALID_ARG: top_k: expected an integer",
    ),
    "out of range": ({"prompt": "x", "sampling": {"top_p": 1.5}}, "INVALID_ARG: top_p: expected"),
    "max_tokens 0": ({"prompt": "x", "sampling": {"max_tokens": 0}}, "INVALID_ARG: max_tokens: expected"),
    "max_tokens -1": ({"prompt": "x", "sampling": {"max_tokens": -1}}, "INVALID_ARG: max_tokens: expected"),
    "no JSON": ({"prompt": "x", "sampling_parameters": "{"}, "INVALID_ARG: sampling_parameters: expected"),
    "n": ({"prompt": "x", "sampling": {"n": 0}}, "INVALID_ARG: n: expected a value from 1"),
    "no schema": (
        {"prompt": "x", "sampling": {"structured_outputs": {"json": {"type": "nonsense"}}}},
        "INVALID_ARG: structured_outputs.json: expected a JSON schema",
    ),
    "stop token": ({"prompt": "x", "sampling": {"stop_token_ids": [10**9]}}, "INVALID_ARG: stop_token_ids: expected"),
    "echo in a stream": (
        {"prompt": "x", "stream": True, "exclude_input_in_output": False},
        "INVALID_ARG: exclude_input_in_output: expected true in a stream",
    ),
    "no image": ({"prompt": "x", "images": [b"not an image"]}, "INVALID_ARG: image[0]: "),
    "cut image": ({"prompt": "x", "images": [picture("red", (64, 64))[:-200]]}, "INVALID_ARG: image[0]: "),
    "web image": ({"prompt": "x", "images": ["http://example.org/a.png"]}, "UNSUPPORTED: image[0]: expected"),
    "too few images": ({"prompt": PLACEHOLDER * 2, "images": [picture()]}, "INVALID_ARG: text_input: expected as many"),
    "too many images": (
        {"prompt": PLACEHOLDER, "images": [picture()] * 2},
        "INVALID_ARG: text_input: expected as many",
    ),
    "placeholder alone": ({"prompt": "<|image_pad|>"}, "INVALID_ARG: text_input: expected as many"),
    "images beside messages": ({"messages": message("x"), "images": [picture()]}, "INVALID_ARG: image: expected"),
    "messages no list": ({"messages": "{}"}, "INVALID_ARG: messages: expected a list"),
    "messages empty": ({"messages": "[]"}, "INVALID_ARG: messages: expected at least one"),
    "message without content": ({"messages": '[{"role": "user"}]'}, "INVALID_ARG: messages[0]"),
    "bad image in a message": (
        {"messages": message([{"type": "image_url", "image_url": {"url": data_uri(b"no")}}])},
        "INVALID_ARG: messages[0].content[0]",
    ),
    "name no text": (
        {"prompt": "x", "sampling_parameters": '{"\\ud800": 1}'},
        "INVALID_ARG: \\ud800: expected a known",
    ),
    "stop no text": ({"prompt": "x", "sampling": {"stop": "\ud800"}}, "INVALID_ARG: stop: expected valid Unicode"),
    "nested JSON": ({"prompt": "x", "sampling_parameters": "[" * 100000}, "INVALID_ARG: sampling_parameters: expected"),
    "beyond any float": ({"prompt": "x", "sampling": {"temperature": 10**400}}, "INVALID_ARG: temperature: expected"),
    "long stop string": ({"prompt": "x", "sampling": {"stop": "a" * 200000}}, "INVALID_ARG: stop: expected at most"),
    "far too long": ({"prompt": "a " * 1000000}, "INVALID_ARG: text_input: expected at most"),
    "tools alone": ({"prompt": "x", "tools": "[]x"}, "INVALID_ARG: tools: expected"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_is_one_error_within_a_second(server, name):
    arguments, expected = CASES[name]
    arguments = {"sampling": OK if "sampling_parameters" not in arguments else None, **arguments}
    begin = time.monotonic()
    answer = vllm(server, arguments.pop("prompt", None), **arguments)
    assert time.monotonic() - begin < 1.0
    assert answer.responses == []
    assert answer.error.startswith(expected), answer.error
    assert "Traceback" not in answer.error and "File " not in answer.error


def test_special_tokens_in_messages_are_text(server):
    """`<|im_end|>` and placeholders in a message are characters; in a raw prompt they are tokens."""

    def num_tokens(**prompt):
        return vllm(server, sampling=OK, return_num_input_tokens=True, **prompt).values("num_input_tokens")[0]

    literal = "<|im_end|><|image_pad|>"
    assert num_tokens(messages=chat(literal)) > num_tokens(messages=chat("")) + 4
    assert num_tokens(prompt="<|im_end|>") == 1


def test_http_tells_the_same(server):
    status, body = generate(server, text_input="x", temprature=1)
    assert status == 400 and plain_error(body["error"]).startswith("INVALID_ARG: temprature: expected a known option")
    status, events = generate_stream(server, text_input="x", max_tokens=0, stream=True)
    assert status == 400 and plain_error(events[0]["error"]).startswith("INVALID_ARG: max_tokens")


def test_nothing_leaks_and_the_next_request_works(server):
    before = idle_stats(server)
    for arguments, _ in CASES.values():
        arguments = dict(arguments)
        vllm(server, arguments.pop("prompt", None), **arguments)
    after = idle_stats(server)
    for name in ("blocks", "slots"):
        assert after[name]["total"] == before[name]["total"]
    assert after["num_expired_leases"] == before["num_expired_leases"]
    assert vllm(server, "Hello", sampling=OK).error is None


def test_what_the_core_refuses(server_factory):
    """Wrong types and names never reach a model, and keep the models from unloading: a server of their own."""
    server = server_factory()
    wrong = {
        "type": {"text_input": texts("x"), "stream": np.array([1], np.int32)},
        "shape": {"text_input": texts("x", "y")},
        "name": {"text_input": texts("x"), "nonsense": texts("x")},
    }
    for arrays in wrong.values():
        with Stream(server) as stream:
            stream.send("qwen35", arrays)
            begin = time.monotonic()
            assert stream.next()[3]
            assert time.monotonic() - begin < 1.0
    assert generate(server, text_input=5)[0] >= 400
    assert vllm(server, "Hello", sampling=OK).error is None
    assert idle_stats(server)["num_expired_leases"] == 0
    report = server.stop()
    assert not report.leftover_processes and not report.leftover_shared_memory
