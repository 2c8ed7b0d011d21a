"""A model repository with nothing of ours in it, to test the launcher: ensemble `qwen35` over a decoupled echo model.

Prompts that begin with "crash" end the stub, "sleep" holds the answer back for a second; "leak" leaves a file in
/dev/shm under the server's own name. The model answers every other prompt with the prompt.
"""

from pathlib import Path

_MODEL = """
import os
import pathlib
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        if os.environ.get("QWEN35_FAIL"):
            raise pb_utils.TritonModelException("told to fail: " + os.environ["QWEN35_FAIL"])

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender = request.get_response_sender()
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0]
        if text.startswith(b"crash"):
            os._exit(3)
        if text.startswith(b"sleep"):
            time.sleep(1)
        if text.startswith(b"leak"):
            pathlib.Path("/dev/shm", f"qwen35-{os.getppid()}-leak").write_bytes(b"leak")
        output = pb_utils.Tensor("text_output", np.array([text], dtype=object))
        sender.send(pb_utils.InferenceResponse([output]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

_INTERFACE = """
max_batch_size: 0
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""

_ECHO_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
instance_group [ { count: 1 kind: KIND_MODEL } ]
"""

_ENSEMBLE_CONFIG = """
platform: "ensemble"
ensemble_scheduling { step [ {
  model_name: "echo" model_version: -1
  input_map { key: "text_input" value: "text_input" }
  output_map { key: "text_output" value: "text_output" }
} ] }
"""


def write_echo_repository(directory: Path) -> Path:
    """Create the repository below `directory` and return it."""
    for name, config in (("echo", _ECHO_CONFIG), ("qwen35", _ENSEMBLE_CONFIG)):
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "config.pbtxt").write_text(f'name: "{name}"{_INTERFACE}{config}', encoding="utf-8")
    (directory / "echo" / "1" / "model.py").write_text(_MODEL, encoding="utf-8")
    return directory
