"""The three Triton models: thin adapters around the pure core; alone in importing triton_python_backend_utils."""
