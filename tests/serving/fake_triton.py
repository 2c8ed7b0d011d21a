"""As much of triton_python_backend_utils as the serving package uses, in memory."""

import importlib
import json
import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    @classmethod
    def from_dlpack(cls, name, tensor):
        assert tensor.is_contiguous()
        return cls(name, tensor)

    def name(self):
        return self._name

    def as_numpy(self):
        assert isinstance(self._array, np.ndarray), "as_numpy() raises for BF16"
        return self._array

    def to_dlpack(self):
        tensor = self._array if isinstance(self._array, torch.Tensor) else torch.from_numpy(self._array)
        return torch.utils.dlpack.to_dlpack(tensor)


class TritonError(Exception):
    INTERNAL, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, CANCELLED = range(5)

    def __init__(self, message, code=INTERNAL):
        super().__init__(message)
        self.code = code

    def message(self):
        return str(self)


class InferenceResponse:
    def __init__(self, output_tensors, error=None):
        self.outputs = {tensor.name(): tensor for tensor in output_tensors}
        self.failure = error

    def has_error(self):
        return self.failure is not None

    def error(self):
        return self.failure


class Sender:
    def __init__(self):
        self.responses, self.num_finals = [], 0
        self.cancelled = False
        self.done = threading.Event()

    def send(self, response=None, flags=0):
        assert self.num_finals == 0, "a response after the final one"
        self.responses.append(response)
        if flags:
            self.num_finals += 1
            self.done.set()

    def is_cancelled(self):
        return self.cancelled


class Request:
    """Inputs are numpy arrays or torch tensors by name."""

    def __init__(self, inputs, parameters=None, request_id="", timeout=0):
        self._inputs = [Tensor(name, array) for name, array in inputs.items()]
        self._parameters, self._id, self._timeout = parameters, request_id, timeout
        self.sender = Sender()
        self.requested = []

    def inputs(self):
        return self._inputs

    def parameters(self):
        return json.dumps(self._parameters) if self._parameters else ""

    def request_id(self):
        return self._id

    def timeout(self):
        return self._timeout

    def requested_output_names(self):
        return self.requested

    def get_response_sender(self):
        return self.sender


class InferenceRequest:
    """A call to another model: ``answer`` (operation, message) -> object, or raises."""

    answer = None

    def __init__(self, model_name, requested_output_names, inputs):
        assert (model_name, requested_output_names) == ("state_manager", ["result"])
        self._texts = {tensor.name(): tensor.as_numpy()[0].decode() for tensor in inputs}

    def exec(self):
        try:
            answer = type(self).answer(self._texts["operation"], json.loads(self._texts["request"]))
        except Exception as error:
            return InferenceResponse([], TritonError(str(error)))
        return InferenceResponse([Tensor("result", text(json.dumps(answer)))])


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name, description, kind):
        pass

    def Metric(self, labels, buckets=None):
        return self

    def increment(self, value):
        pass

    set = observe = increment


class Logger:
    lines = []

    @classmethod
    def log_error(cls, text):
        cls.lines.append(text)

    log_warn = log_info = log_error


def make_module():
    """A module for ``sys.modules["triton_python_backend_utils"]``."""
    module = ModuleType("triton_python_backend_utils")
    for part in (Tensor, TritonError, InferenceResponse, InferenceRequest, MetricFamily, Logger):
        setattr(module, part.__name__, part)
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    module.get_input_tensor_by_name = get_input_tensor_by_name
    module.get_output_tensor_by_name = lambda response, name: response.outputs.get(name)
    return module


def get_input_tensor_by_name(request, name):
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def load_model(monkeypatch, name):
    """`qwen35.serving.NAME` imported anew over the fake; gone again when the test ends."""
    module_name = f"qwen35.serving.{name}"
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", make_module())
    monkeypatch.delitem(sys.modules, module_name, raising=False)
    module = importlib.import_module(module_name)
    monkeypatch.delitem(sys.modules, module_name)
    return module


def text(value):
    return np.array([value.encode()], dtype=np.object_)


def model_args(name, **settings):
    """What Triton gives to initialize, from the model's checked-in config."""
    path = Path(__file__).parents[2] / "model_repository" / name / "config.pbtxt"
    parsed = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    config = json_format.MessageToDict(parsed, preserving_proto_field_name=True)
    for key, value in settings.items():
        config["parameters"][key] = {"string_value": str(value)}
    return {"model_config": json.dumps(config), "model_repository": str(path.parent), "model_version": "1"}
