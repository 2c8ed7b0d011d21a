"""A checkpoint too large to be loaded beside anything else: load time, peak memory, tokens/s and their floor.

    python -m perf.full_size --checkpoint DIR [--threads 2] [--repeats 3] [--json FILE]

`python -m build.synthetic --shape 35b --layout nvfp4 --output DIR` makes the whole 35B-A3B (23.6 GB of disk); it needs
20 GiB of free memory. One stream, no draft, text only. Decoding is (time of N + 1 tokens - time of 1 token) / N from a
32-token prompt; the floor is what a token must read and write, over the read bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from perf import machine
from qwen35 import LLM, SamplingParams
from qwen35.config import ModelConfig, TextConfig
from qwen35.errors import Qwen35Error
from qwen35.nn.weight_types import LanguageWeights
from qwen35.weights.huge_pages import HugePageMemory
from qwen35.weights.loader import load_language
from qwen35.weights.memory import held_bytes

PROMPT_TOKENS = 32
_READ_BYTES = 256 << 20


@dataclass(frozen=True)
class FullSize:
    """What one run found.

    token_bytes   weights, state and cache that one token must read or write, behind a prompt of PROMPT_TOKENS
    gb_per_s      read bandwidth of huge pages: medians before and after
    peak_bytes    largest resident memory of this process, page cache that is mapped into it included
    """

    held_bytes: int
    token_bytes: int
    load_seconds: float
    peak_bytes: int
    gb_per_s: tuple[float, float]
    tokens_per_s: tuple[float, ...]

    @property
    def share_of_floor(self) -> float:
        """Of the tokens/s that the bandwidth allows; the medians of this run."""
        floor = statistics.mean(self.gb_per_s) * 1e9 / self.token_bytes
        return statistics.median(self.tokens_per_s) / floor


def token_bytes(config: TextConfig, weights: LanguageWeights, context_tokens: int, kv_item_bytes: int) -> int:
    """Bytes that decoding one token must move: the chosen experts of every layer, all other weights, the gated delta
    state twice (read and written), keys and values of the context once. `weights` may be on the meta device."""
    share = config.num_experts_per_tok / config.num_experts
    num_bytes = held_bytes(weights.lm_head) + weights.embed_tokens[0].numel() * weights.embed_tokens.element_size()
    for layer in weights.layers:
        routed = held_bytes(layer.mlp.experts)
        num_bytes += held_bytes(layer) - routed + round(share * routed)
    heads, key_width, value_width = (
        config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim,
    )  # fmt: skip
    state = heads * key_width * value_width * 4 + config.conv_dim * (config.linear_conv_kernel_dim - 1) * 2
    keys = 2 * config.num_key_value_heads * config.head_dim * kv_item_bytes * context_tokens
    return num_bytes + 2 * config.num_gated_delta_layers * state + config.num_full_attention_layers * keys


def read_bandwidth(num_threads: int, repeats: int = 7) -> float:
    """GB/s of reading 256 MiB of huge pages, median."""
    torch.set_num_threads(num_threads)
    data = HugePageMemory(_READ_BYTES).take((_READ_BYTES // 4,), torch.int32)
    data.fill_(1)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        data.max()
        seconds.append(time.perf_counter() - started)
    return _READ_BYTES / statistics.median(seconds) / 1e9


def measure(checkpoint: Path, num_threads: int, num_tokens: int, repeats: int, **settings: object) -> FullSize:
    """Raises CheckpointError where the checkpoint does not fit."""
    config = ModelConfig.from_directory(checkpoint)
    weights, _, report = load_language(checkpoint, config, with_draft=False, device="meta")
    moved = token_bytes(config.text, weights, PROMPT_TOKENS, 2)
    before = read_bandwidth(num_threads)
    started = time.perf_counter()
    options = {"kv_cache_bytes": 16 << 20, "num_slots": 1, "max_context_tokens": 1024, **settings}
    llm = LLM(checkpoint, num_draft_tokens=0, num_threads=num_threads, **options)
    load_seconds = time.perf_counter() - started
    prompt = [list(range(300, 300 + PROMPT_TOKENS))]
    _seconds(llm, prompt, 2)  # what is made once
    rates = [num_tokens / (_seconds(llm, prompt, num_tokens + 1) - _seconds(llm, prompt, 1)) for _ in range(repeats)]
    after = read_bandwidth(num_threads)
    embedding = weights.embed_tokens
    held = report.num_bytes_held - embedding.numel() * embedding.element_size()
    return FullSize(held, moved, load_seconds, _peak_bytes(), (before, after), tuple(rates))


def _seconds(llm: LLM, prompt: list[list[int]], num_tokens: int) -> float:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    [answer] = llm.generate(prompt, sampling)
    assert len(answer.token_ids) == num_tokens
    return time.perf_counter() - started


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf.full_size", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32, help="timed tokens of one repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernels", default="auto", help="as the setting")
    parser.add_argument("--activations", help="as the setting")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    chosen = {"activations": options.activations} if options.activations else {}
    try:
        found = measure(
            options.checkpoint, options.threads, options.tokens, options.repeats, kernels=options.kernels, **chosen
        )
    except Qwen35Error as error:
        print(f"full_size: {error}", file=sys.stderr)
        return 1
    print(_text(found, options.threads))
    if options.json is not None:
        content = {**machine.describe(), **vars(options), **asdict(found), "share_of_floor": found.share_of_floor}
        options.json.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


def _text(found: FullSize, num_threads: int) -> str:
    rate, bandwidth = statistics.median(found.tokens_per_s), statistics.mean(found.gb_per_s)
    rates = ", ".join(f"{one:.2f}" for one in found.tokens_per_s)
    return "\n".join(
        (
            f"held            {found.held_bytes / 1e9:.2f} GB of weights ({found.held_bytes / 2**30:.2f} GiB)",
            f"loaded in       {found.load_seconds:.1f} s, tokenizer and engine included",
            f"peak memory     {found.peak_bytes / 2**30:.2f} GiB, "
            f"{(found.peak_bytes - found.held_bytes) / 2**30:.2f} GiB beyond the weights",
            f"decoding        {rate:.2f} tokens/s ({rates}), 1 stream, {num_threads} threads",
            f"floor           {found.token_bytes / 1e9:.3f} GB a token at {bandwidth:.1f} GB/s "
            f"({found.gb_per_s[0]:.1f} before, {found.gb_per_s[1]:.1f} after): "
            f"{bandwidth * 1e9 / found.token_bytes:.1f} tokens/s, of which {found.share_of_floor:.2f}",
        )
    )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
