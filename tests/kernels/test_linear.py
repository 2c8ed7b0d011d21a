"""Linear layers against a plain product; the cache of dense weights."""

import pytest
import torch

from qwen35.kernels.reference import ReferenceOps
from qwen35.kernels.reference.dense import DenseWeights
from qwen35.nvfp4 import FP8Tensor, dequantize, fake_quantize_activation, quantize_weight


def packed(kind, *shape):
    dense = torch.randn(*shape) * 0.1
    if kind == "nvfp4":
        return quantize_weight(dense, input_scale=torch.tensor(0.02))
    return FP8Tensor((dense * 100).to(torch.float8_e4m3fn), torch.tensor(0.01), torch.tensor(0.02))


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
def test_product_of_packed_weights(kind):
    weight, bias, x = packed(kind, 40, 64), torch.randn(40), torch.randn(2, 9, 64)
    expected = x @ dequantize(weight).t() + bias
    torch.testing.assert_close(ReferenceOps().linear(x, weight, bias), expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_rounded_once():
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(24, 64).bfloat16()
    exact = (x.double() @ weight.double().t()).bfloat16()
    got = ReferenceOps().linear(x, weight)
    assert got.dtype == torch.bfloat16
    assert (got != exact).float().mean() < 0.01  # only where float32 and float64 sums fall on two sides of a bound
    assert ReferenceOps().linear(x, weight, out_dtype=torch.float32).dtype == torch.float32


def test_activations_quantized_with_the_static_scale():
    weight, x = packed("nvfp4", 40, 64), torch.randn(3, 64)
    expected = fake_quantize_activation(x, weight.input_scale) @ dequantize(weight).t()
    got = ReferenceOps(activations="nvfp4").linear(x, weight)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert (got - ReferenceOps().linear(x, weight)).abs().max() > 1e-2


def test_no_rows():
    assert ReferenceOps().linear(torch.empty(0, 64), packed("nvfp4", 40, 64)).shape == (0, 40)


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
def test_results_are_the_same_without_cache(kind):
    weight, x = packed(kind, 40, 64), torch.randn(3, 64)
    cached, uncached = ReferenceOps(), ReferenceOps(dense_cache_bytes=0)
    results = [ops.linear(x, weight) for ops in (cached, cached, uncached, uncached)]
    assert all(torch.equal(results[0], result) for result in results)


def test_cache_is_bounded_and_drops_the_least_recently_used():
    matrix_bytes = 40 * 64 * 4
    dense = DenseWeights(2 * matrix_bytes)
    first, second, third = (packed("nvfp4", 40, 64) for _ in range(3))
    held = {weight: dense.matrix(weight, torch.float32).data_ptr() for weight in (first, second)}
    assert dense.matrix(first, torch.float32).data_ptr() == held[first]
    dense.matrix(third, torch.float32)  # drops the second
    assert dense.held_bytes == 2 * matrix_bytes
    assert dense.matrix(first, torch.float32).data_ptr() == held[first]
    large = DenseWeights(matrix_bytes - 1)
    large.matrix(first, torch.float32)
    assert large.held_bytes == 0


def test_large_weights_come_in_row_blocks(monkeypatch):
    monkeypatch.setattr("qwen35.kernels.reference.dense._BLOCK_BYTES", 64 * 4 * 16)
    weight, x = packed("nvfp4", 40, 64), torch.randn(3, 64)
    assert [block.shape for block in DenseWeights(0).blocks(weight, torch.float32)] == [(64, 16), (64, 16), (64, 8)]
    expected = x @ dequantize(weight).t()
    torch.testing.assert_close(ReferenceOps().linear(x, weight), expected, atol=1e-5, rtol=1e-5)
