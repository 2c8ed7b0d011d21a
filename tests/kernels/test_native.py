"""Native kernels against their torch twins, at sizes that fill no vector and no tile."""

import pytest
import torch

from qwen35.kernels.reference import ReferenceOps
from qwen35.nvfp4 import FP8Tensor, quantize_weight
from qwen35.views import GatedDeltaView, KVView
from tests.caches import BLOCK_TOKENS, Piece, batch_view, garbage

TWIN = ReferenceOps()
OPS = TWIN  # see conftest.py
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


def close(got, expected, tolerance=1e-2):
    assert got.dtype == expected.dtype and got.shape == expected.shape
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)


def weight_of(kind, *shape):
    dense = torch.randn(*shape) * 0.1
    if kind == "nvfp4":
        return quantize_weight(dense)
    return FP8Tensor((dense * 100).to(torch.float8_e4m3fn), torch.tensor(0.01)) if kind == "fp8" else dense.to(BF16)


@pytest.mark.parametrize("kind", ["dense", "nvfp4", "fp8"])
@pytest.mark.parametrize(
    ("num_rows", "outputs", "width"), [(1, 33, 80), (2, 64, 128), (3, 1, 16), (9, 50, 272), (0, 4, 32)]
)
def test_linear(kind, num_rows, outputs, width):
    x, weight, bias = torch.randn(num_rows, width).to(BF16), weight_of(kind, outputs, width), torch.randn(outputs)
    close(OPS.linear(x, weight, bias, torch.float32), TWIN.linear(x, weight, bias, torch.float32), 1e-4)
    close(OPS.linear(x, weight), TWIN.linear(x, weight))


def test_every_code_and_scale():
    """All bytes of codes, all finite positive block scales: products are exact."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(16).view(-1, 8)[:504]  # [504, 8]: one block a row
    scales = torch.arange(1, 127).repeat(4).to(torch.uint8).view(torch.float8_e4m3fn).view(-1, 1)
    weight = type(quantize_weight(torch.zeros(1, 16)))(codes, scales, torch.tensor(1.0))
    x = torch.eye(16).to(BF16)
    assert torch.equal(OPS.linear(x, weight, out_dtype=torch.float32), TWIN.linear(x, weight, out_dtype=torch.float32))


@pytest.mark.parametrize("kind", ["dense", "nvfp4", "fp8"])
@pytest.mark.parametrize("num_tokens", [1, 2, 37])
@pytest.mark.parametrize(("hidden", "width"), [(64, 48), (48, 16), (160, 64)])
def test_experts(kind, num_tokens, hidden, width):
    stacks = [weight_of(kind, 8, *size) for size in ((width, hidden), (width, hidden), (hidden, width))]
    x, gate = torch.randn(num_tokens, hidden).to(BF16), torch.randn(8, hidden).to(BF16)
    ids, shares = OPS.route(x, gate, 3)
    expected_ids, expected_shares = TWIN.route(x, gate, 3)
    assert torch.equal(ids, expected_ids)
    close(shares, expected_shares, 1e-5)
    close(OPS.moe_experts(x, ids, shares, *stacks), TWIN.moe_experts(x, ids, shares, *stacks))


@pytest.mark.parametrize("width", [1, 15, 64, 250])
def test_functions_of_rows(width):
    x, gate = torch.randn(2, 5, 3, width).mul(4).to(BF16)
    scale = torch.rand(width)
    close(OPS.rms_norm(x, scale, 1e-6), TWIN.rms_norm(x, scale, 1e-6))
    close(OPS.gated_rms_norm(x.float(), gate, scale, 1e-6), TWIN.gated_rms_norm(x.float(), gate, scale, 1e-6))
    close(OPS.silu_mul(gate, x), TWIN.silu_mul(gate, x))
    close(OPS.sigmoid_mul(gate, x), TWIN.sigmoid_mul(gate, x))
    close(OPS.sigmoid_mul(gate[..., :1], x), TWIN.sigmoid_mul(gate[..., :1], x))
    for got, expected in zip(
        OPS.delta_gates(x[0], gate[0], -scale, scale), TWIN.delta_gates(x[0], gate[0], -scale, scale), strict=True
    ):
        close(got, expected, 1e-6)


@pytest.mark.parametrize(("width", "half"), [(64, 8), (64, 32), (40, 17)])
def test_rotate(width, half):
    x, angles = torch.randn(5, 3, width).to(BF16), torch.rand(5, half) * 6
    close(OPS.rotate(x, angles.cos(), angles.sin()), TWIN.rotate(x, angles.cos(), angles.sin()))


@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 32), (7, 1, 96), (16, 2, 64)])
def test_attention(kv_dtype, heads, kv_heads, width):
    outs, views = [], []
    tokens = [torch.randn(330, count, width).to(BF16) for count in (heads, kv_heads, kv_heads)]
    tokens[2][3] *= 1e-3  # subnormal in E4M3
    for ops in (OPS, TWIN):
        caches = [garbage(30, BLOCK_TOKENS, kv_heads, width, dtype=kv_dtype) for _ in range(2)]
        views.append(KVView(*caches, key_scale=0.5, value_scale=0.03))
        batch = batch_view(Piece(300, 1, 0, range(25, 5, -1), first_kv=1), Piece(30, 0, 1, [2, 4]))
        outs.append(ops.paged_attention(*tokens, views[-1], batch, width**-0.5))
    close(outs[0], outs[1], 2e-2)
    for got, expected in ((views[0].keys, views[1].keys), (views[0].values, views[1].values)):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("key_heads", "heads", "key_width", "value_width"), [(1, 1, 16, 16), (2, 6, 48, 80), (2, 4, 128, 128)]
)
def test_gated_delta(key_heads, heads, key_width, value_width):
    channels = 2 * key_heads * key_width + heads * value_width
    taps = torch.randn(4, channels) * 0.4
    results = []
    pieces = (Piece(9, 0, 1, [0], defer=False), Piece(3, 0, 2, [0], defer=True))
    later = (Piece(2, 9, 1, [0], defer=True), Piece(4, 2, 2, [0], num_pending=2, defer=True))
    last = (Piece(5, 11, 1, [0], num_pending=2), Piece(0, 6, 2, [0], num_pending=4))
    steps = [
        (batch_view(*both), inputs_of(sum(piece.num_tokens for piece in both), channels, heads))
        for both in (pieces, later, last)
    ]
    for ops in (OPS, TWIN):
        view = GatedDeltaView(
            garbage(3, heads, key_width, value_width, dtype=torch.float32),
            garbage(3, channels, 3, dtype=BF16),
            garbage(3, 6, channels, dtype=BF16),
            garbage(3, 6, heads, dtype=torch.float32),
            garbage(3, 6, heads, dtype=torch.float32),
        )
        outs = [ops.gated_delta(*tensors, taps, view, batch) for batch, tensors in steps]
        results.append((torch.cat(outs), view))
    close(results[0][0], results[1][0], 1e-4)
    native, twin = results[0][1], results[1][1]
    close(native.recurrent[1:], twin.recurrent[1:], 1e-4)
    assert torch.equal(native.conv[1:], twin.conv[1:])
    assert torch.equal(native.pending_inputs[2, :4], twin.pending_inputs[2, :4])
    assert native.recurrent[0].isnan().all()


def inputs_of(count, channels, heads):
    return torch.randn(count, channels).to(BF16), -torch.rand(count, heads), torch.rand(count, heads)


@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn])
def test_attention_has_one_result_however_it_is_split(kv_dtype):
    """One token at a time (its partitions are shared out) and many sequences in one call (each tile goes through its
    partitions): the last tokens of a prompt of several partitions."""
    count, heads, kv_heads, width = 9, 6, 2, 64
    tokens = [torch.randn(count, n, width).to(BF16) for n in (heads, kv_heads, kv_heads)]
    caches = [torch.randn(60, BLOCK_TOKENS, kv_heads, width).to(kv_dtype) for _ in range(2)]
    blocks = range(59, 0, -1)

    def view():
        return KVView(*(cache.clone() for cache in caches))

    def alone(kv):
        for i in range(count):
            yield OPS.paged_attention(
                *(t[i : i + 1] for t in tokens), kv, batch_view(Piece(1, 770 + i, 0, blocks)), 0.1
            )

    together = OPS.paged_attention(*tokens, view(), batch_view(Piece(count, 770, 0, blocks)), 0.1)
    assert torch.equal(torch.cat(list(alone(view()))), together)
    repeated = [torch.cat([t] * 9) for t in tokens]
    company = batch_view(*(Piece(count, 770, slot, blocks) for slot in range(9)))
    assert torch.equal(OPS.paged_attention(*repeated, view(), company, 0.1), torch.cat([together] * 9))
