"""Copies inside the caches: a slot's state, and rows of a block. All in place, bit for bit.

Letters as in ``qwen35.views``."""

from __future__ import annotations

from qwen35.views import CacheView


def copy_state(cache: CacheView, source: int, target: int) -> None:
    """Gated delta states and conv windows of one slot to another; nothing may be pending in the source."""
    for view in cache.gated_delta:
        view.recurrent[target] = view.recurrent[source]
        view.conv[target] = view.conv[source]


def copy_rows(cache: CacheView, source: int, target: int, num_rows: int) -> None:
    """The first ``num_rows`` keys and values of one block to another, in every layer, the draft's included."""
    for view in (*cache.attention, *([] if cache.draft is None else [cache.draft])):
        for rows in (view.keys, view.values):
            rows[target, :num_rows] = rows[source, :num_rows]


def interval_tokens(cache: CacheView) -> int:
    """So many tokens that a checkpoint's state takes fewer bytes than their keys and values."""
    kv = [t for view in (*cache.attention, *([] if cache.draft is None else [cache.draft]))
          for t in (view.keys, view.values)]  # fmt: skip
    token_bytes = sum(rows[0, 0].numel() * rows.element_size() for rows in kv)
    state = [t for view in cache.gated_delta for t in (view.recurrent, view.conv)]
    state_bytes = sum(rows[0].numel() * rows.element_size() for rows in [*state, cache.boundary_hidden])
    return state_bytes // token_bytes + 1
