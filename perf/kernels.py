"""Native kernels against the torch reference, ratios of one run:
``python -m perf.kernels [--num-threads 1] [--activations int11]``.

Widths are those of the 35B (hidden 2048, experts of 512, GDN heads of 128). Times are medians of interleaved runs. GB/s
counts weights and state once, beside the read bandwidth measured by torch on as many threads in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qwen35.kernels.cpu import CpuOps
from qwen35.kernels.ops import Ops
from qwen35.kernels.reference import ReferenceOps
from qwen35.kernels.select import DEFAULT_ACTIVATIONS
from qwen35.nvfp4 import FP8Tensor, LinearWeight, NVFP4Tensor, num_bytes
from qwen35.views import BatchView, GatedDeltaView, KVView

HIDDEN, WIDTH, NUM_EXPERTS, TOP = 2048, 512, 64, 8
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One kernel at one number of rows; `num_bytes`: weights and state that it must read (and write); `num_products`:
    multiplications of weights, 0 where there are none."""

    name: str
    num_rows: int
    num_bytes: int
    run: Callable[[Ops], object]
    num_products: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--activations", choices=("dense", "int8", "int11"), default=DEFAULT_ACTIVATIONS)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    torch.manual_seed(0)
    native, reference = CpuOps(arguments.num_threads, arguments.activations), ReferenceOps()
    bandwidth = read_bandwidth(arguments.repeats)
    print(f"{native.identity}, {arguments.num_threads} threads, torch max of 256 MiB {bandwidth:.1f} GB/s")
    print(f"{'kernel':<24}{'rows':>5}{'native us':>12}{'reference us':>14}{'ratio':>8}{'GB/s':>8}{'GFLOP/s':>9}")
    for case in cases():
        ours, theirs = measure(case, native, reference, arguments.repeats)
        line = f"{case.name:<24}{case.num_rows:>5}{ours * 1e6:>12.0f}{theirs * 1e6:>14.0f}{theirs / ours:>8.1f}"
        print(f"{line}{case.num_bytes / ours / 1e9:>8.1f}{2 * case.num_products / ours / 1e9:>9.0f}", flush=True)


def read_bandwidth(repeats: int) -> float:
    data = torch.zeros(256 << 18, dtype=torch.int32)
    return data.nbytes / statistics.median(seconds(lambda: data.max()) for _ in range(repeats)) / 1e9


def measure(case: Case, native: Ops, reference: Ops, repeats: int) -> tuple[float, float]:
    """Median seconds of both, in turn; a first run of each is not counted."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for ops, found in zip((native, reference), times, strict=True):
            taken = seconds(lambda ops=ops: case.run(ops))
            if repeat:
                found.append(taken)
    return statistics.median(times[0]), statistics.median(times[1])


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def cases() -> Iterator[Case]:
    packed, dense = random_nvfp4(4096, HIDDEN), torch.randn(4096, HIDDEN).to(BF16)
    fp8 = FP8Tensor(dense.to(torch.float8_e4m3fn), torch.tensor(1.0))
    stacks = [random_nvfp4(NUM_EXPERTS, *size) for size in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))]
    expert_bytes = sum(stack.num_bytes for stack in stacks) // NUM_EXPERTS
    for num_rows in (1, 2, 4, 8, 64, 512):
        x, num_products = torch.randn(num_rows, HIDDEN).to(BF16), num_rows * dense.numel()
        for kind, weight in (("nvfp4", packed), ("bf16", dense), ("fp8", fp8)):
            name, run = f"linear {kind} 4096x2048", partial(run_linear, x, weight)
            yield Case(name, num_rows, num_bytes(weight), run, num_products)
        ids = torch.rand(num_rows, NUM_EXPERTS).topk(TOP).indices.sort().values
        shares = torch.full((num_rows, TOP), 1 / TOP)
        used = expert_bytes * len(ids.unique())
        run = partial(run_experts, (x, ids, shares, *stacks))
        yield Case("experts nvfp4, 8 of 64", num_rows, used, run, num_rows * TOP * 3 * HIDDEN * WIDTH)
        yield gated_delta_case(num_rows)
    for context in (1024, 8192):
        yield attention_case(context)


def run_linear(x: Tensor, weight: LinearWeight, ops: Ops) -> Tensor:
    return ops.linear(x, weight)


def run_experts(arguments: tuple, ops: Ops) -> Tensor:
    return ops.moe_experts(*arguments)


def random_nvfp4(*shape: int) -> NVFP4Tensor:
    """Any bytes are a weight; scales around 1."""
    *lead, num_rows, width = shape
    codes = torch.randint(0, 256, (*lead, num_rows, width // 2), dtype=torch.uint8)
    scales = torch.randint(48, 64, (*lead, num_rows, width // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return NVFP4Tensor(codes, scales, torch.full(tuple(lead), 0.01))


def gated_delta_case(num_tokens: int, num_heads: int = 32, key_heads: int = 16, width: int = 128) -> Case:
    channels = (2 * key_heads + num_heads) * width
    view = GatedDeltaView(
        torch.zeros(1, num_heads, width, width),
        torch.zeros(1, channels, 3, dtype=BF16),
        torch.zeros(1, 4, channels, dtype=BF16),
        torch.zeros(1, 4, num_heads),
        torch.zeros(1, 4, num_heads),
    )
    inputs, gates = torch.randn(num_tokens, channels).to(BF16), torch.rand(2, num_tokens, num_heads)
    taps, batch = torch.randn(4, channels), one_sequence(num_tokens, kv_start=16, num_blocks=8)
    return Case(
        "gated delta, 32 heads",
        num_tokens,
        2 * view.recurrent.nbytes,
        lambda ops: ops.gated_delta(inputs, -gates[0], gates[1], taps, view, batch),
    )


def attention_case(context: int, num_heads: int = 16, num_kv_heads: int = 2, width: int = 256) -> Case:
    shape = (context // 16 + 1, 16, num_kv_heads, width)
    view = KVView(torch.randn(shape).to(BF16), torch.randn(shape).to(BF16))
    heads = (num_heads, num_kv_heads, num_kv_heads)
    query, key, value = (torch.randn(1, count, width).to(BF16) for count in heads)
    batch = one_sequence(1, kv_start=context, num_blocks=shape[0])
    return Case(
        f"attention at {context}",
        1,
        view.keys.nbytes + view.values.nbytes,
        lambda ops: ops.paged_attention(query, key, value, view, batch, width**-0.5),
    )


def one_sequence(num_tokens: int, kv_start: int, num_blocks: int) -> BatchView:
    def number(value: int) -> Tensor:
        return torch.tensor([value])

    return BatchView(
        cu_tokens=torch.tensor([0, num_tokens]),
        positions=torch.arange(num_tokens).expand(3, -1),
        kv_start=number(kv_start),
        first_kv=number(0),
        block_table=torch.arange(num_blocks).unsqueeze(0),
        slots=number(0),
        num_pending=number(0),
        defer=torch.tensor([False]),
    )


if __name__ == "__main__":
    main()
