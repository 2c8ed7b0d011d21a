"""Single passes of target and draft over a cache of one's own, to be timed. No engine, no server.

Letters: T tokens, H hidden."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from qwen35.config import ModelConfig
from qwen35.devices import select_dtype
from qwen35.kernels.select import select_ops
from qwen35.nn.draft import DraftModel
from qwen35.nn.language import LanguageModel
from qwen35.settings import Settings
from qwen35.state.geometry import Geometry
from qwen35.state.local import LocalState
from qwen35.views import BatchView
from qwen35.weights.loader import load_language


class Passes:
    """One sequence in slot 0, whose cache up to `max_context_tokens` holds noise of about the size of real entries."""

    def __init__(
        self, checkpoint: Path, *, num_threads: int, max_context_tokens: int, max_drafts: int, kv_cache_dtype: str
    ) -> None:
        """`max_drafts`: 0 leaves the draft out. With one thread CPU time is told, which a busy machine disturbs less.

        Raises CheckpointError."""
        self._clock = time.process_time if num_threads == 1 else time.perf_counter
        settings = Settings(
            checkpoint=str(checkpoint),
            num_draft_tokens=max_drafts,
            num_threads=num_threads,
            num_slots=1,
            kv_cache_dtype=kv_cache_dtype,
            max_context_tokens=max_context_tokens,
        )
        config = ModelConfig.from_directory(checkpoint)
        self._num_blocks = -(-(max_context_tokens + max_drafts + 1) // settings.block_tokens)
        block_bytes = Geometry.derive(config, settings).block_bytes
        settings = replace(settings, kv_cache_bytes=self._num_blocks * block_bytes)
        weights, draft_weights, _ = load_language(
            checkpoint, config, with_draft=max_drafts > 0, dtype=select_dtype(settings.dtype)
        )
        ops = select_ops(settings, "cpu")
        self.cache = LocalState(Geometry.derive(config, settings)).cache
        self.hidden_size = config.text.hidden_size
        self._target = LanguageModel(config.text, weights, ops)
        self._draft = None if draft_weights is None else DraftModel(config.text, draft_weights, ops)
        self._fill()

    @property
    def has_fp8_kv(self) -> bool:
        return self.cache.attention[0].keys.dtype == torch.float8_e4m3fn

    @torch.inference_mode()
    def target_seconds(self, num_tokens: int, context_tokens: int, *, with_logits: bool) -> float:
        """Of `num_tokens` decided tokens behind `context_tokens` others. `with_logits`: of every one of them."""
        embeds = torch.randn(num_tokens, self.hidden_size)  # [T, H]: other experts in every pass
        batch = self._batch(num_tokens, context_tokens)
        started = self._clock()
        hidden = self._target.forward(embeds, batch, self.cache)
        if with_logits:
            self._target.logits(hidden)
        return self._clock() - started

    @torch.inference_mode()
    def draft_seconds(self, context_tokens: int) -> float:
        """Of one pass over one token and its logits."""
        assert self._draft is not None, "loaded without a draft"
        embeds, hidden = torch.randn(2, 1, self.hidden_size)
        batch = self._batch(1, context_tokens, first_kv=1)
        started = self._clock()
        self._target.logits(self._draft.forward(embeds, hidden, batch, self.cache))
        return self._clock() - started

    def _batch(self, num_tokens: int, context_tokens: int, first_kv: int = 0) -> BatchView:
        def number(value: int) -> torch.Tensor:
            return torch.tensor([value])

        return BatchView(
            cu_tokens=torch.tensor([0, num_tokens]),
            positions=torch.arange(context_tokens, context_tokens + num_tokens).expand(3, -1),
            kv_start=number(context_tokens),
            first_kv=number(first_kv),
            block_table=torch.arange(self._num_blocks).unsqueeze(0),
            slots=number(0),
            num_pending=number(0),
            defer=torch.tensor([False]),
        )

    def _fill(self) -> None:
        views = [*self.cache.attention, *([self.cache.draft] if self.cache.draft is not None else [])]
        for rows in (rows for view in views for rows in (view.keys, view.values)):
            for block in rows:
                block.copy_(torch.randn(block.shape))
