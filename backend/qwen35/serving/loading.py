"""What the llm loads once: the state it shares, the weights, the engine. Knows no threads and no Triton."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qwen35.config import ModelConfig
from qwen35.engine.engine import Engine
from qwen35.kernels.select import select_ops
from qwen35.nn.draft import DraftModel
from qwen35.nn.language import LanguageModel
from qwen35.prompt.tokenizer import Tokenizer
from qwen35.serving.process import select_device
from qwen35.settings import Settings
from qwen35.state.arena import Arena
from qwen35.state.fingerprint import fingerprint
from qwen35.state.geometry import Geometry
from qwen35.state.holder import Holder
from qwen35.state.pool import BlockPool
from qwen35.state.source import ManagerSource, RemoteManager
from qwen35.views import CacheView
from qwen35.weights.loader import load_language


@dataclass(frozen=True)
class SharedState:
    """This instance's part of the arena. ``close`` says that nothing of it will be touched again."""

    arena: Arena
    holder: Holder
    manager: RemoteManager
    pool: BlockPool

    @classmethod
    def attach(
        cls,
        settings: Settings,
        config: ModelConfig,
        instance: str,
        call: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> SharedState:
        """Create or attach, and register as a holder. ``call``: one operation of the state manager; not called yet."""
        geometry = Geometry.derive(config, settings)
        with ExitStack() as undo:
            arena = Arena.open(settings.arena_name, geometry, fingerprint(Path(settings.checkpoint)))
            undo.callback(arena.close)
            holder = Holder.register(arena, instance)
            undo.pop_all()
        manager = RemoteManager(call)
        pool = BlockPool(
            ManagerSource(manager, arena, holder, time.monotonic),
            num_total_blocks=geometry.num_blocks,
            num_total_slots=geometry.num_slots,
        )
        return cls(arena, holder, manager, pool)

    def close(self) -> None:
        """The manager takes back what is still ours; the last one out removes the arena."""
        self.holder.close()
        self.arena.close()


def load_engine(settings: Settings, config: ModelConfig, pool: BlockPool, cache: CacheView) -> Engine:
    """Target and, with drafting on, draft of ``settings.checkpoint`` on the device of ``cache``."""
    device = select_device(settings.device)
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    weights, draft_weights, _ = load_language(
        settings.checkpoint, config, with_draft=settings.num_draft_tokens > 0, device=device, dtype=dtype
    )
    ops = select_ops(settings, device)
    draft = None if draft_weights is None else DraftModel(config.text, draft_weights, ops)
    tokenizer = Tokenizer.from_directory(settings.checkpoint)
    return Engine(LanguageModel(config.text, weights, ops), draft, pool, cache, tokenizer, config, settings)
