"""Client of the ensemble `qwen35`: a class, and `python -m qwen35.client "question" --image file.png --stream`.

Speaks gRPC streaming (default) or Triton's HTTP `generate` endpoints. It shares no code with the server but the error
classes: a request that fails raises the error that the server named. Every wait has a limit, since nobody tells a
client when the process that was answering it has died.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import queue
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from qwen35 import errors

DEFAULT_URLS = {"grpc": "localhost:8001", "http": "localhost:8000"}
_ERRORS = (
    errors.InvalidArgument,
    errors.Unsupported,
    errors.Unavailable,
    errors.Cancelled,
    errors.DeadlineExceeded,
    errors.InternalError,
)
_ERROR_BY_CODE = {error.code: error for error in _ERRORS}
_CODE = re.compile(rf"\b({'|'.join(_ERROR_BY_CODE)}): (.*)", re.DOTALL)
_IMAGE_TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
# Tensor types of the inputs that are not text.
_BOOLEAN_INPUTS = frozenset({"stream", "exclude_input_in_output"})

Message = Mapping[str, Any]
Outputs = dict[str, Any]  # output name -> value, a list when it has more than one element


@dataclass(frozen=True)
class Completion:
    """A finished answer. Counts are None when the server did not report them."""

    text: str
    finish_reason: str | None
    num_input_tokens: int | None
    num_output_tokens: int
    total_draft_tokens: int | None
    total_accepted_draft_tokens: int | None
    first_response_seconds: float
    total_seconds: float

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens over drafted ones; None without drafts."""
        if not self.total_draft_tokens or self.total_accepted_draft_tokens is None:
            return None
        return self.total_accepted_draft_tokens / self.total_draft_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.total_seconds

    def summary(self) -> str:
        """One line for people."""
        prompt = "?" if self.num_input_tokens is None else self.num_input_tokens
        parts = [
            f"{prompt} prompt tokens",
            f"{self.num_output_tokens} new tokens",
            f"first response after {self.first_response_seconds * 1e3:.0f} ms",
            f"{self.tokens_per_second:.1f} tokens/s",
            f"finish reason {self.finish_reason}",
        ]
        if self.acceptance_rate is not None:
            drafts = f"{self.total_accepted_draft_tokens}/{self.total_draft_tokens}"
            parts.append(f"drafts accepted {drafts} = {self.acceptance_rate:.2f}")
        return ", ".join(parts)


class Client:
    """Sends requests to one model of one server; safe to use from several threads, a connection for each request.

    `timeout_seconds` limits each whole request, connecting included.
    """

    def __init__(
        self, url: str | None = None, *, protocol: str = "grpc", model: str = "qwen35", timeout_seconds: float = 120.0
    ) -> None:
        if protocol not in DEFAULT_URLS:
            raise errors.InvalidArgument.field("protocol", "grpc or http", protocol)
        self.url = (url or DEFAULT_URLS[protocol]).removeprefix("http://").rstrip("/")
        self.protocol = protocol
        self.model = model
        self.timeout_seconds = timeout_seconds

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        images: Sequence[Path | str | bytes] = (),
        stream: bool = False,
        on_text: Callable[[str], None] | None = None,
        request_id: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Completion:
        """Answer of a chat. `messages`: OpenAI chat messages, or the text of one user message that follows `images`.

        `on_text` gets each new piece of text; `sampling` are vLLM's sampling parameters (max_tokens, seed, …), n = 1.
        Raises the server's error; Unavailable when nobody answers at the URL; DeadlineExceeded after the timeout.
        """
        if images and not isinstance(messages, str):
            raise errors.InvalidArgument.field("images", "none beside a list of messages", f"{len(images)} images")
        chat = [user_message(messages, images)] if isinstance(messages, str) else list(messages)
        inputs: dict[str, Any] = {"messages": json.dumps(chat), "stream": stream, "exclude_input_in_output": True}
        if chat_template_kwargs is not None:
            inputs["chat_template_kwargs"] = json.dumps(dict(chat_template_kwargs))
        return self.complete(inputs, on_text=on_text, request_id=request_id, **sampling)

    def complete(
        self,
        inputs: Mapping[str, Any],
        *,
        on_text: Callable[[str], None] | None = None,
        request_id: str = "",
        **sampling: Any,
    ) -> Completion:
        """Like `chat`, for any of the model's inputs (`text_input`, `image`, …); asks for all counts."""
        if sampling.get("n", 1) != 1:
            raise errors.InvalidArgument.field("n", "1 (`responses` gives the outputs of several)", sampling["n"])
        counts = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics")
        request = {**dict.fromkeys(counts, True), **inputs}
        if sampling:
            request["sampling_parameters"] = json.dumps(sampling)
        begin = time.monotonic()
        first_response: float | None = None
        received: list[Outputs] = []
        for outputs in self.responses(request, request_id=request_id):
            first_response = first_response or time.monotonic()
            received.append(outputs)
            if on_text is not None and outputs.get("text_output"):
                on_text(outputs["text_output"])
        end = time.monotonic()
        return _completion(received, (first_response or end) - begin, end - begin)

    def responses(self, inputs: Mapping[str, Any], *, request_id: str = "") -> Iterator[Outputs]:
        """The outputs of each response as it comes. `inputs`: text, booleans, or lists of text, by input name.

        Closing the iterator early cancels the request as far as the protocol can.
        """
        receive = self._grpc_responses if self.protocol == "grpc" else self._http_responses
        for outputs in receive(inputs, request_id):
            if outputs.get("error"):
                raise server_error(outputs["error"])
            yield outputs

    def _grpc_responses(self, inputs: Mapping[str, Any], request_id: str) -> Iterator[Outputs]:
        deadline = time.monotonic() + self.timeout_seconds
        answers: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(triton_grpc.InferenceServerClient(self.url))
            connection.start_stream(lambda result, error: answers.put((result, error)), self.timeout_seconds)
            # Only what is unfinished is cancelled: a cancel that arrives while the server closes a finished request
            # keeps its ensemble from ever unloading (Triton 2.51).
            is_finished = False
            stack.callback(lambda: connection.stop_stream(cancel_requests=not is_finished))
            tensors = [input_tensor(name, value) for name, value in inputs.items()]
            # A stream that has broken already refuses the request; the reason comes through the callback.
            with contextlib.suppress(InferenceServerException):
                connection.async_stream_infer(
                    self.model, tensors, request_id=request_id, enable_empty_final_response=True
                )
            while not is_finished:
                try:
                    result, error = answers.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    raise self._timeout() from None
                if error is not None:
                    is_finished = error.status() is None  # the request's own error, not the connection's
                    raise self._grpc_error(error)
                is_finished = result.get_response().parameters["triton_final_response"].bool_param
                names = [output.name for output in result.get_response().outputs]
                outputs = {name: _value(result.as_numpy(name)) for name in names}
                if outputs:
                    yield outputs

    def _http_responses(self, inputs: Mapping[str, Any], request_id: str) -> Iterator[Outputs]:
        endpoint = "generate_stream" if inputs.get("stream") else "generate"
        body = {**inputs, "id": request_id} if request_id else dict(inputs)
        deadline = time.monotonic() + self.timeout_seconds
        connection = http.client.HTTPConnection(self.url, timeout=self.timeout_seconds)
        try:
            connection.request("POST", f"/v2/models/{self.model}/{endpoint}", json.dumps(body))
            response = connection.getresponse()
            for event in _events(response, is_stream=endpoint == "generate_stream"):
                if set(event) == {"error"}:
                    raise server_error(event["error"])
                if response.status != http.client.OK:
                    raise errors.InternalError(f"HTTP {response.status}: {event}")
                yield event
                if time.monotonic() > deadline:
                    raise self._timeout()
        except TimeoutError as error:
            raise self._timeout() from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(str(error)) from error
        finally:
            connection.close()

    def _grpc_error(self, error: InferenceServerException) -> errors.Qwen35Error:
        text = error.message()
        if error.status() == "StatusCode.DEADLINE_EXCEEDED":
            return self._timeout()
        if error.status() == "StatusCode.UNAVAILABLE":
            return self._unreachable(text)
        return server_error(text)

    def _timeout(self) -> errors.DeadlineExceeded:
        return errors.DeadlineExceeded(
            f"{self.url}: expected the end of the answer within {self.timeout_seconds:g} s, got none;"
            " see the server's log, or allow more with timeout_seconds"
        )

    def _unreachable(self, reason: str) -> errors.Unavailable:
        return errors.Unavailable(
            f"{self.url}: expected a Triton {self.protocol} endpoint, got {reason}; start one with `make serve`"
        )


def user_message(text: str, images: Sequence[Path | str | bytes] = ()) -> dict[str, Any]:
    """An OpenAI chat message of the user: the images as data URIs, then the text."""
    if not images:
        return {"role": "user", "content": text}
    parts = [{"type": "image_url", "image_url": {"url": data_uri(image)}} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def data_uri(image: Path | str | bytes) -> str:
    """A data URI of an encoded image, given as its bytes or its path. The server decodes it and judges the format."""
    content = image if isinstance(image, bytes) else Path(image).read_bytes()
    kind = next((kind for magic, kind in _IMAGE_TYPES.items() if content.startswith(magic)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def server_error(text: str) -> errors.Qwen35Error:
    """The error that a server's message `… CODE: message` stands for; InternalError when it names no code of ours."""
    match = _CODE.search(text)
    if match is None:
        return errors.InternalError(text)
    return _ERROR_BY_CODE[match[1]](match[2])


def input_tensor(name: str, value: Any) -> triton_grpc.InferInput:
    """Text -> BYTES [1], a list of text -> BYTES [n], a switch -> BOOL [1]."""
    if name in _BOOLEAN_INPUTS or name.startswith("return_"):
        data, datatype = np.array([value], dtype=bool), "BOOL"
    else:
        items = value if isinstance(value, (list, tuple)) else [value]
        data = np.array([item.encode() if isinstance(item, str) else item for item in items], dtype=object)
        datatype = "BYTES"
    tensor = triton_grpc.InferInput(name, list(data.shape), datatype)
    tensor.set_data_from_numpy(data)
    return tensor


def _value(array: np.ndarray) -> Any:
    """A tensor as Triton's `generate` endpoint shows it: text decoded, one element without its list."""
    items = [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]
    return items[0] if len(items) == 1 else items


def _events(response: http.client.HTTPResponse, *, is_stream: bool) -> Iterator[dict[str, Any]]:
    """The JSON objects of a `generate` body, or of a `generate_stream` body's server-sent events as they come."""
    if not is_stream or "text/event-stream" not in response.headers.get("Content-Type", ""):
        text = response.read().decode("utf-8", "replace")
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            raise errors.InternalError(f"HTTP {response.status}: {text[:200]}") from None
        return
    for line in response:
        if line.startswith(b"data:"):
            yield json.loads(line.removeprefix(b"data:"))


def _completion(received: Sequence[Outputs], first_response_seconds: float, total_seconds: float) -> Completion:
    def last(name: str) -> Any:
        return next((outputs[name] for outputs in reversed(received) if name in outputs), None)

    return Completion(
        text="".join(outputs.get("text_output") or "" for outputs in received),
        finish_reason=last("finish_reason"),
        num_input_tokens=last("num_input_tokens"),
        num_output_tokens=sum(outputs.get("num_output_tokens", 0) for outputs in received),
        total_draft_tokens=last("total_draft_tokens"),
        total_accepted_draft_tokens=last("total_accepted_draft_tokens"),
        first_response_seconds=first_response_seconds,
        total_seconds=total_seconds,
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m qwen35.client", description="Ask the ensemble a question.")
    parser.add_argument("question")
    parser.add_argument("--image", action="append", type=Path, default=[], metavar="FILE", help="may be repeated")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--stream", action="store_true", help="print the text as it comes")
    parser.add_argument("--http", action="store_true", help="use generate / generate_stream instead of gRPC")
    parser.add_argument("--url", metavar="HOST:PORT", help="default: port 8001 (gRPC) or 8000 (HTTP) of localhost")
    parser.add_argument("--model", default="qwen35")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="the chat template's thinking switch")
    sampling = parser.add_argument_group("sampling parameters, the server's defaults when left out")
    sampling.add_argument("--max-tokens", type=int, default=256)
    sampling.add_argument("--temperature", type=float)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int)
    sampling.add_argument("--seed", type=int)
    sampling.add_argument("--stop", action="append", metavar="TEXT")
    return parser.parse_args(arguments)


def ask(options: argparse.Namespace) -> Completion:
    """Run the command line's request, printing the text as it comes."""
    client = Client(
        options.url,
        protocol="http" if options.http else "grpc",
        model=options.model,
        timeout_seconds=options.timeout,
    )
    system = [{"role": "system", "content": options.system}] if options.system else []
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    return client.chat(
        [*system, user_message(options.question, options.image)],
        stream=options.stream,
        on_text=lambda text: print(text, end="", flush=True),
        chat_template_kwargs=None if options.thinking is None else {"enable_thinking": options.thinking},
        **{name: value for name in names if (value := getattr(options, name)) is not None},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        completion = ask(parse_arguments(arguments))
    except (errors.Qwen35Error, OSError) as error:  # OSError: an image file that cannot be read
        print(f"error: {error}", file=sys.stderr)
        return 1
    print()
    print(completion.summary(), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
