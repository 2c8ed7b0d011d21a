"""Products of the native kernels: every choice of activations, every instruction set, any number of rows."""

import pytest
import torch

from qwen35.kernels.cpu import CpuOps
from qwen35.kernels.cpu.recipe import instruction_sets
from qwen35.kernels.cpu.weights import PanelLayout, lay_out
from qwen35.kernels.reference import ReferenceOps
from qwen35.nvfp4 import (
    INT8_LEVELS,
    INT11_LEVELS,
    FP8Tensor,
    NVFP4Panels,
    NVFP4Tensor,
    dequantize,
    fake_quantize_activation_levels,
    quantize_weight,
)

BF16, FLOAT = torch.bfloat16, torch.float32
ACTIVATIONS = ["dense", "int8", "int11", "nvfp4"]
COUNTS = [1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 32, 41, 64, 65, 81, 129]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(11)


@pytest.fixture(params=instruction_sets())
def instruction_set(request, native_library):
    if native_library.qwen35_select(request.param.encode()) is None:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    native_library.qwen35_select(b"")


@pytest.fixture
def every_instruction_set(native_library):
    """Calls a function on each instruction set of this CPU: name -> result."""

    def run(function):
        names = [name for name in instruction_sets() if native_library.qwen35_select(name.encode()) is not None]
        return {name: (native_library.qwen35_select(name.encode()), function())[1] for name in names}

    yield run
    native_library.qwen35_select(b"")


def nvfp4(*shape, input_scale=0.01):
    return quantize_weight(torch.randn(*shape) * 0.1, input_scale=torch.tensor(input_scale))


def weight_of(kind, *shape):
    if kind == "nvfp4":
        return nvfp4(*shape)
    dense = torch.randn(*shape) * 0.1
    return FP8Tensor((dense * 100).to(torch.float8_e4m3fn), torch.tensor(0.01)) if kind == "fp8" else dense.to(BF16)


def rows(count, width):
    """Some channels and some rows much larger than the rest, one block of zeros."""
    x = torch.randn(count, width) * torch.rand(count, 1).mul(6).exp()
    x[:, 3] *= 40
    x[:, -16:] *= torch.arange(count).remainder(3).ne(1).unsqueeze(1)
    return x.to(BF16)


def close(got, expected):
    """To rounding of float32 sums: relative to the size of the whole row."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    error = (got.float() - expected.float()).abs().amax(-1)
    bound = (5e-6 if got.dtype == FLOAT else 2e-2) * expected.float().abs().amax(-1)
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("shape", [(16, 16), (33, 80), (1, 48), (3, 40, 272)])
def test_layout(native_library, shape):
    weight = nvfp4(*shape)
    panels, twin = lay_out(weight), NVFP4Panels.from_rows(weight)
    assert panels.shape == weight.shape
    assert torch.equal(panels.codes, twin.codes)
    assert torch.equal(panels.scales.view(torch.uint8), twin.scales.view(torch.uint8))
    back = panels.to_rows()
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.scales.view(torch.uint8), weight.scales.view(torch.uint8))


def test_layout_in_pieces(native_library):
    """As a file streams in: 64 rows at a time, codes and scales apart, in any order."""
    weight, layout = nvfp4(150, 48), PanelLayout()
    panels, whole = layout.target(weight, lambda shape, dtype: torch.empty(shape, dtype=dtype)), lay_out(weight)
    for part in ("scales", "codes"):
        for first_row in (128, 0, 64):
            layout.store(panels, part, None, first_row, getattr(weight, part)[first_row : first_row + 64])
    assert torch.equal(panels.codes, whole.codes)
    assert torch.equal(panels.scales.view(torch.uint8), whole.scales.view(torch.uint8))


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize(("outputs", "width"), [(33, 80), (1, 16), (64, 128), (50, 272)])
def test_linear(instruction_set, activations, outputs, width):
    ops, twin = CpuOps(activations=activations), ReferenceOps(activations=activations)
    weight, bias, x = nvfp4(outputs, width), torch.randn(outputs), rows(41, width)
    for count in (1, 2, 9, 41):
        close(ops.linear(x[:count], weight, bias, FLOAT), twin.linear(x[:count], weight, bias, FLOAT))
        close(ops.linear(x[:count], weight), twin.linear(x[:count], weight))


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize(("hidden", "width"), [(64, 48), (48, 16), (160, 96)])
def test_experts(instruction_set, activations, hidden, width):
    """Expert 5 has no rows; each expert has an input scale of its own."""
    stacks = [nvfp4(8, *size) for size in ((width, hidden), (width, hidden), (hidden, width))]
    scales = torch.linspace(0.005, 0.02, 8)
    stacks = [NVFP4Tensor(stack.codes, stack.scales, stack.global_scale, scales) for stack in stacks]
    ops, twin = CpuOps(activations=activations), ReferenceOps(activations=activations)
    for count in (1, 2, 37):
        x = torch.randn(count, hidden).to(BF16)
        ids = torch.tensor([0, 1, 2, 3, 4, 6, 7])[torch.rand(count, 7).argsort(-1)[:, :3]].sort(-1).values
        shares = torch.rand(count, 3)
        close(ops.moe_experts(x, ids, shares, *stacks), twin.moe_experts(x, ids, shares, *stacks))


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["dense", "nvfp4", "fp8"])
def test_any_number_of_rows(instruction_set, kind, activations):
    """Bit for bit, on both sides of every choice by the number of rows."""
    if kind != "nvfp4" and activations != "dense":
        pytest.skip("only NVFP4 weights have a choice")
    ops, weight, x = CpuOps(activations=activations), weight_of(kind, 90, 208), rows(600, 208)
    whole = ops.linear(x, weight, out_dtype=FLOAT)
    assert whole.isfinite().all()
    for count in COUNTS:
        for start in (0, 600 - count):
            part = ops.linear(x[start : start + count], weight, out_dtype=FLOAT)
            assert torch.equal(part, whole[start : start + count]), (count, start)


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_experts_of_any_number_of_tokens(instruction_set, activations):
    stacks = [nvfp4(4, *size) for size in ((80, 64), (80, 64), (64, 80))]
    ops, x, gate = CpuOps(activations=activations), torch.randn(300, 64).to(BF16), torch.randn(4, 64).to(BF16)
    ids, shares = ops.route(x, gate, 2)
    whole = ops.moe_experts(x, ids, shares, *stacks)
    for count in COUNTS:
        part = ops.moe_experts(x[-count:], ids[-count:], shares[-count:], *stacks)
        assert torch.equal(part, whole[-count:]), count


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_one_order_for_all_instruction_sets(every_instruction_set, activations):
    """Integers agree everywhere; with bf16 activations portable code may round a product first."""
    ops, weight, x = CpuOps(activations=activations), nvfp4(40, 336), rows(70, 336)
    results = every_instruction_set(lambda: ops.linear(x, weight, out_dtype=FLOAT))
    portable = results.pop("portable")
    for result in results.values():
        assert torch.equal(result, next(iter(results.values())))
    if activations == "dense" or not results:
        return
    assert torch.equal(portable, next(iter(results.values())))


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_weights_laid_out_before(instruction_set, activations):
    ops, weight, x = CpuOps(activations=activations), nvfp4(40, 80), rows(3, 80)
    panels = lay_out(weight)
    assert torch.equal(ops.linear(x, panels), ops.linear(x, weight))
    twin = ReferenceOps(activations=activations)
    assert torch.equal(twin.linear(x, panels), twin.linear(x, weight))
    assert torch.equal(ops.linear(x.float(), panels), twin.linear(x.float(), weight))


@pytest.mark.parametrize("activations", ["dense", "int8", "int11"])
def test_what_is_not_finite_shows(instruction_set, activations):
    ops, weight, x = CpuOps(activations=activations), nvfp4(32, 64), torch.ones(40, 64, dtype=BF16)
    x[3, 20], x[39, 20] = float("nan"), float("inf")
    for count in (4, 40):
        out = ops.linear(x[:count], weight, out_dtype=FLOAT)
        assert not out[3].isfinite().any()
        assert out[:3].isfinite().all() and out[4:39].isfinite().all()
    assert not out[39].isfinite().any()


@pytest.mark.parametrize("activations", ["dense", "int8", "int11"])
def test_subnormal_activations_are_zeros(instruction_set, activations):
    if activations == "dense" and instruction_set == "portable":
        pytest.skip("portable code keeps subnormals")
    ops, weight = CpuOps(activations=activations), nvfp4(16, 32)
    x = torch.full((40, 32), 2.0**-130).to(BF16)
    for count in (1, 40):
        assert (ops.linear(x[:count], weight, out_dtype=FLOAT) == 0).all()


def test_every_value_of_fp8(instruction_set):
    values = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch.float8_e4m3fn)
    out = CpuOps().linear(torch.eye(16).to(BF16), FP8Tensor(values, torch.tensor(1.0)), out_dtype=FLOAT)
    finite = values.float().isfinite().all(1)
    assert torch.equal(out.t()[finite], values.float()[finite])
    assert finite.sum() == 14 and not out.t()[~finite].isfinite().any()


def test_levels_of_activations():
    x = torch.tensor([[127.0, -3.4, 0.5, 1.5, *[0.0] * 12, 1e-31, *[0.0] * 15, 254.0, 3.0]])
    assert fake_quantize_activation_levels(x, INT8_LEVELS).tolist() == [[127, -3, 0, 2, *[0] * 12, *[0] * 16, 254, 4]]
    x = torch.tensor([[1019.0, -3.4, 0.5, 1.5, *[0.0] * 12]])
    assert fake_quantize_activation_levels(x, INT11_LEVELS).tolist() == [[1019, -3, 0, 2, *[0] * 12]]


@pytest.mark.parametrize(
    "outliers",
    [{}, {3: 100.0}, dict.fromkeys(range(0, 512, 128), 20.0)],
    ids=["none", "one channel x100", "0.8 % of channels x20"],
)
@pytest.mark.parametrize(("activations", "bound"), [("int8", 0.02), ("int11", 0.0025)])
def test_error_of_integer_activations(native_library, outliers, activations, bound):
    weight, x = nvfp4(256, 512), torch.randn(64, 512)
    for channel, factor in outliers.items():
        x[:, channel] *= factor
    x = x.to(BF16)
    exact = x.float() @ dequantize(weight).t()
    error = (CpuOps(activations=activations).linear(x, weight, out_dtype=FLOAT) - exact).norm() / exact.norm()
    assert bound / 100 < error < bound


def test_identity(native_library):
    names = set()
    for activations in ACTIVATIONS:
        assert ReferenceOps(activations=activations).identity == f"reference/{activations}"
        names.add(CpuOps(activations=activations).identity)
    assert native_library.qwen35_select(b"portable") is not None
    names.add(CpuOps().identity)
    native_library.qwen35_select(b"")
    assert len(names) == 5 and "cpu-portable/dense" in names
