"""Paged attention: values against a plain softmax, bits against other chunkings, and what must never leak."""

import pytest
import torch
from torch import Tensor

from qwen35.kernels.reference import ReferenceOps
from qwen35.views import BatchView, KVView
from tests.caches import Piece, batch_view, garbage, kv_view

HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 32, 32**-0.5
OPS = ReferenceOps()  # see conftest.py
LENGTH = 300  # more than one partition
BLOCKS = [*range(19, 0, -1)]  # 19 * 16 = 304 rows, in reverse
KV_DTYPES = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float32, torch.bfloat16),
]


def inputs(length: int = LENGTH, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((length, HEADS, WIDTH), (length, KV_HEADS, WIDTH), (length, KV_HEADS, WIDTH))
    return tuple(torch.randn(shape, generator=random).to(dtype) for shape in shapes)


def run(view: KVView, batch: BatchView, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return OPS.paged_attention(query, key, value, view, batch, SCALE)


def in_chunks(view: KVView, tensors: tuple[Tensor, ...], sizes: list[int], first_kv: int = 0) -> Tensor:
    """The tokens from KV position `first_kv` on, in chunks of the given sizes."""
    outs, start = [], 0
    for size in sizes:
        piece = Piece(size, start + first_kv, 0, BLOCKS, first_kv=first_kv)
        outs.append(run(view, batch_view(piece), *(tensor[start : start + size] for tensor in tensors)))
        start += size
    return torch.cat(outs)


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax over all earlier positions at once, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    key, value = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    future = torch.ones(len(query), len(key), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), value)


@pytest.mark.parametrize(("dtype", "kv_dtype"), KV_DTYPES)
def test_values(dtype, kv_dtype):
    query, key, value = inputs(dtype=dtype)
    got = in_chunks(kv_view(20, KV_HEADS, WIDTH, kv_dtype), (query, key, value), [LENGTH])
    expected = plain(query, key.to(kv_dtype), value.to(kv_dtype))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "kv_dtype"), KV_DTYPES)
@pytest.mark.parametrize("sizes", [[1] * 9 + [245] + [1] * 46, [255, 1, 1, 43], [5, 200, 90, 4, 1], [16] * 18 + [12]])
def test_chunks_give_the_same_bits(dtype, kv_dtype, sizes):
    tensors = inputs(dtype=dtype)
    whole = in_chunks(kv_view(20, KV_HEADS, WIDTH, kv_dtype), tensors, [LENGTH])
    assert torch.equal(whole, in_chunks(kv_view(20, KV_HEADS, WIDTH, kv_dtype), tensors, sizes))


def test_company_changes_nothing():
    first, second = inputs(40, seed=1), inputs(23, seed=2)
    view, alone = (kv_view(20, KV_HEADS, WIDTH, torch.bfloat16) for _ in range(2))
    batch = batch_view(Piece(23, 0, 1, [7, 8]), Piece(40, 0, 0, [3, 1, 2]))
    both = run(view, batch, *(torch.cat(pair) for pair in zip(second, first, strict=True)))
    assert torch.equal(both[23:], run(alone, batch_view(Piece(40, 0, 0, [1, 3, 5])), *first))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_entries_outside_a_sequence_do_not_leak(kv_dtype):
    """Entry 0 of a draft's cache, rejected entries beyond the length and foreign blocks hold NaN."""
    tensors = inputs(20)
    view = kv_view(20, KV_HEADS, WIDTH, kv_dtype)
    out = in_chunks(view, tensors, [18, 2], first_kv=1)
    assert torch.isfinite(out).all()
    unused = view.keys[BLOCKS[0], 0].float()
    assert torch.isnan(unused).all()
    torch.testing.assert_close(out[-1].double(), plain(*tensors)[-1], atol=0.1, rtol=0.1)


def test_rejected_entries_are_overwritten():
    query, key, value = inputs(50)
    rejected = inputs(50, seed=9)
    clean, used = (kv_view(20, KV_HEADS, WIDTH, torch.float32) for _ in range(2))
    expected = in_chunks(clean, (query, key, value), [40, 10])
    in_chunks(
        used, tuple(torch.cat((a[:40], b[40:])) for a, b in zip((query, key, value), rejected, strict=True)), [50]
    )
    batch = batch_view(Piece(10, 40, 0, BLOCKS))
    assert torch.equal(expected[40:], run(used, batch, query[40:], key[40:], value[40:]))


def test_fp8_scales_and_saturation():
    query, key, value = inputs(10)
    plain_view = kv_view(4, KV_HEADS, WIDTH, torch.float8_e4m3fn)
    view = KVView(plain_view.keys, plain_view.values, key_scale=0.25, value_scale=0.002)
    out = run(view, batch_view(Piece(10, 0, 0, [2])), query, key, value)
    stored = (value / 0.002).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(view.values[2, :10].float(), stored.float())
    assert (value.abs() > 448 * 0.002).any()
    expected = plain(query, (key / 0.25).to(torch.float8_e4m3fn).float() * 0.25, stored.float() * 0.002)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block_tokens", [8, 24, 256])
def test_any_block_length(block_tokens):
    tensors = inputs(60)
    shape = (9, block_tokens, KV_HEADS, WIDTH)
    view = KVView(garbage(*shape, dtype=torch.float32), garbage(*shape, dtype=torch.float32))
    out = run(view, batch_view(Piece(60, 0, 0, range(1, 9))), *tensors)
    torch.testing.assert_close(out.double(), plain(*tensors), atol=1e-5, rtol=1e-5)


def test_a_token_before_the_first_position_is_refused():
    with pytest.raises(ValueError, match="kv_start: expected at least first_kv"):
        run(kv_view(4, KV_HEADS, WIDTH, torch.float32), batch_view(Piece(3, 0, 0, [1], first_kv=1)), *inputs(3))
