"""llama.cpp as a peer: one `llama-batched-bench` a turn, which loads the model, warms up and times itself.

It decodes random token ids and samples nothing, an advantage over engines that choose their tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from perf.peers.peer import PeerError, Timing, Work

TIMEOUT_SECONDS = 300.0
FLAGS: Sequence[Sequence[str]] = ((), ("-fa", "off"))
MAX_TRIED_TOKENS = 1024
TRIED_TOKENS = 24


class LlamaPeer:
    """For each kind of work the faster of `FLAGS`, as its warm-up finds."""

    def __init__(self, name: str, binary: Path, model: Path, *, num_threads: int, tells_cpu_time: bool = False) -> None:
        """`tells_cpu_time`: a second process a turn, whose CPU time for loading is taken off; else it is included."""
        self.name = name
        self._model = model
        self._command = [str(binary), "-m", str(model), "-t", str(num_threads), "-tb", str(num_threads)]
        self._command += ["--output-format", "jsonl"]
        self._tells_cpu_time = tells_cpu_time
        self._flags: dict[str, Sequence[str]] = {}

    def start(self) -> None:
        """Nothing stays loaded; the file's pages do, in the page cache."""
        if not self._model.is_file():
            raise PeerError(f"{self.name}: expected {self._model}, got none; make it with python -m perf.peers.gguf")

    def warm_up(self, work: Work) -> None:
        """Long prompts take the flags of the short ones."""
        if work.num_prompt_tokens <= MAX_TRIED_TOKENS:
            self._flags[_kind(work)] = min(FLAGS, key=lambda flags: self._run(work, TRIED_TOKENS, flags).seconds)

    def measure(self, work: Work) -> Timing:
        """Seconds as it reports them."""
        flags = self._flags.get(_kind(work), FLAGS[0])
        timing = self._run(work, work.num_decoded_tokens, flags)
        if not self._tells_cpu_time:
            return timing
        idle = replace(work, num_prompt_tokens=work.num_prompt_tokens if work.is_decode else 1)
        return Timing(timing.seconds, timing.cpu_seconds - self._run(idle, 1, flags).cpu_seconds)

    def close(self) -> None: ...

    def _run(self, work: Work, num_decoded: int, flags: Sequence[str]) -> Timing:
        """The process's CPU time holds loading and all phases; `num_decoded` counts for decoding works alone."""
        num_decoded = num_decoded if work.is_decode else 1
        context = work.num_streams * (work.num_prompt_tokens + num_decoded)
        sizes = {"-npp": work.num_prompt_tokens, "-ntg": num_decoded, "-npl": work.num_streams, "-c": max(context, 256)}
        command = [*self._command, *flags, *(str(word) for pair in sizes.items() for word in pair)]
        before = os.times()
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        after = os.times()
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0 or not lines:
            raise PeerError(f"{self.name}: expected a result, got code {done.returncode}: {done.stderr[-500:]}")
        record = json.loads(lines[-1])
        cpu_seconds = (after.children_user - before.children_user) + (after.children_system - before.children_system)
        return Timing(record["t_tg" if work.is_decode else "t_pp"], cpu_seconds)


def _kind(work: Work) -> str:
    return f"decode, {work.num_streams}" if work.is_decode else "prefill"
