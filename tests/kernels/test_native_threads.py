"""The pool's size changes no bit, and callers from several threads do not disturb each other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from qwen35.kernels.cpu import CpuOps
from qwen35.nvfp4 import quantize_weight
from qwen35.views import GatedDeltaView, KVView
from tests.caches import Piece, batch_view

BF16 = torch.bfloat16


@pytest.fixture
def sized(native_library):
    yield CpuOps
    native_library.qwen35_set_num_threads(1)


def everything(ops: CpuOps) -> list[torch.Tensor]:
    """All operations that share work among threads, on the same seeded inputs."""
    random = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    x, weight = normal(37, 96).to(BF16), quantize_weight(normal(250, 96))
    stacks = [quantize_weight(normal(8, *size)) for size in ((64, 96), (64, 96), (96, 64))]
    ids, shares = ops.route(x, normal(8, 96).to(BF16), 3)
    kv = KVView(normal(4, 16, 2, 32).to(BF16), normal(4, 16, 2, 32).to(BF16))
    long = KVView(normal(39, 16, 2, 32).to(BF16), normal(39, 16, 2, 32).to(BF16))
    state = GatedDeltaView(
        normal(1, 4, 16, 32), normal(1, 192, 3).to(BF16), normal(1, 6, 192).to(BF16), -normal(1, 6, 4).abs(),
        normal(1, 6, 4),
    )  # fmt: skip
    batch = batch_view(Piece(37, 0, 0, [1, 3, 2]))
    heads = [normal(37, count, 32).to(BF16) for count in (4, 2, 2)]
    return [
        ops.linear(x, weight),
        ops.moe_experts(x, ids, shares, *stacks),
        ops.rms_norm(normal(701, 96).to(BF16), torch.ones(96), 1e-6),
        ops.paged_attention(*heads, kv, batch, 0.2),
        ops.paged_attention(*(rows[:1] for rows in heads), long, batch_view(Piece(1, 600, 0, range(39))), 0.2),
        ops.gated_delta(normal(37, 192).to(BF16), -normal(37, 4).abs(), normal(37, 4), normal(4, 192), state, batch),
        state.recurrent,
    ]


def differing(got: list[torch.Tensor], expected: list[torch.Tensor]) -> list[int]:
    return [i for i, pair in enumerate(zip(got, expected, strict=True)) if not torch.equal(*pair)]


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_same_bits(sized, num_threads):
    expected = everything(sized(1))
    ops = sized(num_threads)
    for _ in range(5):
        assert differing(everything(ops), expected) == []


def test_many_callers(sized):
    expected = everything(sized(1))
    ops = sized(3)
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda _: everything(ops), range(24)))
    assert [differing(result, expected) for result in results] == [[]] * 24


def test_resizing(sized):
    expected = everything(sized(1))
    for num_threads in (4, 1, 2, 3, 1):
        assert differing(everything(sized(num_threads)), expected) == []
