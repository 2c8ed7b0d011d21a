"""Triton model `vision_encoder`: prompt and images to token ids, positions, embeddings and the resolved request."""

from __future__ import annotations

import json
import time
from typing import Any

import triton_python_backend_utils as pb_utils

from qwen35.devices import select_device
from qwen35.errors import Cancelled, DeadlineExceeded
from qwen35.serving.encoding import Encoded, RequestEncoder, has_images
from qwen35.serving.options import PromptSource, resolve
from qwen35.serving.process import ServerProcess, prepare_process, settings_of
from qwen35.serving.resolved import ResolvedRequest
from qwen35.serving.tensors import InputReader, TritonReply, text_tensor
from qwen35.serving.workers import WorkerPool


class TritonPythonModel:
    """Decoupled, exactly one response: `request` STRING [1] (JSON), `token_ids` INT32 [N], `positions` INT32 [3, N],
    `embeds` BF16 [M, H]; or an error. Inputs: all of both ensembles, every one optional.

    Prompts without images have a worker of their own, so that none waits behind an image.
    """

    def initialize(self, args: dict[str, str]) -> None:
        prepare_process()
        self._server = ServerProcess()
        settings = settings_of(args)
        self._reader = InputReader(json.loads(args["model_config"]))
        self._timeout_seconds = settings.request_timeout_seconds
        self._encoder = RequestEncoder.load(settings, select_device(settings.device))
        self._text_worker = WorkerPool("text", 1, settings.max_queued_requests)
        self._image_workers = WorkerPool("image", settings.num_vision_workers, settings.max_queued_requests)
        self._server.when_gone(self.finalize)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            reply = TritonReply(pb_utils, request, self._server)
            try:
                self._accept(request, reply)
            except Exception as error:
                reply.refuse(error, "vision_encoder")

    def finalize(self) -> None:
        for workers in (self._text_worker, self._image_workers):
            workers.close()

    def _accept(self, request: Any, reply: TritonReply) -> None:
        resolved, source = resolve(self._reader.read(request), request_timeout_seconds=self._timeout_seconds)
        workers = self._image_workers if has_images(source) else self._text_worker
        workers.submit(self._encode, resolved, source, reply)

    def _encode(self, resolved: ResolvedRequest, source: PromptSource, reply: TritonReply) -> None:
        try:
            if reply.is_cancelled():
                raise Cancelled()
            if time.time_ns() > resolved.deadline_unix_ns:
                raise DeadlineExceeded("deadline: expected the prompt to be encoded before it, got no worker in time")
            reply.send_tensors(_tensors(self._encoder.encode(resolved, source)), is_final=True)
        except Exception as error:
            reply.refuse(error, "vision_encoder")


def _tensors(encoded: Encoded) -> list[Any]:
    return [
        text_tensor(pb_utils, "request", encoded.request.to_json()),
        pb_utils.Tensor("token_ids", encoded.token_ids.numpy()),
        pb_utils.Tensor("positions", encoded.positions.numpy()),
        pb_utils.Tensor.from_dlpack("embeds", encoded.embeds),
    ]
