from qwen35.serving.state_manager import TritonPythonModel  # noqa: F401
