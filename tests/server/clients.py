"""Clients as other people write them, for tests on a live server: gRPC streams in the way of the vLLM backend's and
TensorRT-LLM's clients, Triton's generate endpoints, and the state manager's operations."""

import base64
import contextlib
import http.client
import io
import json
import queue
import re
import time
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc as grpc
from PIL import Image, ImageDraw
from tritonclient.utils import np_to_triton_dtype

TIMEOUT = 60.0


@dataclass
class Answer:
    """All responses of one request, in order. ``outputs``: by name, one list an output; ``error``: what ended it."""

    responses: list[dict] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # arrival of each, after the request was sent
    finals: list[bool] = field(default_factory=list)
    error: str | None = None

    @property
    def texts(self):
        return [response["text_output"][0].decode() for response in self.responses]

    @property
    def text(self):
        return "".join(self.texts)

    @property
    def last(self):
        return self.responses[-1]

    def values(self, name):
        return [response[name].reshape(-1).tolist()[0] for response in self.responses if name in response]


class Stream:
    """One gRPC stream with any number of requests on it."""

    def __init__(self, server):
        self._client = grpc.InferenceServerClient(server.grpc_url)
        self._arrived = queue.Queue()
        self._client.start_stream(lambda result, error: self._arrived.put((time.monotonic(), result, error)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Does not wait for what is under way: after a failed test that might never end."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def send(self, model, arrays, parameters=None, request_id="", outputs=None, **options):
        """``arrays``: by input name. ``options``: of the client's `async_stream_infer`."""
        inputs = [tensor(name, array) for name, array in arrays.items()]
        requested = [grpc.InferRequestedOutput(name) for name in outputs] if outputs else None
        options |= {"parameters": parameters, "request_id": request_id, "outputs": requested}
        self.send_inputs(model, inputs, **options)

    def send_inputs(self, model, inputs, **options):
        self.sent = time.monotonic()
        self._client.async_stream_infer(model, inputs, **options)

    def next(self, timeout=TIMEOUT):
        """(seconds, outputs by name, final flag, error)."""
        moment, result, error = self._arrived.get(timeout=timeout)
        if error is not None:
            return moment - self.sent, {}, True, plain_error(error.message())
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
        return moment - self.sent, outputs, response.parameters["triton_final_response"].bool_param, None

    def collect(self, timeout=TIMEOUT):
        """The rest of the one request that is under way."""
        answer = Answer()
        is_final = False
        while not is_final:
            seconds, outputs, is_final, answer.error = self.next(timeout)
            if answer.error is None:
                answer.responses.append(outputs)
                answer.seconds.append(seconds)
                answer.finals.append(is_final)
        return answer


def plain_error(message):
    """Without the words that Triton's core puts before what a step of an ensemble says."""
    return re.sub(r"^in ensemble '\w+', ", "", message)


def tensor(name, array):
    made = grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def texts(*values):
    return np.array([value if isinstance(value, bytes) else value.encode() for value in values], dtype=np.object_)


def vllm(server, prompt=None, *, sampling=None, parameters=None, images=(), request_id="", **inputs):
    """One request at `qwen35`, all of its answer. Keywords: booleans and text inputs by name."""
    with Stream(server) as connection:
        send_vllm(connection, prompt, sampling, parameters, images, request_id, **inputs)
        return connection.collect()


def send_vllm(
    connection, prompt=None, sampling=None, parameters=None, images=(), request_id="", options=None, **inputs
):
    arrays = {} if prompt is None else {"text_input": texts(prompt)}
    if sampling is not None:
        arrays["sampling_parameters"] = texts(json.dumps(sampling))
    if len(images):
        arrays["image"] = texts(*images)
    for name, value in inputs.items():
        arrays[name] = np.array([value]) if isinstance(value, bool) else texts(value)
    connection.send("qwen35", arrays, parameters, request_id, **(options or {}))


def encode(server, prompt, parameters=None):
    """What the first step makes of a prompt: its outputs by name, for `send_llm`."""
    with Stream(server) as connection:
        connection.send("vision_encoder", {"text_input": texts(prompt), "stream": np.array([True])}, parameters)
        return connection.next()[1]


def send_llm(connection, encoded, lease):
    """A request at the third step itself, past the ensembles."""
    inputs = [tensor(name, encoded[name]) for name in ("request", "token_ids", "positions")]
    embeds = grpc.InferInput("embeds", list(encoded["embeds"].shape), "BF16")
    embeds.set_data_from_numpy(encoded["embeds"])
    connection.send_inputs("llm", [*inputs, embeds, tensor("lease", texts(json.dumps(lease)))])


_TYPED = {bool: np.bool_, int: np.int32, float: np.float32}


def trtllm(server, prompt, outputs=None, **inputs):
    """One request at `ensemble` in the way of TensorRT-LLM's clients: every tensor is [1, n]."""
    arrays = {"text_input": texts(prompt)[None]}
    for name, value in inputs.items():
        if isinstance(value, np.ndarray):
            arrays[name] = value
        elif isinstance(value, (list, str)):
            arrays[name] = texts(*([value] if isinstance(value, str) else value))[None]
        else:
            kind = np.uint64 if name in ("seed", "random_seed", "lora_task_id") else _TYPED[type(value)]
            arrays[name] = np.array([[value]], kind)
    with Stream(server) as stream:
        stream.send("ensemble", arrays, outputs=outputs)
        return stream.collect()


def generate(server, model="qwen35", timeout=TIMEOUT, **body):
    """HTTP `generate`: status and parsed body."""
    with _post(server, f"/v2/models/{model}/generate", body, timeout) as response:
        return response.status, json.loads(response.read())


def generate_stream(server, model="qwen35", timeout=TIMEOUT, **body):
    """HTTP `generate_stream`: status and the parsed events; an error is one too, whatever the status."""
    with _post(server, f"/v2/models/{model}/generate_stream", body, timeout) as response:
        payload = response.read().decode()
    return response.status, [json.loads(line[5:]) for line in payload.splitlines() if line.startswith("data:")]


@contextlib.contextmanager
def _post(server, path, body, timeout):
    connection = http.client.HTTPConnection(server.http_url, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"Connection": "close"})
        yield connection.getresponse()
    finally:
        connection.close()


def operate(server, operation, message=None):
    """One operation of the state manager over gRPC. Raises InferenceServerException."""
    client = grpc.InferenceServerClient(server.grpc_url)
    try:
        inputs = [tensor("operation", texts(operation)), tensor("request", texts(json.dumps(message or {})))]
        name = "lease" if operation == "open" else "result"
        result = client.infer("state_manager", inputs, outputs=[grpc.InferRequestedOutput(name)])
        return json.loads(result.as_numpy(name)[0])
    finally:
        client.close()


def stats(server):
    return operate(server, "stats")


def idle_stats(server, timeout=10.0):
    """Stats once nobody holds anything; fails when that does not come about. Counts of use come with a heartbeat."""
    deadline = time.monotonic() + timeout
    while True:
        now = stats(server)
        busy = {
            name: now[name] for name in ("num_open_leases", "num_claimed_leases", "num_used_blocks", "num_used_slots")
        }
        if not any(busy.values()):
            assert operate(server, "check") == {"ok": True}
            for kind in ("blocks", "slots"):
                counts = now[kind]
                assert counts["free"] + counts["held"] + counts["cached"] == counts["total"]
            return now
        assert time.monotonic() < deadline, f"still in use: {busy}"
        time.sleep(0.05)


def picture(colour="red", size=(64, 64), shape="ellipse", fmt="PNG"):
    """File bytes of a simple drawing."""
    image = Image.new("RGB", size, "white")
    box = [size[0] // 4, size[1] // 4, 3 * size[0] // 4, 3 * size[1] // 4]
    getattr(ImageDraw.Draw(image), shape)(box, fill=colour)
    buffer = io.BytesIO()
    image.save(buffer, fmt)
    return buffer.getvalue()


def data_uri(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def chat(question, *images):
    """OpenAI messages as JSON text."""
    parts = [{"type": "image_url", "image_url": {"url": data_uri(image)}} for image in images]
    content = [*parts, {"type": "text", "text": question}] if images else question
    return json.dumps([{"role": "user", "content": content}])
