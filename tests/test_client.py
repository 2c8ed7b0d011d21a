"""The client against fake endpoints that speak the real protocols: one gRPC servicer and one HTTP server."""

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from qwen35 import errors
from qwen35.client import Client, data_uri, main, parse_arguments, server_error, user_message

STREAM = [
    {"text_output": "A red", "finish_reason": "None", "num_input_tokens": 7, "num_output_tokens": 2},
    {"text_output": " grüße", "finish_reason": "None", "num_input_tokens": 7, "num_output_tokens": 3},
    {
        "text_output": "",
        "finish_reason": "stop",
        "num_input_tokens": 7,
        "num_output_tokens": 1,
        "total_draft_tokens": 8,
        "total_accepted_draft_tokens": 6,
    },
]


class FakeModel:
    """What both fake endpoints answer, and what they were asked."""

    def __init__(self) -> None:
        self.inputs: list[dict] = []
        self.request_ids: list[str] = []
        self.responses = STREAM
        self.error: str | None = None
        self.hold = threading.Event()  # set: no answer until the end of the test
        self.release = threading.Event()

    def answer(self, inputs: dict, request_id: str) -> Iterator[dict]:
        self.inputs.append(inputs)
        self.request_ids.append(request_id)
        if self.hold.is_set():
            self.release.wait(10)
        yield from self.responses


class FakeGrpc(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, model: FakeModel) -> None:
        self.model = model

    def ModelStreamInfer(self, request_iterator, context):
        for request in request_iterator:
            if self.model.error:
                yield service_pb2.ModelStreamInferResponse(error_message=self.model.error)
                continue
            inputs = {}
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
                inputs[tensor.name] = bool(raw[0]) if tensor.datatype == "BOOL" else raw[4:].decode()
            for outputs in self.model.answer(inputs, request.id):
                yield service_pb2.ModelStreamInferResponse(infer_response=self.encode(outputs, is_final=False))
            yield service_pb2.ModelStreamInferResponse(infer_response=self.encode({}, is_final=True))

    @staticmethod
    def encode(outputs: dict, *, is_final: bool) -> service_pb2.ModelInferResponse:
        response = service_pb2.ModelInferResponse(model_name="qwen35")
        response.parameters["triton_final_response"].bool_param = is_final
        for name, value in outputs.items():
            kind = "BYTES" if isinstance(value, str) else "INT32"
            response.outputs.add(name=name, datatype=kind, shape=[1])
            if kind == "BYTES":
                raw = serialize_byte_tensor(np.array([value.encode()], dtype=object)).item()
            else:
                raw = np.array([value], dtype=np.int32).tobytes()
            response.raw_output_contents.append(raw)
        return response


def http_handler(model: FakeModel) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request_id = body.pop("id", "")
            is_stream = self.path.endswith("generate_stream")
            assert self.path.startswith("/v2/models/qwen35/generate") and is_stream == body["stream"]
            self.send_response(400 if model.error else 200)
            self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
            self.end_headers()
            events = [{"error": model.error}] if model.error else model.answer(body, request_id)
            for event in events:
                text = json.dumps(event)
                self.wfile.write(f"data: {text}\n\n".encode() if is_stream else text.encode())
                self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@pytest.fixture
def model() -> Iterator[FakeModel]:
    fake = FakeModel()
    yield fake
    fake.release.set()


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, model: FakeModel) -> Iterator[Client]:
    if request.param == "grpc":
        server = grpc.server(ThreadPoolExecutor(4))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(FakeGrpc(model), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield Client(f"127.0.0.1:{port}", protocol="grpc", timeout_seconds=5)
        server.stop(None)
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), http_handler(model)) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield Client(f"http://127.0.0.1:{http_server.server_port}/", protocol="http", timeout_seconds=5)
        model.release.set()
        http_server.shutdown()


def test_streamed_chat_collects_text_counts_and_statistics(client: Client, model: FakeModel):
    pieces: list[str] = []
    completion = client.chat("What is it?", stream=True, on_text=pieces.append, request_id="r1", max_tokens=9, seed=4)
    assert (pieces, completion.text) == (["A red", " grüße"], "A red grüße")
    assert (completion.finish_reason, completion.num_input_tokens, completion.num_output_tokens) == ("stop", 7, 6)
    assert completion.acceptance_rate == 6 / 8
    assert 0 < completion.first_response_seconds <= completion.total_seconds
    assert "drafts accepted 6/8 = 0.75" in completion.summary()
    (inputs,) = model.inputs
    assert json.loads(inputs["messages"]) == [{"role": "user", "content": "What is it?"}]
    assert json.loads(inputs["sampling_parameters"]) == {"max_tokens": 9, "seed": 4}
    switches = {name for name, value in inputs.items() if value is True}
    assert switches == {
        "stream",
        "exclude_input_in_output",
        "return_finish_reason",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "return_perf_metrics",
    }
    assert model.request_ids == ["r1"]


def test_unstreamed_chat_without_drafts(client: Client, model: FakeModel):
    model.responses = [{"text_output": "4", "finish_reason": "length", "num_input_tokens": 3, "num_output_tokens": 1}]
    completion = client.chat([{"role": "user", "content": "2+2"}], chat_template_kwargs={"enable_thinking": False})
    assert (completion.text, completion.finish_reason, completion.acceptance_rate) == ("4", "length", None)
    (inputs,) = model.inputs
    assert inputs["stream"] is False and "sampling_parameters" not in inputs
    assert json.loads(inputs["chat_template_kwargs"]) == {"enable_thinking": False}


@pytest.mark.parametrize("stream", [False, True])
def test_server_error_keeps_its_code(client: Client, model: FakeModel, stream: bool):
    model.error = "in ensemble 'qwen35', INVALID_ARG: top_k: expected an integer, got 'x'"
    with pytest.raises(errors.InvalidArgument, match=r"^INVALID_ARG: top_k: expected an integer, got 'x'$"):
        client.chat("hello", stream=stream)


def test_error_output_after_text_is_raised(client: Client, model: FakeModel):
    model.responses = [STREAM[0], {"text_output": "", "error": "DEADLINE_EXCEEDED: request: expected an end"}]
    pieces: list[str] = []
    with pytest.raises(errors.DeadlineExceeded, match="expected an end"):
        client.chat("hello", stream=True, on_text=pieces.append)
    assert pieces == ["A red"]


def test_no_answer_is_a_timeout(client: Client, model: FakeModel):
    model.hold.set()
    client.timeout_seconds = 0.3
    with pytest.raises(errors.DeadlineExceeded, match="within 0.3 s"):
        client.chat("hello", stream=True)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_nobody_there(protocol: str):
    with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:9: expected a Triton .* endpoint"):
        Client("127.0.0.1:9", protocol=protocol, timeout_seconds=5).chat("hello")


def test_arguments_that_cannot_be_sent():
    client = Client()
    with pytest.raises(errors.InvalidArgument, match="n: expected 1"):
        client.chat("hello", n=2)
    with pytest.raises(errors.InvalidArgument, match="images: expected none"):
        client.chat([{"role": "user", "content": "hello"}], images=[b"GIF8"])
    with pytest.raises(errors.InvalidArgument, match="protocol: expected grpc or http, got 'udp'"):
        Client(protocol="udp")


def test_images_precede_the_text_as_data_uris(tmp_path: Path):
    path = tmp_path / "picture"
    path.write_bytes(b"\xff\xd8\xff...")
    message = user_message("compare", [path, b"\x89PNG..."])
    first, second, text = message["content"]
    assert first["image_url"]["url"] == "data:image/jpeg;base64," + base64.b64encode(b"\xff\xd8\xff...").decode()
    assert second["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "compare"}
    assert data_uri(str(path)) == first["image_url"]["url"]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("UNAVAILABLE: queue: full", errors.Unavailable, "queue: full"),
        ("CANCELLED: Request was cancelled", errors.Cancelled, "Request was cancelled"),
        ("Stub process is not healthy", errors.InternalError, "Stub process is not healthy"),
        ("BOGUS: INTERNAL: two\nlines", errors.InternalError, "two\nlines"),
    ],
)
def test_error_classes(text: str, kind: type[errors.Qwen35Error], message: str):
    error = server_error(text)
    assert (type(error), error.message) == (kind, message)


def test_command_line_prints_text_and_statistics(client: Client, model: FakeModel, capsys: pytest.CaptureFixture[str]):
    arguments = ["how?", "--url", client.url, "--stream", "--system", "Be brief.", "--max-tokens", "5", "--seed", "0"]
    arguments += ["--http"] if client.protocol == "http" else []
    assert main([*arguments, "--no-thinking", "--stop", "END"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "A red grüße\n" and "6 new tokens" in captured.err
    (inputs,) = model.inputs
    assert json.loads(inputs["messages"])[0] == {"role": "system", "content": "Be brief."}
    assert json.loads(inputs["sampling_parameters"]) == {"max_tokens": 5, "seed": 0, "stop": ["END"]}
    assert json.loads(inputs["chat_template_kwargs"]) == {"enable_thinking": False}


def test_command_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["hello", "--image", str(tmp_path / "none.png")]) == 1
    assert "none.png" in capsys.readouterr().err
    assert main(["hello", "--url", "127.0.0.1:9", "--timeout", "5"]) == 1
    assert "error: UNAVAILABLE: 127.0.0.1:9" in capsys.readouterr().err
    assert parse_arguments(["hello"]).thinking is None
