"""Triton tensors and errors to plain values and back. The only knowledge of pb_utils' objects that the models share;
``pb_utils`` comes as an argument, so that tests can give a fake."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen35.errors import InternalError, InvalidArgument, Qwen35Error
from qwen35.serving.options import IMAGE_INPUTS, RawRequest
from qwen35.serving.process import ServerProcess
from qwen35.serving.responses import Response


class InputReader:
    """Reads all inputs that a request has, by the dims of the model's config: [1] gives a value, [-1] a list."""

    def __init__(self, model_config: Mapping[str, Any]) -> None:
        self._is_list = {entry["name"]: list(map(int, entry["dims"])) != [1] for entry in model_config["input"]}

    def read(self, request: Any) -> RawRequest:
        """Raises InvalidArgument for text that is not UTF-8."""
        return RawRequest(
            inputs={tensor.name(): self._value(tensor) for tensor in request.inputs()},
            parameters=json.loads(request.parameters() or "{}"),
            request_id=request.request_id(),
            timeout_us=request.timeout(),
        )

    def _value(self, tensor: Any) -> Any:
        name, array = tensor.name(), tensor.as_numpy()
        if name == "image_bytes_input":
            return list(array)  # one [height, width, channels] an image
        if name in IMAGE_INPUTS:
            return [_bytes(item) for item in array.reshape(-1)]
        values = [_plain(name, item) for item in array.reshape(-1)]
        if self._is_list[name]:
            return values
        return values[0] if values else None


def _bytes(item: bytes | str) -> bytes:
    return item.encode("utf-8") if isinstance(item, str) else bytes(item)


def _plain(name: str, item: Any) -> Any:
    """A Python value. A float keeps the digits that its client wrote (0.7, not 0.699999988)."""
    if isinstance(item, (bytes, str)):
        return text_of(name, item)
    return float(str(item)) if isinstance(item, np.floating) else item.item()


def text_of(name: str, item: bytes | str) -> str:
    try:
        return item if isinstance(item, str) else item.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name}: expected UTF-8 text, got bytes that are not ({error.reason})") from error


def text_input(pb_utils: Any, request: Any, name: str) -> str:
    """The single text of a required STRING input."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        raise InvalidArgument(f"{name}: expected a tensor, got none")
    return text_of(name, tensor.as_numpy().reshape(-1)[0])


def torch_input(pb_utils: Any, request: Any, name: str) -> Tensor:
    """A tensor that aliases the request's memory; valid until the request's last response and after it."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        raise InvalidArgument(f"{name}: expected a tensor, got none")
    return torch.from_dlpack(tensor.to_dlpack())


def text_tensor(pb_utils: Any, name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode("utf-8")], dtype=np.object_))


def triton_error(pb_utils: Any, error: Qwen35Error) -> Any:
    """Triton's error of the same code; those that it does not know travel as UNAVAILABLE, the message tells them."""
    kinds = pb_utils.TritonError
    return kinds(str(error), getattr(kinds, error.code, kinds.UNAVAILABLE))


class TritonReply:
    """Sends the responses of one decoupled request. Thread-safe.

    The server frees what ``is_cancelled`` looks at when the final response has arrived, and dies of a question that
    comes later or at the same moment: hence the lock, and no question after the end.
    """

    def __init__(self, pb_utils: Any, request: Any, server: ServerProcess) -> None:
        self._pb_utils = pb_utils
        self._server = server
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._has_ended = False

    def send(self, response: Response) -> None:
        if response.error is not None:
            self.fail(response.error)
            return
        self.send_tensors([_tensor(self._pb_utils, n, a) for n, a in response.outputs.items()], response.is_final)

    def send_tensors(self, tensors: list[Any], is_final: bool) -> None:
        flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0
        self._send(self._pb_utils.InferenceResponse(output_tensors=tensors), flags)

    def fail(self, error: Qwen35Error) -> None:
        """The last response: an error and nothing else."""
        response = self._pb_utils.InferenceResponse(output_tensors=[], error=triton_error(self._pb_utils, error))
        self._send(response, self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def refuse(self, error: Exception, who: str) -> None:
        """Whatever went wrong: one error response. A client sees no traceback and no detail of a fault of ours."""
        if not isinstance(error, Qwen35Error):
            log_fault(self._pb_utils, self._server, who, error)
            error = InternalError(f"{who}: the request failed with {type(error).__name__}")
        try:
            self.fail(error)
        except Exception as failure:  # the client is gone, or the server stops
            log_fault(self._pb_utils, self._server, f"{who}: no way to a client", failure)

    def is_cancelled(self) -> bool:
        with self._lock:
            if self._has_ended:
                return False
            return not self._server.is_alive or self._sender.is_cancelled()

    def _send(self, response: Any, flags: int) -> None:
        if not self._server.is_alive:
            raise ConnectionError("response: expected a server to send it through, got one that is dead")
        with self._lock:
            self._has_ended = self._has_ended or flags != 0
            self._sender.send(response, flags=flags)


def log_fault(pb_utils: Any, server: ServerProcess, who: str, error: BaseException) -> None:
    """To the server's log, with the traceback, while there is a server."""
    if server.is_alive:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        pb_utils.Logger.log_error(f"{who}: {text}".encode("utf-8", "backslashreplace").decode("utf-8"))


def _tensor(pb_utils: Any, name: str, array: np.ndarray) -> Any:
    if array.dtype == np.object_:
        array = np.array([text.encode("utf-8", "replace") for text in array], dtype=np.object_)
    return pb_utils.Tensor(name, array)
