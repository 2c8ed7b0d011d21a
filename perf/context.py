"""A token's time against the context behind it: decoder layers without embedding and lm_head, cache filled with noise.

A checkpoint of reduced depth keeps the full model's mix of layers (every fourth attends), and so the ratio between two
contexts; absolute times grow with the depth.
"""

from __future__ import annotations

from pathlib import Path

from perf.passes import Passes
from perf.samples import Sample

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
STEPS_PER_TURN = 8


def measure(checkpoint: Path, num_threads: int, repeats: int, contexts: tuple[int, ...] = CONTEXTS) -> list[Sample]:
    """Seconds a token with FP8 keys and values; every round visits every context."""
    passes = Passes(
        checkpoint, num_threads=num_threads, max_context_tokens=max(contexts), max_drafts=0, kv_cache_dtype="fp8"
    )
    samples: list[Sample] = []
    for round_index in range(-1, repeats):  # the first is a warm-up
        for context_tokens in contexts:
            seconds = sum(_step(passes, context_tokens) for _ in range(STEPS_PER_TURN)) / STEPS_PER_TURN
            if round_index >= 0:
                name = f"{context_tokens // 1024}k"
                samples.append(Sample("context", name, "qwen35 nvfp4, fp8 KV", seconds * 1e3, "ms", round_index))
    return samples


def _step(passes: Passes, context_tokens: int) -> float:
    return passes.target_seconds(1, context_tokens - 1, with_logits=False)
