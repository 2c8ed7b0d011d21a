"""Choice of the operations from the settings."""

import pytest
import torch

from qwen35.errors import ConfigError
from qwen35.kernels.cpu import CpuOps
from qwen35.kernels.reference import ReferenceOps
from qwen35.kernels.select import DEFAULT_ACTIVATIONS, select_ops
from qwen35.nvfp4 import fake_quantize_activation, quantize_weight
from qwen35.settings import Settings


@pytest.mark.parametrize(
    "settings", [{"kernels": "reference"}, {"dtype": "float32"}, {"kernels": "auto", "dtype": "float64"}]
)
def test_reference_is_chosen(settings):
    assert isinstance(select_ops(Settings(**settings), "cpu"), ReferenceOps)


@pytest.mark.parametrize("kernels", ["auto", "cpu"])
def test_native_is_chosen(native_library, kernels):
    assert isinstance(select_ops(Settings(kernels=kernels), "cpu"), CpuOps)


def test_without_the_library(monkeypatch, tmp_path):
    monkeypatch.setenv("QWEN35_NATIVE_LIBRARY", str(tmp_path / "none.so"))
    with pytest.warns(UserWarning, match="python -m build.native"):
        assert isinstance(select_ops(Settings(), "cpu"), ReferenceOps)
    with pytest.raises(ConfigError, match="python -m build.native"):
        select_ops(Settings(kernels="cpu"), "cpu")


def test_native_needs_a_cpu():
    with pytest.raises(ConfigError, match="on device cuda"):
        select_ops(Settings(kernels="cpu"), "cuda")


def test_activations_setting():
    weight, x = quantize_weight(torch.randn(16, 32), input_scale=torch.tensor(0.01)), torch.randn(2, 32)
    rounded = fake_quantize_activation(x, weight.input_scale)
    dense, quantized = (select_ops(Settings(activations=kind), "cpu") for kind in ("dense", "nvfp4"))
    assert torch.equal(quantized.linear(x, weight), dense.linear(rounded, weight))
    assert not torch.equal(quantized.linear(x, weight), dense.linear(x, weight))


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_activations_of_their_own_choice(native_library, kernels):
    default = {"reference": "dense", "cpu": DEFAULT_ACTIVATIONS}[kernels]
    choices = {"auto": default} | {name: name for name in ("dense", "int8", "int11", "nvfp4")}
    for activations, expected in choices.items():
        ops = select_ops(Settings(kernels=kernels, activations=activations), "cpu")
        assert ops.identity.endswith(f"/{expected}")


def test_unknown_device_is_refused():
    with pytest.raises(RuntimeError):
        select_ops(Settings(), "abacus")


def test_number_of_threads_is_set():
    before = torch.get_num_threads()
    try:
        select_ops(Settings(num_threads=2), "cpu")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
