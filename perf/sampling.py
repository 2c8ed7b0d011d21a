"""Milliseconds a row of choosing a token, by kind of sampling and shape of the logits: ``python -m perf.sampling``.

Logits are `peaked` (a few tokens far above a wide rest, as trained models give) or `flat` (as random weights give:
every filter leaves many). CPU time of one thread, median over seeds; the vocabulary is Qwen3.5's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from qwen35.engine.logprobs import token_logprobs
from qwen35.engine.request import SamplingParams
from qwen35.engine.sampler import Row, choose
from qwen35.kernels.cpu import CpuOps

KINDS = {
    "greedy": {"temperature": 0.0},
    "T=1": {},
    "T=0.7": {"temperature": 0.7},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "top-k 20, top-p 0.95, T=0.6": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scan = CpuOps().row_scan
    shapes = {"peaked": peaked(arguments.vocab), "flat": torch.randn(1, arguments.vocab) * 0.3}
    print(f"{'ms a row':<30}" + "".join(f"{name:>10}" for name in shapes))
    for name, options in KINDS.items():
        sampling = SamplingParams(**options)
        times = [
            median_ms(lambda seed, x=x, s=sampling: choose(x, [Row(s, seed, 0)], scan), arguments.repeats)
            for x in shapes.values()
        ]
        print(f"{name:<30}" + "".join(f"{ms:>10.2f}" for ms in times), flush=True)
    for num_top in (0, 5, 20):
        times = [
            median_ms(lambda seed, x=x, n=num_top: token_logprobs(x[0].numpy(), seed, n, scan), arguments.repeats)
            for x in shapes.values()
        ]
        print(f"{f'logprobs {num_top}':<30}" + "".join(f"{ms:>10.2f}" for ms in times), flush=True)


def peaked(vocab: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(1, vocab, generator=random) * 2.0
    logits[0, torch.randperm(vocab, generator=random)[:40]] += torch.linspace(14.0, 4.0, 40)
    return logits


def median_ms(run: Callable[[int], object], repeats: int) -> float:
    """The first run is not counted."""
    times = []
    for seed in range(repeats + 1):
        start = time.thread_time()
        run(seed)
        times.append(time.thread_time() - start)
    return statistics.median(times[1:]) * 1e3


if __name__ == "__main__":
    main()
