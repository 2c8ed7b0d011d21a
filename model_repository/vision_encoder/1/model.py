from qwen35.serving.vision_encoder import TritonPythonModel  # noqa: F401
