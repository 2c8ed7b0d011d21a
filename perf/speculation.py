"""What drafting is worth on a trained checkpoint: tokens/s for k = 0 to 5 and for k chosen at run time.

k = 0 is an engine that has not loaded the draft. One thread: the demo model is too small for two. Decoding is the time
of whole answers minus that of their first tokens. What passes cost is measured on the models themselves.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from build.demo import heldout
from perf.passes import Passes
from perf.samples import Sample
from qwen35 import LLM, SamplingParams

MAX_DRAFTS = 5
ADAPTIVE = "k at run time"
NO_DRAFT = "k = 0"
MAX_TOKENS = 64
CONTEXT_TOKENS = 256
PASSES_PER_TURN = 40


@dataclass(frozen=True)
class Task:
    """Items of one held-out set, so many at a time."""

    set_name: str
    num_streams: int
    num_items: int

    @property
    def name(self) -> str:
        return f"{self.set_name}, {self.num_streams} stream{'s' if self.num_streams > 1 else ''}"

    def prompts(self) -> list[str | list[dict]]:
        return [item.messages or item.prompt for item in heldout.load(self.set_name)[: self.num_items]]


TASKS = (Task("chat", 1, 12), Task("text", 1, 12), Task("chat", 8, 32))


def measure(checkpoint: Path, repeats: int) -> list[Sample]:
    """Samples of `speculation` (tokens/s) and of `passes` (target steps)."""
    subjects = {name: _load(checkpoint, k, length) for name, k, length in _variants()}
    for llm in subjects.values():
        _decode(llm, TASKS[0])  # a warm-up
    samples: list[Sample] = []
    names = list(subjects)
    for round_index in range(repeats):
        for task in TASKS:
            shift = round_index % len(names)
            for name in [*names[shift:], *names[:shift]]:
                rate, details = _decode(subjects[name], task)
                samples.append(Sample("speculation", task.name, name, rate, "tokens/s", round_index, details))
    return samples + measure_passes(checkpoint, repeats)


def measure_passes(checkpoint: Path, repeats: int) -> list[Sample]:
    """Verifies of k drafts (k + 1 rows of logits) and one pass of the draft, in steps of the target alone."""
    passes = Passes(
        checkpoint,
        num_threads=1,
        max_context_tokens=CONTEXT_TOKENS,
        max_drafts=MAX_DRAFTS,
        kv_cache_dtype="auto",
    )

    def target(num_tokens: int) -> Callable[[], float]:
        return lambda: passes.target_seconds(num_tokens, CONTEXT_TOKENS - num_tokens, with_logits=True)

    kinds = {f"verify, k = {k}": target(k + 1) for k in range(1, MAX_DRAFTS + 1)}
    kinds["draft pass"] = lambda: passes.draft_seconds(CONTEXT_TOKENS - 1)
    samples: list[Sample] = []
    for round_index in range(repeats):
        seconds: dict[str, list[float]] = {name: [] for name in ("step", *kinds)}
        for _ in range(PASSES_PER_TURN):
            for name, function in {"step": target(1), **kinds}.items():
                seconds[name].append(function())
        step = statistics.median(seconds["step"])
        for name in kinds:
            value = statistics.median(seconds[name]) / step
            details = {"step_ms": step * 1e3}
            samples.append(Sample("passes", name, "demo checkpoint", value, "target steps", round_index, details))
    return samples


def _variants() -> list[tuple[str, int, str]]:
    """Name, largest k, how it is chosen."""
    return [*((f"k = {k}", k, "fixed") for k in range(MAX_DRAFTS + 1)), (ADAPTIVE, MAX_DRAFTS, "adaptive")]


def _load(checkpoint: Path, num_draft_tokens: int, draft_length: str) -> LLM:
    options = {"num_threads": 1, "num_slots": 8, "num_checkpoints": 0}
    return LLM(checkpoint, num_draft_tokens=num_draft_tokens, draft_length=draft_length, **options)


def _decode(llm: LLM, task: Task) -> tuple[float, dict[str, float]]:
    """Tokens/s behind the first token of each answer, greedy."""
    prompts = task.prompts()
    size = task.num_streams
    groups = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    first_seconds, _ = _generate(llm, groups, 1)
    seconds, completions = _generate(llm, groups, MAX_TOKENS)
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    num_drafts = sum(completion.num_draft_tokens for completion in completions)
    num_accepted = sum(completion.num_accepted_draft_tokens for completion in completions)
    details = {"end_to_end": num_tokens / seconds}
    if num_drafts:
        details |= {"acceptance": num_accepted / num_drafts}
    return (num_tokens - len(prompts)) / (seconds - first_seconds), details


def _generate(llm: LLM, groups: Sequence[Sequence], max_tokens: int) -> tuple[float, list]:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    started = time.perf_counter()
    completions = [completion for group in groups for completion in llm.generate(group, sampling)]
    return time.perf_counter() - started, completions
