import base64
import io
import json
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from qwen35.serving.resolved import ResolvedRequest
from tests.serving.fake_triton import Logger, Request, load_model, model_args, text
from tests.tiny_checkpoint import TOKEN_ID, make_tiny_checkpoint

WAIT = 10.0


def png(width=32, height=32, colour=(255, 0, 0)):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    make_tiny_checkpoint(directory)
    return directory


@pytest.fixture
def model(monkeypatch, checkpoint):
    model = load_model(monkeypatch, "vision_encoder").TritonPythonModel()
    model.initialize(model_args("vision_encoder", checkpoint=checkpoint, device="cpu"))
    yield model
    model.finalize()


def run(model, inputs, **rest):
    request = Request(inputs, **rest)
    assert model.execute([request]) is None
    assert request.sender.done.wait(WAIT)
    (response,) = request.sender.responses
    return response


def test_without_a_prompt_for_a_session_that_goes_on(model):
    response = run(model, {}, parameters={"restore_session": "it", "max_tokens": 3})
    assert response.failure is None
    request = ResolvedRequest.from_json(response.outputs["request"].as_numpy()[0].decode())
    assert (request.restore_session, request.is_continued) == ("it", True)
    shapes = {name: response.outputs[name].as_numpy().shape for name in ("token_ids", "positions")}
    assert shapes == {"token_ids": (0,), "positions": (3, 0)}
    assert torch.from_dlpack(response.outputs["embeds"].to_dlpack()).shape == (0, 64)


def test_text(model):
    response = run(model, {"text_input": text("hi<|im_end|>")}, parameters={"max_tokens": 3}, request_id="5")
    assert response.failure is None
    outputs = response.outputs
    request = ResolvedRequest.from_json(outputs["request"].as_numpy()[0].decode())
    assert (request.sampling.max_tokens, request.request_id, request.images) == (3, "5", ())
    token_ids = outputs["token_ids"].as_numpy()
    assert (len(token_ids), token_ids[2]) == (3, TOKEN_ID["<|im_end|>"])
    assert token_ids.dtype == np.int32
    positions = outputs["positions"].as_numpy()
    assert (positions.shape, positions.dtype) == ((3, 3), np.int32)
    embeds = torch.from_dlpack(outputs["embeds"].to_dlpack())
    assert (embeds.dtype, embeds.shape) == (torch.bfloat16, (0, 64))


@pytest.mark.parametrize("form", ["raw", "base64", "data", "pixels"])
def test_the_same_image_in_every_form_gives_the_same_tensors(model, form):
    data = png()
    forms = {
        "raw": ("image", np.array([data], dtype=object)),
        "base64": ("image", np.array([base64.b64encode(data)], dtype=object)),
        "data": ("image_url_input", np.array([b"data:image/png;base64," + base64.b64encode(data)], dtype=object)),
        "pixels": ("image_bytes_input", np.asarray(Image.open(io.BytesIO(data)))[None]),
    }
    reference = run(model, {"text_input": text("x"), "image": np.array([data], dtype=object)}).outputs
    name, tensor = forms[form]
    outputs = run(model, {"text_input": text("x"), name: tensor}).outputs
    assert np.array_equal(outputs["token_ids"].as_numpy(), reference["token_ids"].as_numpy())
    embeds, expected = (torch.from_dlpack(o["embeds"].to_dlpack()) for o in (outputs, reference))
    assert len(embeds) == (outputs["token_ids"].as_numpy() == TOKEN_ID["<|image_pad|>"]).sum() > 0
    assert torch.equal(embeds, expected)


def test_images_are_named_for_the_prefix_index(model):
    images = np.array([png(), png(64, 32, (0, 0, 255))], dtype=object)
    outputs = run(model, {"text_input": text("x"), "image": images}).outputs
    spans = ResolvedRequest.from_json(outputs["request"].as_numpy()[0].decode()).images
    token_ids = outputs["token_ids"].as_numpy()
    assert len(spans) == 2 and spans[0].digest != spans[1].digest
    for span in spans:
        inside = token_ids[span.offset : span.offset + span.num_tokens]
        assert set(inside.tolist()) == {TOKEN_ID["<|image_pad|>"]}
    assert sum(span.num_tokens for span in spans) == len(torch.from_dlpack(outputs["embeds"].to_dlpack()))


def test_messages(model):
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
    messages = json.dumps([{"role": "user", "content": content}])
    outputs = run(model, {"messages": text(messages)}).outputs
    assert (outputs["token_ids"].as_numpy() == TOKEN_ID["<|image_pad|>"]).any()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "INVALID_ARG: text_input: expected exactly one of"),
        ({"text_input": text("")}, "INVALID_ARG: text_input: expected a prompt"),
        ({"text_input": text("x"), "image": text("no")}, "INVALID_ARG: image[0]: "),
        (
            {"text_input": text("x"), "image": text("http://a/b")},
            "UNSUPPORTED: image[0]: expected",
        ),
        ({"text_input": text("x"), "max_tokens": np.array([0], np.int32)}, "INVALID_ARG: max_tokens: expected"),
        ({"text_input": text("x" * 600)}, "INVALID_ARG: text_input: expected at most"),
        ({"text_input": text("<|image_pad|>")}, "INVALID_ARG: text_input: expected as many images"),
        ({"messages": text('[{"role": "user"}]')}, "INVALID_ARG: messages[0]"),
        ({"text_input": np.array([b"\xff"], dtype=object)}, "INVALID_ARG: text_input: expected UTF-8"),
    ],
)
def test_bad_input_is_one_error(model, inputs, message):
    response = run(model, inputs)
    assert str(response.failure).startswith(message)
    assert response.outputs == {}


def test_a_fault_of_ours_shows_no_detail_to_the_client(model):
    model._encoder.encode = lambda request, source: 1 / 0
    Logger.lines.clear()
    response = run(model, {"text_input": text("x")})
    assert str(response.failure) == "INTERNAL: vision_encoder: the request failed with ZeroDivisionError"
    assert "ZeroDivisionError" in Logger.lines[0]


def test_text_is_not_held_up_by_an_image_in_front(model):
    gate, encode = threading.Event(), model._encoder.encode

    def slow(request, source):
        if source.images:
            assert gate.wait(WAIT)
        return encode(request, source)

    model._encoder.encode = slow
    with_image = Request({"text_input": text("x"), "image": np.array([png()], dtype=object)})
    model.execute([with_image])
    assert run(model, {"text_input": text("y")}).failure is None
    assert not with_image.sender.done.is_set()
    gate.set()
    assert with_image.sender.done.wait(WAIT)


def test_a_request_whose_client_has_gone_is_not_encoded(model):
    model._encoder.encode = lambda request, source: pytest.fail("encoded")
    request = Request({"text_input": text("x")})
    request.sender.cancelled = True
    model.execute([request])
    assert request.sender.done.wait(WAIT)
    assert str(request.sender.responses[0].failure) == "CANCELLED: Request was cancelled"
