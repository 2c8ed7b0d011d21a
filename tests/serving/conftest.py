import os

import pytest

from qwen35.serving import process


@pytest.fixture(autouse=True)
def any_parent_is_a_server(monkeypatch):
    """The parent of a test is no tritonserver; gives the function that would say so."""
    real = process._server_pid
    monkeypatch.setattr(process, "_server_pid", os.getppid)
    return real
