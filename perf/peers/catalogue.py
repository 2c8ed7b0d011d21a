"""The engines that are compared, by name, and where each of them lies."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from build.backends import ROOT
from perf.peers.gguf import gguf_path
from perf.peers.llama import LlamaPeer
from perf.peers.peer import Peer, PeerError, WorkerPeer

OURS = "qwen35 nvfp4"


@dataclass(frozen=True)
class Setting:
    """What all peers of one run share."""

    checkpoint: Path  # bf16
    quantised: Path  # its NVFP4 export
    peers_directory: Path
    log_directory: Path
    num_threads: int
    tells_cpu_time: bool = False


def _ours(name: str, setting: Setting, checkpoint: Path, activations: str = "auto") -> Peer:
    path = os.pathsep.join(str(folder) for folder in (ROOT / "backend", ROOT))
    return WorkerPeer(
        name,
        "qwen35",
        checkpoint,
        python=Path(sys.executable),
        log_path=setting.log_directory / f"{name}.log",
        num_threads=setting.num_threads,
        environment={"PYTHONPATH": path},
        arguments=("--activations", activations),
    )


def _transformers(name: str, setting: Setting) -> Peer:
    return WorkerPeer(
        name,
        "transformers",
        setting.checkpoint,
        python=Path(sys.executable),
        log_path=setting.log_directory / f"{name}.log",
        num_threads=setting.num_threads,
        environment={"THP_MEM_ALLOC_ENABLE": "1"},
    )


def _vllm(name: str, setting: Setting) -> Peer:
    venv = setting.peers_directory / "vllm" / "venv"
    python = venv / "bin" / "python"
    if not python.is_file():
        raise PeerError(f"{name}: expected {python}, got none; make it with perf/peers/vllm.sh")
    return WorkerPeer(
        name,
        "vllm",
        setting.checkpoint,
        python=python,
        log_path=setting.log_directory / f"{name}.log",
        num_threads=setting.num_threads,
        environment={
            "LD_PRELOAD": str(venv / "lib" / "libiomp5.so"),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.num_threads - 1}",
            "THP_MEM_ALLOC_ENABLE": "1",
        },
    )


def _llama(name: str, setting: Setting, kind: str) -> Peer:
    binary = setting.peers_directory / "llama_cpp" / "bin" / "llama-batched-bench"
    if not binary.is_file():
        raise PeerError(f"{name}: expected {binary}, got none; make it with perf/peers/llama_cpp.sh")
    checkpoint = setting.quantised if kind == "nvfp4" else setting.checkpoint
    model = gguf_path(setting.peers_directory, checkpoint, kind)
    return LlamaPeer(name, binary, model, num_threads=setting.num_threads, tells_cpu_time=setting.tells_cpu_time)


PEERS: Mapping[str, Callable[[str, Setting], Peer]] = MappingProxyType(
    {
        OURS: lambda name, setting: _ours(name, setting, setting.quantised),
        "qwen35 nvfp4 dense": lambda name, setting: _ours(name, setting, setting.quantised, "dense"),
        "qwen35 bf16": lambda name, setting: _ours(name, setting, setting.checkpoint),
        "vllm bf16": _vllm,
        "llama.cpp nvfp4": lambda name, setting: _llama(name, setting, "nvfp4"),
        "llama.cpp q4_0": lambda name, setting: _llama(name, setting, "q4_0"),
        "llama.cpp bf16": lambda name, setting: _llama(name, setting, "bf16"),
        "transformers bf16": _transformers,
    }
)


def memory_reader(setting: Setting) -> WorkerPeer:
    """Not an engine: reads huge pages, for the machine's bandwidth."""
    return WorkerPeer(
        "memory",
        "memory",
        Path("-"),
        python=Path(sys.executable),
        log_path=setting.log_directory / "memory.log",
        num_threads=setting.num_threads,
        environment={"THP_MEM_ALLOC_ENABLE": "1"},
    )
