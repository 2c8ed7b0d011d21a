import numpy as np
import pytest
import torch

from qwen35.errors import Cancelled, DeadlineExceeded, InvalidArgument
from qwen35.serving.process import ServerProcess
from qwen35.serving.responses import Response
from qwen35.serving.tensors import InputReader, TritonReply, text_input, torch_input, triton_error
from tests.serving import fake_triton

PB = fake_triton.make_module()
CONFIG = {
    "input": [
        {"name": name, "dims": dims}
        for name, dims in (
            ("text_input", ["1"]),
            ("temperature", ["1"]),
            ("max_tokens", ["1"]),
            ("stream", ["1"]),
            ("stop_words", ["-1"]),
            ("image", ["-1"]),
            ("image_bytes_input", ["-1", "-1", "-1", "-1"]),
        )
    ]
}


def read(inputs, **rest):
    return InputReader(CONFIG).read(fake_triton.Request(inputs, **rest))


@pytest.mark.parametrize(
    ("name", "array", "value"),
    [
        ("text_input", fake_triton.text("ü"), "ü"),
        ("temperature", np.array([0.7], np.float32), 0.7),
        ("max_tokens", np.array([5], np.int32), 5),
        ("stream", np.array([True]), True),
        ("stop_words", np.array([b"a", b"b"], dtype=object), ["a", "b"]),
        ("image", np.array([b"\x89PNG\xff"], dtype=object), [b"\x89PNG\xff"]),
    ],
)
def test_tensors_become_plain_values(name, array, value):
    read_value = read({name: array}).inputs[name]
    assert read_value == value
    assert type(read_value) is type(value)


def test_absent_inputs_are_absent_and_the_rest_comes_along():
    raw = read({}, parameters={"top_k": 3}, request_id="9", timeout=5)
    assert (raw.inputs, raw.parameters, raw.request_id, raw.timeout_us) == ({}, {"top_k": 3}, "9", 5)
    assert read({}).parameters == {}


def test_decoded_pixels_become_one_array_an_image():
    images = read({"image_bytes_input": np.zeros((2, 4, 5, 3), np.uint8)}).inputs["image_bytes_input"]
    assert [image.shape for image in images] == [(4, 5, 3), (4, 5, 3)]


def test_text_that_is_not_utf8_is_refused_by_name():
    with pytest.raises(InvalidArgument, match="text_input: expected UTF-8"):
        read({"text_input": np.array([b"\xff"], dtype=object)})


def test_missing_inputs_are_refused_by_name():
    for reader in (text_input, torch_input):
        with pytest.raises(InvalidArgument, match="lease: expected a tensor, got none"):
            reader(PB, fake_triton.Request({}), "lease")


def test_bf16_is_read_without_numpy():
    embeds = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    assert torch.equal(torch_input(PB, fake_triton.Request({"embeds": embeds}), "embeds"), embeds)


def test_errors_keep_their_code_where_triton_has_it():
    assert triton_error(PB, Cancelled()).code == PB.TritonError.CANCELLED
    late = triton_error(PB, DeadlineExceeded("too late"))
    assert (late.code, str(late)) == (PB.TritonError.UNAVAILABLE, "DEADLINE_EXCEEDED: too late")


def test_the_server_is_not_asked_about_a_request_that_has_ended():
    request = fake_triton.Request({})
    reply = TritonReply(PB, request, ServerProcess())
    request.sender.cancelled = True
    assert reply.is_cancelled()
    reply.fail(Cancelled())
    request.sender.is_cancelled = lambda: pytest.fail("asked")
    assert not reply.is_cancelled()


def test_nothing_is_sent_to_a_dead_server(monkeypatch):
    request, server = fake_triton.Request({}), ServerProcess()
    reply = TritonReply(PB, request, server)
    monkeypatch.setattr(server, "_pid", -1)
    with pytest.raises(ConnectionError):
        reply.fail(Cancelled())
    assert reply.is_cancelled()
    assert request.sender.responses == []


def test_replies():
    request = fake_triton.Request({})
    reply = TritonReply(PB, request, ServerProcess())
    reply.send(Response({"text_output": np.array(["ü"], dtype=object), "num_output_tokens": np.array([1], np.uint32)}))
    reply.send(Response(error=Cancelled(), is_final=True))
    first, last = request.sender.responses
    assert first.outputs["text_output"].as_numpy().tolist() == ["ü".encode()]
    assert first.outputs["num_output_tokens"].as_numpy().dtype == np.uint32
    assert str(last.failure) == "CANCELLED: Request was cancelled"
    assert (request.sender.num_finals, last.outputs) == (1, {})
