from qwen35.serving.llm import TritonPythonModel  # noqa: F401
