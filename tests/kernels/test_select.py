"""Choice of the operations from the settings."""

import pytest
import torch

from qwen35.kernels.reference import ReferenceOps
from qwen35.kernels.select import select_ops
from qwen35.nvfp4 import fake_quantize_activation, quantize_weight
from qwen35.settings import Settings


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_reference_is_chosen(kernels):
    assert isinstance(select_ops(Settings(kernels=kernels), "cpu"), ReferenceOps)


def test_activations_setting():
    weight, x = quantize_weight(torch.randn(16, 32), input_scale=torch.tensor(0.01)), torch.randn(2, 32)
    rounded = fake_quantize_activation(x, weight.input_scale)
    dense, quantized = (select_ops(Settings(activations=kind), "cpu") for kind in ("dense", "nvfp4"))
    assert torch.equal(quantized.linear(x, weight), dense.linear(rounded, weight))
    assert not torch.equal(quantized.linear(x, weight), dense.linear(x, weight))


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
