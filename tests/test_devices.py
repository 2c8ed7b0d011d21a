"""Names of devices and types."""

import pytest
import torch

from qwen35.devices import select_device, select_dtype
from qwen35.errors import ConfigError


@pytest.mark.parametrize(("has_gpu", "kind"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_a_gpu_when_there_is_one(monkeypatch, has_gpu, kind):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert select_device("auto").type == kind


def test_names():
    assert select_device("cuda:1") == torch.device("cuda", 1)
    for name in ("gpu", "mps", "xpu:0", "cpu:0", "cuda:", "cuda:x", "meta", ""):
        with pytest.raises(ConfigError, match=f"device: expected auto, cpu, cuda or cuda:N, got '{name}'"):
            select_device(name)
    assert select_dtype("auto") is None and select_dtype("bfloat16") is torch.bfloat16
