"""Settings of a server or of an in-process engine: defaults, then config.pbtxt parameters, then environment variables
``QWEN35_<NAME>``. Knows nothing of models and of Triton."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from qwen35.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """One flat record; every field has a unit in its name or is a choice listed here."""

    checkpoint: str = "llm/1/checkpoint"  # relative: to the model repository's root
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # activations: auto (the checkpoint's), bfloat16, float32, float64
    kernels: str = "auto"  # auto (native code when it is built and fits), cpu (native), reference (torch)
    num_threads: int = 1  # of each process that computes; matrix products have the same bits for one number only
    activations: str = "auto"  # inputs of NVFP4 linears: dense (W4A16), int8, int11 (a scale per 16), nvfp4 (W4A4)
    num_draft_tokens: int = 3  # 0: no draft is loaded
    draft_length: str = "fixed"  # fixed: num_draft_tokens; adaptive: up to it, what pays as measured, 0 included
    draft_experts: str = "stored"  # stored: as in the checkpoint; nvfp4: dense ones are rounded at load
    draft_vocab_size: int = 0  # tokens that are drafted at all, in blocks of 16 ids; 0: every one
    draft_vocab_file: str = ""  # which: token ids, one a line, most frequent first; empty: the lowest ids
    max_undrafted_tokens: int = 256  # of a sequence whose drafting pauses: hidden states kept for it to catch up
    kv_cache_dtype: str = "auto"  # auto: fp8 when the checkpoint announces it, else dtype's
    block_tokens: int = 16
    kv_cache_bytes: int = 256 << 20  # bytes of all KV blocks
    swap_bytes: int = 256 << 20  # host memory for what preempted sequences have computed; 0: they compute it again
    num_slots: int = 16  # sequences that run at the same time
    num_checkpoints: int = 16  # slots more, for the prefix cache; 0: no prefix is cached
    prefix_cache_bytes: int = 0  # of blocks and slots with cached prefixes; 0: as many as nobody else needs
    max_batch_tokens: int = 512  # token budget of one step
    max_context_tokens: int = 0  # 0: the model's max_position_embeddings
    max_queued_requests: int = 1024
    request_timeout_seconds: float = 600.0
    unclaimed_lease_seconds: float = 5.0
    heartbeat_seconds: float = 1.0
    session_directory: str = ""  # of saved sessions, an absolute path; empty: requests can't save and restore any
    session_bytes: int = 4 << 30  # of all saved sessions
    arena_name: str = ""  # empty: derived from the server's process
    num_vision_workers: int = 1
    image_cache_bytes: int = 64 << 20
    max_image_bytes: int = 20 << 20  # encoded
    max_image_pixels: int = 64_000_000  # before decoding

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected a positive integer, got {getattr(self, name)}")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        for name in _DURATIONS:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}: expected a finite number of seconds above 0, got {getattr(self, name)}")
        if self.session_directory and not os.path.isabs(self.session_directory):
            raise ConfigError(f"session_directory: expected an absolute path, got {self.session_directory!r}")
        if not 0 <= self.num_draft_tokens <= 16:
            raise ConfigError(f"num_draft_tokens: expected 0 to 16, got {self.num_draft_tokens}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")

    @classmethod
    def resolve(cls, parameters: Mapping[str, str], environment: Mapping[str, str] | None = None) -> Settings:
        """``parameters``: name -> text, as in config.pbtxt. Refuses unknown names and values that don't convert."""
        environment = os.environ if environment is None else environment
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(set(parameters) - set(known))
        if unknown:
            raise ConfigError(f"parameters: expected names among {', '.join(sorted(known))}, got {', '.join(unknown)}")
        texts = dict(parameters)
        texts.update({n: environment[v] for n in known if (v := f"QWEN35_{n.upper()}") in environment})
        return cls(**{name: _convert(name, text, type(known[name].default)) for name, text in texts.items()})


_POSITIVE = (
    "block_tokens",
    "num_slots",
    "max_batch_tokens",
    "max_queued_requests",
    "num_vision_workers",
    "num_threads",
    "max_undrafted_tokens",
    "kv_cache_bytes",
    "max_image_bytes",
    "max_image_pixels",
    "session_bytes",
)
_NOT_NEGATIVE = (
    "max_context_tokens",
    "draft_vocab_size",
    "num_checkpoints",
    "prefix_cache_bytes",
    "image_cache_bytes",
    "swap_bytes",
)
_DURATIONS = ("request_timeout_seconds", "unclaimed_lease_seconds", "heartbeat_seconds")

_CHOICES = {
    "dtype": ("auto", "bfloat16", "float32", "float64"),
    "kernels": ("auto", "cpu", "reference"),
    "draft_length": ("fixed", "adaptive"),
    "draft_experts": ("stored", "nvfp4"),
    "activations": ("auto", "dense", "int8", "int11", "nvfp4"),
    "kv_cache_dtype": ("auto", "bfloat16", "fp8", "float32", "float64"),
}


def _convert(name: str, text: str, kind: type) -> str | int | float:
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{name}: expected {kind.__name__}, got {text!r}") from error
