"""A row's bits do not depend on how many rows there are, on its place, or on its company."""

import pytest
import torch

from qwen35.kernels.reference import ReferenceOps
from qwen35.nvfp4 import FP8Tensor, quantize_weight

OPS = ReferenceOps()
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
PLACES = [(count, place) for count in (1, 2, 4, 15, 16, 17, 33) for place in sorted({0, count // 2, count - 1})]
PLACES += [(16, place) for place in range(1, 15)]


def beside_company(apply, row):
    """`apply` on the row alone and in many places; every result for the row, the lone one first."""
    yield apply(row.unsqueeze(0))[0]
    for count, place in PLACES:
        company = torch.randn(count, *row.shape).mul(torch.rand(count, *[1] * row.ndim) * 8).to(row.dtype)
        company[place] = row
        yield apply(company)[place]


def first(x):
    """Contiguous, as activations are: then vectors run across rows, and their ends fall anywhere in a row."""
    return x[:, 0].contiguous()


def second(x):
    return x[:, 1].contiguous()


def assert_invariant(apply, row):
    alone, *others = beside_company(apply, row)
    assert torch.isfinite(alone).all()
    assert [torch.equal(alone, other) for other in others] == [True] * len(others)


def weight_of(kind, num_rows, width, dtype):
    dense = torch.randn(num_rows, width) * 0.1
    if kind == "nvfp4":
        return quantize_weight(dense, input_scale=torch.tensor(0.01))
    if kind == "fp8":
        return FP8Tensor((dense * 100).to(torch.float8_e4m3fn), torch.tensor(0.01))
    return dense.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "nvfp4", "fp8"])
@pytest.mark.parametrize(("width", "num_rows"), [(64, 1), (128, 4), (48, 72), (128, 256), (256, 1000)])
def test_linear(kind, width, num_rows, dtype):
    torch.manual_seed(width)
    weight = weight_of(kind, num_rows, width, dtype)
    assert_invariant(lambda x: OPS.linear(x, weight, out_dtype=torch.float32), torch.randn(width).to(dtype))


def test_linear_with_quantized_inputs():
    ops = ReferenceOps(activations="nvfp4")
    weight = weight_of("nvfp4", 96, 64, torch.float32)
    assert_invariant(lambda x: ops.linear(x, weight), torch.randn(64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "nvfp4"])
def test_router_and_experts(kind, dtype):
    torch.manual_seed(3)
    num_experts, hidden, width, top = 8, 64, 32, 3
    gate = torch.randn(num_experts, hidden).to(dtype)
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    stacks = [torch.randn(num_experts, *size) * 0.2 for size in sizes]
    stacks = [quantize_weight(stack) if kind == "nvfp4" else stack.to(dtype) for stack in stacks]

    def apply(x):
        return OPS.moe_experts(x, *OPS.route(x, gate, top), *stacks)

    assert_invariant(apply, torch.randn(hidden).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4, 36, 64, 250])
def test_functions_of_rows(width, dtype):
    torch.manual_seed(width)
    row, scale = torch.randn(2, width).mul(5).to(dtype), torch.rand(width)
    row_of_heads = torch.randn(3, width).to(dtype)
    assert_invariant(lambda x: OPS.rms_norm(first(x), scale, 1e-6), row)
    assert_invariant(lambda x: OPS.gated_rms_norm(first(x).float(), second(x), scale, 1e-6), row)
    assert_invariant(lambda x: OPS.silu_mul(first(x), second(x)), row)
    assert_invariant(lambda x: OPS.sigmoid_mul(first(x)[:, :1], second(x)), row)
    assert_invariant(lambda x: torch.stack(OPS.delta_gates(first(x), second(x), -scale, scale), 1), row)
    angles = torch.rand(width // 4) * 6

    def rotate(x):
        tables = [table.expand(len(x), -1) for table in (angles.cos(), angles.sin())]
        return OPS.rotate(x, *tables)

    assert_invariant(rotate, row_of_heads)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_many_rows_split_among_threads(num_threads):
    """Enough elements that torch cuts them up: neither the cuts nor the ends of the vectors show."""
    torch.manual_seed(0)
    rows, width, before = torch.randn(701, 2, 132), 132, torch.get_num_threads()
    scale, weight = torch.rand(width), torch.randn(40, width)
    functions = (
        lambda x: OPS.rms_norm(first(x), scale, 1e-6),
        lambda x: OPS.gated_rms_norm(first(x), second(x), scale, 1e-6),
        lambda x: OPS.silu_mul(first(x), second(x)),
        lambda x: OPS.sigmoid_mul(first(x), second(x)),
        lambda x: torch.cat(OPS.delta_gates(first(x), second(x), -scale, scale), 1),
        lambda x: OPS.linear(first(x), weight),
        lambda x: torch.cat(OPS.route(first(x), weight, 6), 1),
    )
    torch.set_num_threads(num_threads)
    try:
        for function in functions:
            whole = function(rows)
            assert [
                place for place in range(0, 701, 10) if not torch.equal(function(rows[[place]])[0], whole[place])
            ] == []
    finally:
        torch.set_num_threads(before)


def test_rotary_tables():
    inv_freq, axes = 10000.0 ** -(torch.arange(8) / 8), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    row = torch.tensor([7, 300, 65000])

    def apply(positions):
        return torch.cat(OPS.rotary_tables(positions.t(), inv_freq, axes), 1)

    alone = apply(row.unsqueeze(0))[0]
    for count, place in PLACES:
        company = torch.randint(0, 10000, (count, 3))
        company[place] = row
        assert torch.equal(alone, apply(company)[place])
