"""`torch.export` of the language model and of the draft: one graph each, for prefill, verify and decode alike.

The numbers of tokens, of sequences and of block table columns stay dynamic; caches are inputs that the graph writes in
place. Letters: T tokens, S sequences."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch.export import Dim, ExportedProgram

from qwen35.nn.draft import DraftModel
from qwen35.nn.language import LanguageModel
from qwen35.views import BatchView, CacheView

_DYNAMIC = Dim.DYNAMIC
_BATCH_SHAPES = {
    "cu_tokens": {0: _DYNAMIC},  # S + 1
    "positions": {1: _DYNAMIC},  # T
    "kv_start": {0: _DYNAMIC},  # S
    "first_kv": {0: _DYNAMIC},
    "block_table": {0: _DYNAMIC, 1: _DYNAMIC},
    "slots": {0: _DYNAMIC},
    "num_pending": {0: _DYNAMIC},
    "defer": {0: _DYNAMIC},
}


def export_language(model: LanguageModel, batch: BatchView, cache: CacheView) -> ExportedProgram:
    """The graph of ``forward(embeds, batch, cache)``; `batch` (at least two tokens and two sequences) is an example.

    Nothing is computed: neither example nor cache is read or written.
    """
    embeds = _example(model, batch)
    return _export(model, {"embeds": embeds}, batch, cache)


def export_draft(model: DraftModel, batch: BatchView, cache: CacheView) -> ExportedProgram:
    """The graph of ``forward(embeds, hidden, batch, cache)``."""
    return _export(model, {"embeds": _example(model, batch), "hidden": _example(model, batch)}, batch, cache)


def _example(model: LanguageModel | DraftModel, batch: BatchView) -> torch.Tensor:
    norm = model.norm.weight
    return norm.new_zeros(batch.positions.shape[1], norm.shape[0], dtype=model.dtype)  # [T, H]


def _export(
    model: torch.nn.Module, rows: dict[str, torch.Tensor], batch: BatchView, cache: CacheView
) -> ExportedProgram:
    shapes = {
        **{name: {0: _DYNAMIC} for name in rows},
        "batch": [_BATCH_SHAPES[field.name] for field in fields(BatchView)],
        "cache": _static(cache),
    }
    with torch.no_grad():
        return torch.export.export(model, (), {**rows, "batch": batch, "cache": cache}, dynamic_shapes=shapes)


def _static(cache: CacheView) -> list:
    """Shapes that do not change, in the form that torch wants for nested records."""

    def one(view: object) -> list[None]:
        return [None] * len(fields(view))

    draft = None if cache.draft is None else one(cache.draft)
    return [tuple(map(one, cache.attention)), tuple(map(one, cache.gated_delta)), draft, None]
