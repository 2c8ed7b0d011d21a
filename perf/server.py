"""Tokens/s through the ensemble over gRPC streaming, against the engine alone: same prompts, same k, same threads.

    python -m perf.server --checkpoint NVFP4_DIR [--streams 8] [--repeats 5] [--drafts 0] [--output DIR]

Starts a tritonserver of its own on free ports, and the engine in a process that is stopped while the server has its
turn. The client is this process, on the same cores: its CPU time, and that of each of the server's processes, is told
beside the rates. A turn is from the first request sent to the last response, prompts included.
"""

from __future__ import annotations

import argparse
import queue
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tritonclient.grpc as triton_grpc

from build.backends import CACHE
from build.processes import cpu_seconds
from build.serve import exit_on_signals
from build.server import Server
from perf import machine
from perf.peers.peer import Timing, WorkerPeer
from perf.plots import plot_all
from perf.samples import Run, Sample
from perf.tables import tables
from qwen35.client import input_tensor

ENGINE, SERVER = "engine alone", "server, gRPC streaming"
NUM_PROMPT_WORDS, NUM_TOKENS = 24, 128
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Turn:
    """What one round of requests took."""

    seconds: float
    num_responses: int
    client_cpu_seconds: float
    server_cpu_seconds: float  # all processes of the server

    def details(self, num_tokens: int) -> dict[str, float]:
        return {
            "responses_per_token": self.num_responses / num_tokens,
            "client_cpu_ms_per_token": 1e3 * self.client_cpu_seconds / num_tokens,
            "server_cpu_ms_per_token": 1e3 * self.server_cpu_seconds / num_tokens,
        }


class Streams:
    """One gRPC stream for each of `num_streams` clients, kept open over all turns."""

    def __init__(self, url: str, model: str, num_streams: int) -> None:
        self._model = model
        self._answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self._clients = [triton_grpc.InferenceServerClient(url) for _ in range(num_streams)]
        for client in self._clients:
            client.start_stream(lambda result, error: self._answers.put((result, error)))

    def run(self, prompts: Sequence[str], num_tokens: int, server: Server) -> Turn:
        """One request a stream, all at once; returns when the last is answered. Raises the first error."""
        pids = [server.pid, *(process.pid for process in server.processes)]
        requests = [_inputs(prompt, num_tokens) for prompt in prompts]
        started, client_started, server_started = time.perf_counter(), time.process_time(), sum(map(cpu_seconds, pids))
        for client, inputs in zip(self._clients, requests, strict=True):
            client.async_stream_infer(self._model, inputs, enable_empty_final_response=True)
        num_responses, num_live = 0, len(prompts)
        while num_live:
            result, error = self._answers.get(timeout=TIMEOUT_SECONDS)
            if error is not None:
                raise error
            response = result.get_response()
            num_responses += bool(response.outputs)
            num_live -= response.parameters["triton_final_response"].bool_param
        return Turn(
            time.perf_counter() - started,
            num_responses,
            time.process_time() - client_started,
            sum(map(cpu_seconds, pids)) - server_started,
        )

    def close(self) -> None:
        for client in self._clients:
            client.stop_stream()
            client.close()


def _inputs(prompt: str, num_tokens: int) -> list[triton_grpc.InferInput]:
    sampling = f'{{"max_tokens": {num_tokens}, "temperature": 0, "ignore_eos": true}}'
    values = {"text_input": prompt, "stream": True, "sampling_parameters": sampling}
    return [input_tensor(name, value) for name, value in values.items()]


def random_prompts(count: int, seed: int) -> list[str]:
    """Words of letters: every tokenizer has something for them."""
    source = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [
        " ".join("".join(source.choices(letters, k=source.randint(2, 6))) for _ in range(NUM_PROMPT_WORDS))
        for _ in range(count)
    ]


def measure(options: argparse.Namespace) -> list[Sample]:
    engine = WorkerPeer(
        ENGINE,
        "qwen35",
        options.checkpoint,
        python=Path(sys.executable),
        log_path=CACHE / "perf" / "logs" / "engine-alone.log",
        num_threads=options.threads,
        arguments=["--drafts", str(options.drafts)],
    )
    settings = {"num_threads": str(options.threads), "num_draft_tokens": str(options.drafts), "num_slots": "8"}
    settings["num_checkpoints"] = "0"  # every round has the same prompts
    engine.start()
    try:
        with Server(checkpoint=options.checkpoint, settings=settings, start_timeout_s=600.0) as server:
            streams = Streams(server.grpc_url, "qwen35", options.streams)
            try:
                return _rounds(options, engine, streams, server)
            finally:
                streams.close()
    finally:
        engine.close()


def _rounds(options: argparse.Namespace, engine: WorkerPeer, streams: Streams, server: Server) -> list[Sample]:
    """Turns of both, whoever is first changes; the first round is a warm-up."""
    samples: list[Sample] = []
    work = f"{options.name}, {options.streams} streams, k = {options.drafts}"
    num_tokens = options.streams * options.tokens
    for round_index in range(-1, options.repeats):
        prompts = random_prompts(options.streams, seed=round_index)
        turns: dict[str, Timing | Turn] = {}
        for name in (ENGINE, SERVER) if round_index % 2 else (SERVER, ENGINE):
            if name == ENGINE:
                turns[name] = engine.answer(prompts, options.tokens)
            else:
                turns[name] = streams.run(prompts, options.tokens, server)
        for name, turn in turns.items():
            details = turn.details(num_tokens) if isinstance(turn, Turn) else {}
            rate = num_tokens / turn.seconds
            print(f"round {round_index + 1}  {work}  {name:<24} {rate:8.1f} tokens/s  {details}", flush=True)
            if round_index >= 0:
                samples.append(Sample("server", work, name, rate, "tokens/s", round_index, details))
    return samples


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="NVFP4")
    parser.add_argument("--name", help="of the checkpoint in tables; default: its directory's")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="of each answer")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=CACHE / "perf")
    options = parser.parse_args(arguments)
    options.checkpoint = options.checkpoint.resolve()
    options.name = options.name or options.checkpoint.name
    return options


def main() -> None:
    options = parse_arguments()
    exit_on_signals()
    run = Run({**machine.describe(), "num_threads": options.threads}, tuple(measure(options)))
    run.save(options.output / "server.json")
    (options.output / "server.md").write_text(tables(run), encoding="utf-8")
    plot_all(run, options.output)
    print(tables(run))


if __name__ == "__main__":
    main()
