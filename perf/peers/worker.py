"""One engine in a process of its own, for `python -m perf.engine`: JSON lines in, JSON lines out.

Run by the Python of the engine's own environment, so it imports nothing of the project but what the engine needs:

    python worker.py --engine qwen35|transformers|vllm|memory --checkpoint DIR --threads N
    -> {"ready": true, "load_seconds": …}
    <- {"num_streams": 1, "num_prompt_tokens": 32, "num_tokens": 65}          or {"prompts": ["…"], "num_tokens": 65}
    -> {"seconds": …, "cpu_seconds": …}                 of all streams together, prompts included

Where no prompts are given they are random token ids, new ones in every turn (no prefix can be cached). Every stream
runs to its last token.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

MAX_STREAMS = 8
_PR_SET_PDEATHSIG = 1  # prctl(2)
_SESSION, _USER, _SYSTEM = 3, 11, 12
Prompts = Sequence[Sequence[int]]  # token ids; qwen35 takes texts as well
Generate = Callable[[Prompts, int], None]  # prompts, tokens of each; returns when all are there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-context", type=int, default=4352, help="tokens of prompt and answer")
    parser.add_argument("--drafts", type=int, default=0, help="of qwen35; random weights accept none")
    parser.add_argument("--activations", default="auto", help="of qwen35, as its setting")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process would never see its input end
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not look like an answer
    started = time.perf_counter()
    generate = ENGINES[options.engine](options)
    vocab_size = _vocab_size(options.checkpoint)
    answers.write(json.dumps({"ready": True, "load_seconds": time.perf_counter() - started}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(turn(generate, json.loads(line), vocab_size)) + "\n")


def turn(generate: Generate, work: dict[str, Any], vocab_size: int) -> dict[str, float]:
    """One timed call. `cpu_seconds`: of all threads of all its processes."""
    prompts = work.get("prompts") or _random_prompts(work["num_streams"], work["num_prompt_tokens"], vocab_size)
    started, cpu_started = time.perf_counter(), _cpu_seconds()
    generate(prompts, work["num_tokens"])
    return {"seconds": time.perf_counter() - started, "cpu_seconds": _cpu_seconds() - cpu_started}


def _random_prompts(num_streams: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    return [[random.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(num_streams)]


def _cpu_seconds() -> float:
    """Of all processes of this session, whose leader this one is."""
    stats = [_stat(name) for name in os.listdir("/proc") if name.isdigit()]
    own = [fields for fields in stats if fields and int(fields[_SESSION]) == os.getsid(0)]
    return sum(int(fields[_USER]) + int(fields[_SYSTEM]) for fields in own) / os.sysconf("SC_CLK_TCK")


def _stat(pid: str) -> list[str]:
    """Fields of /proc/<pid>/stat after the command name, see proc(5); none when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _vocab_size(checkpoint: str) -> int:
    """Token ids below the special ones that every checkpoint of the family has at the end."""
    if not os.path.isdir(checkpoint):
        return 1
    with open(os.path.join(checkpoint, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    return config.get("text_config", config)["vocab_size"] * 9 // 10


def load_qwen35(options: argparse.Namespace) -> Generate:
    from qwen35 import LLM, SamplingParams

    llm = LLM(
        options.checkpoint,
        num_draft_tokens=options.drafts,
        num_threads=options.threads,
        num_slots=MAX_STREAMS,
        num_checkpoints=0,  # nobody here caches prefixes
        activations=options.activations,
        max_context_tokens=options.max_context,
    )

    def generate(prompts: Prompts, num_tokens: int) -> None:
        completions = llm.generate(prompts, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
        assert all(len(completion.token_ids) == num_tokens for completion in completions)

    return generate


def load_transformers(options: argparse.Namespace) -> Generate:
    """Eager bf16, the experts as one grouped product where the installed version knows it."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.bfloat16).eval()

    def generate(prompts: Prompts, num_tokens: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        assert output.shape[1] == ids.shape[1] + num_tokens

    return generate


def load_vllm(options: argparse.Namespace) -> Generate:
    """vLLM's CPU build, compiled, with workers of its own (only those bind their threads to cores). Text only; prefix
    caching off."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    from vllm import LLM, SamplingParams

    llm = LLM(
        options.checkpoint,
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_model_len=options.max_context,
        max_num_seqs=MAX_STREAMS,
        max_num_batched_tokens=options.max_context,
        limit_mm_per_prompt={"image": 0, "video": 0},
        skip_tokenizer_init=True,
    )

    def generate(prompts: Prompts, num_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

    return generate


def load_memory(options: argparse.Namespace) -> Generate:
    """No engine: each turn reads 256 MiB of huge pages once, for the machine's bandwidth."""
    import torch

    torch.set_num_threads(options.threads)
    data = torch.zeros(256 << 18, dtype=torch.int32)

    def generate(prompts: Prompts, num_tokens: int) -> None:
        data.max()

    return generate


ENGINES: dict[str, Callable[[argparse.Namespace], Generate]] = {
    "qwen35": load_qwen35,
    "transformers": load_transformers,
    "vllm": load_vllm,
    "memory": load_memory,
}


if __name__ == "__main__":
    main()
