"""llama.cpp as a peer: one `llama-batched-bench` a turn, which loads the model, warms up and times itself.

It decodes random token ids and samples nothing, an advantage over engines that choose their tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from perf.peers.peer import PeerError, Timing, Work

TIMEOUT_SECONDS = 300.0


class LlamaPeer:
    """`flags`: the best of what was tried for this model."""

    def __init__(self, name: str, binary: Path, model: Path, *, num_threads: int, flags: Sequence[str] = ()) -> None:
        self.name = name
        self._model = model
        self._command = [str(binary), "-m", str(model), "-t", str(num_threads), "-tb", str(num_threads)]
        self._command += ["--output-format", "jsonl", *flags]

    def start(self) -> None:
        """Nothing stays loaded; the file's pages do, in the page cache."""
        if not self._model.is_file():
            raise PeerError(f"{self.name}: expected {self._model}, got none; make it with python -m perf.peers.gguf")

    def measure(self, work: Work) -> Timing:
        """Seconds as it reports them; CPU seconds are those of the process, minus those of one that decodes nothing
        (a prompt's: minus those of one of a single token)."""
        num_decoded = work.num_decoded_tokens if work.is_decode else 1
        seconds, cpu_seconds = self._run(work, work.num_prompt_tokens, num_decoded)
        _, idle_cpu_seconds = self._run(work, work.num_prompt_tokens if work.is_decode else 1, 1)
        return Timing(seconds, cpu_seconds - idle_cpu_seconds)

    def close(self) -> None: ...

    def _run(self, work: Work, num_prompt_tokens: int, num_decoded: int) -> tuple[float, float]:
        context = work.num_streams * (num_prompt_tokens + num_decoded)
        sizes = {"-npp": num_prompt_tokens, "-ntg": num_decoded, "-npl": work.num_streams, "-c": max(context, 256)}
        command = [*self._command, *(str(word) for pair in sizes.items() for word in pair)]
        before = os.times()
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        after = os.times()
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0 or not lines:
            raise PeerError(f"{self.name}: expected a result, got code {done.returncode}: {done.stderr[-500:]}")
        record = json.loads(lines[-1])
        cpu_seconds = (after.children_user - before.children_user) + (after.children_system - before.children_system)
        return record["t_tg" if work.is_decode else "t_pp"], cpu_seconds
