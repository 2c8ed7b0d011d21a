"""NVFP4 arithmetic against a table written by hand and against ModelOpt's own torch implementation."""

import pytest
import torch

from qwen35.nvfp4 import (
    E2M1_VALUES,
    FP8Tensor,
    NVFP4Tensor,
    dequantize,
    fake_quantize_activation,
    fake_quantize_activation_fp8,
    num_bytes,
    quantize_activation,
    quantize_weight,
    unpack,
)

ONE = torch.tensor(1.0)

# A block whose largest magnitude is 6 has the block scale 1 under the global scale 1: values meet the grid as they are.
ROUNDING = [
    # value, code, decoded
    (0.0, 0, 0.0),
    (-0.0, 0, 0.0),
    (0.25, 0, 0.0),  # tie between 0 and 0.5: code 0 is even
    (0.2500001, 1, 0.5),
    (0.5, 1, 0.5),
    (0.75, 2, 1.0),  # tie between codes 1 and 2
    (0.7499999, 1, 0.5),
    (1.0, 2, 1.0),
    (1.25, 2, 1.0),  # tie between codes 2 and 3
    (1.5, 3, 1.5),
    (1.75, 4, 2.0),  # tie between codes 3 and 4
    (2.5, 4, 2.0),  # tie between codes 4 and 5
    (2.6, 5, 3.0),
    (3.5, 6, 4.0),  # tie between codes 5 and 6
    (5.0, 6, 4.0),  # tie between codes 6 and 7
    (5.0001, 7, 6.0),
    (6.0, 7, 6.0),
    (-0.25, 8, 0.0),  # a negative value that rounds to zero keeps its sign in the code, not in the number
    (-0.75, 10, -1.0),
    (-3.5, 14, -4.0),
    (-6.0, 15, -6.0),
]

# Whole blocks under the global scale 1: (largest value, stored block scale, code of the largest value)
BLOCK_SCALES = [
    (0.0, 1.0, 0),  # zero block: scale 1, all codes zero
    (1e-30, 2.0**-9, 0),  # far below the smallest scale
    (1e-4, 2.0**-9, 0),
    (1e-3, 2.0**-9, 1),  # 0.512 steps: still told from zero
    (6 * 2.0**-9, 2.0**-9, 7),  # the smallest scale that is not clamped
    (6 * 2.0**-6, 2.0**-6, 7),  # the smallest normal E4M3 number
    (6.375, 1.0, 7),  # 1.0625 is a tie of E4M3 and goes to the even 1.0; the value saturates
    (6.5625, 1.125, 7),
    (6 * 448.0, 448.0, 7),
    (6 * 448.0 * 2, 448.0, 7),  # beyond the range: scale and value saturate
    (float("inf"), 448.0, 7),
]


@pytest.mark.parametrize(("value", "code", "decoded"), ROUNDING)
def test_rounding_to_e2m1(value: float, code: int, decoded: float) -> None:
    block = torch.full((16,), value)
    block[15] = 6.0
    codes, scales = quantize_activation(block, ONE)
    assert scales.float().tolist() == [1.0]
    assert unpack(codes).tolist() == [code] * 15 + [7]
    assert fake_quantize_activation(block, ONE).tolist() == [decoded] * 15 + [6.0]


@pytest.mark.parametrize(("largest", "scale", "code"), BLOCK_SCALES)
def test_block_scale(largest: float, scale: float, code: int) -> None:
    block = torch.zeros(16)
    block[3] = largest
    codes, scales = quantize_activation(block, ONE)
    assert scales.float().tolist() == [scale]
    assert unpack(codes).tolist() == [0] * 3 + [code] + [0] * 12


def test_low_nibble_is_the_even_column() -> None:
    block = torch.tensor([6.0, 0.5] * 8)
    assert quantize_activation(block, ONE)[0].tolist() == [0x17] * 8


def test_nan_stays_in_its_block() -> None:
    x = torch.full((2, 32), 6.0)
    x[0, 20] = torch.nan
    decoded = fake_quantize_activation(x, ONE)
    assert decoded[0, 16:].isnan().all()
    assert decoded[0, :16].eq(6).all() and decoded[1].eq(6).all()


@pytest.fixture(scope="module")
def modelopt_tensor() -> type:
    """ModelOpt's NVFP4QTensor; imported here because that takes seconds."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    return NVFP4QTensor


def _samples(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    gauss = torch.randn(24, 128, generator=generator)
    heavy = gauss / torch.rand(24, 128, generator=generator).clamp(min=1e-3)
    mixed = gauss.clone()
    mixed[3], mixed[4], mixed[5, :16], mixed[6] = 0, mixed[4] * 1e-7, 0, mixed[6] * 1e4
    return [sample.to(dtype) for sample in (gauss, heavy, mixed)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.01, 30.0])  # static scales that fit, that saturate and that leave room
def test_activations_equal_modelopt(modelopt_tensor, dtype: torch.dtype, factor: float) -> None:
    for x in _samples(dtype):
        input_scale = x.abs().amax().float() / 2688 * factor
        expected, expected_scales, _ = modelopt_tensor.quantize(x.clone(), 16, weights_scaling_factor_2=input_scale)
        codes, scales = quantize_activation(x, input_scale)
        assert torch.equal(codes, expected._quantized_data)
        assert torch.equal(scales.view(torch.uint8), expected_scales.view(torch.uint8))
        decoded = expected.dequantize(dtype, scale=scales, double_scale=input_scale, block_sizes={-1: 16})
        assert torch.equal(fake_quantize_activation(x, input_scale), decoded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_equal_modelopt(modelopt_tensor, dtype: torch.dtype) -> None:
    for weight in _samples(dtype):
        expected, scales, global_scale = modelopt_tensor.quantize(weight.clone(), 16)
        packed = quantize_weight(weight)
        assert torch.equal(packed.codes, expected._quantized_data)
        assert torch.equal(packed.scales.view(torch.uint8), scales.view(torch.uint8))
        assert torch.equal(packed.global_scale, global_scale)
        decoded = expected.dequantize(torch.float32, scale=scales, double_scale=global_scale, block_sizes={-1: 16})
        assert torch.equal(dequantize(packed), decoded)


def test_a_row_does_not_depend_on_its_company() -> None:
    x = _samples(torch.float32)[1]
    codes, scales = quantize_activation(x, torch.tensor(0.01))
    for row in range(x.shape[0]):
        alone = quantize_activation(x[row], torch.tensor(0.01))
        assert torch.equal(alone[0], codes[row])
        assert torch.equal(alone[1].view(torch.uint8), scales[row].view(torch.uint8))


def test_stack_of_experts_equals_its_matrices() -> None:
    stack = (
        torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([1, 10, 0.1])[:, None, None]
    )
    packed = quantize_weight(stack)
    assert packed.shape == (3, 8, 64) and packed.global_scale.shape == (3,)
    decoded = dequantize(packed)
    for expert in range(3):
        single = quantize_weight(stack[expert])
        assert torch.equal(packed[expert].codes, single.codes)
        assert packed[expert].global_scale == single.global_scale
        assert torch.equal(dequantize(packed[expert]), decoded[expert])
        assert torch.equal(dequantize(single), decoded[expert])


def test_every_code_decodes_to_its_number() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | (codes[1::2] << 4)).reshape(1, 8)
    weight = NVFP4Tensor(packed, torch.full((1, 1), 2.0).to(torch.float8_e4m3fn), torch.tensor(0.5))
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert dequantize(weight)[0].tolist() == numbers == list(E2M1_VALUES)
    assert not torch.signbit(dequantize(weight)[0, 8])


def test_matrix_of_zeros() -> None:
    packed = quantize_weight(torch.zeros(4, 32))
    assert packed.global_scale == 1
    assert dequantize(packed).eq(0).all()


def test_fp8_weight_and_activation() -> None:
    weight = FP8Tensor(torch.tensor([[1.0, -448.0]]).to(torch.float8_e4m3fn), torch.tensor(0.5), torch.tensor(2.0))
    assert dequantize(weight).tolist() == [[0.5, -224.0]]
    assert fake_quantize_activation_fp8(torch.tensor([1000.0, 2.1, -1.0]), weight.input_scale).tolist() == [896, 2, -1]
    stack = FP8Tensor(torch.ones(2, 1, 2).to(torch.float8_e4m3fn), torch.tensor([0.5, 3.0]))
    assert dequantize(stack).tolist() == [[[0.5, 0.5]], [[3.0, 3.0]]]
    assert dequantize(stack[1]).tolist() == [[3.0, 3.0]]


def test_dequantize_leaves_dense_weights() -> None:
    weight = torch.randn(2, 3).bfloat16()
    assert torch.equal(dequantize(weight, torch.float32), weight.float())
    assert dequantize(weight, torch.bfloat16) is weight


def test_num_bytes() -> None:
    assert quantize_weight(torch.randn(8, 64)).num_bytes == 8 * 32 + 8 * 4 + 4
    assert num_bytes(torch.zeros(4, 4, dtype=torch.bfloat16)) == 32


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"codes": torch.zeros(2, 16)}, "codes: expected torch.uint8"),
        ({"scales": torch.zeros(2, 2)}, "scales: expected torch.float8_e4m3fn"),
        ({"scales": torch.zeros(2, 3).to(torch.float8_e4m3fn)}, r"expected shape \(2, 2\)"),
        ({"global_scale": torch.ones(3)}, r"global scale: expected float32 of shape \(\) or \(\)"),
        ({"global_scale": torch.ones((), dtype=torch.float64)}, "global scale: expected float32"),
        ({"input_scale": torch.ones(2)}, "input scale"),
    ],
)
def test_parts_that_do_not_fit(parts: dict, message: str) -> None:
    good = {
        "codes": torch.zeros(2, 16, dtype=torch.uint8),
        "scales": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "global_scale": ONE,
    }
    NVFP4Tensor(**good)
    with pytest.raises(ValueError, match=message):
        NVFP4Tensor(**{**good, **parts})


def test_what_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize_weight(torch.zeros(2, 24))
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize_activation(torch.zeros(2, 24), ONE)
    with pytest.raises(ValueError, match="finite"):
        quantize_weight(torch.full((2, 16), torch.nan))
    with pytest.raises(IndexError, match="no stack"):
        quantize_weight(torch.zeros(2, 16))[0]
