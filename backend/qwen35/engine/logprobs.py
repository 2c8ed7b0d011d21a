"""Log probabilities of the raw target logits, before any processing, one row at a time: a row's bits depend on no
other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwen35.engine.leading import MIN_VOCAB
from qwen35.engine.request import TokenLogprob
from qwen35.kernels.scan import NUM_DEPTHS, RowScan


def token_logprobs(
    logits: NDArray[np.float32], token_id: int, num_top: int, scan: RowScan | None = None
) -> tuple[TokenLogprob, ...]:
    """The chosen token first, then the ``num_top`` most likely without it. ``logits``: [V], in float64 from here on.

    Ranks count from 1 and are unique: of two equal logits the lower token id comes first. ``scan``: for a large
    vocabulary; the last bits of a normaliser may be others than without it.
    """
    is_scanned = scan is not None and len(logits) >= MIN_VOCAB and np.isfinite(logits.max())
    normaliser, top_ids = (_scanned if is_scanned else _plain)(logits, num_top, scan)

    def entry(candidate: int, rank: int) -> TokenLogprob:
        return TokenLogprob(candidate, float(np.float64(logits[candidate]) - normaliser), rank)

    ranks = {other: rank for rank, other in enumerate(top_ids, start=1)}
    others = [entry(other, rank) for other, rank in ranks.items() if other != token_id]
    return (entry(token_id, ranks.get(token_id) or _rank(logits, token_id)), *others)


def _rank(logits: NDArray[np.float32], token_id: int) -> int:
    value = logits[token_id]
    return int(1 + np.count_nonzero(logits > value) + np.count_nonzero(logits[:token_id] == value))


def _plain(logits: NDArray[np.float32], num_top: int, _: RowScan | None) -> tuple[np.float64, list[int]]:
    """Logarithm of the sum of exp, and the ids of the ``num_top`` largest, largest first, ties by the lowest id."""
    values = logits.astype(np.float64)
    peak = values.max()
    normaliser = peak + np.log(np.exp(values - peak).sum())
    num_top = min(num_top, len(values))
    if num_top == 0:
        return normaliser, []
    threshold = np.partition(logits, len(logits) - num_top)[len(logits) - num_top]
    return normaliser, _first(logits, np.flatnonzero(logits >= threshold), num_top)


def _scanned(logits: NDArray[np.float32], num_top: int, scan: RowScan) -> tuple[np.float64, list[int]]:
    """The same: the sum goes by depth, and only what is not deeper than the last of the largest is sorted."""
    peak = np.float64(logits.max())
    row = scan.open(logits, peak, 1.0)
    counts, masses = row.weights()
    normaliser = peak + np.log(masses.sum())
    if num_top == 0:
        return normaliser, []
    depth = int(np.searchsorted(counts.cumsum(), num_top))
    candidates = np.arange(len(logits)) if depth == NUM_DEPTHS - 1 else row.between(0.0, depth + 1.0)
    return normaliser, _first(logits, candidates, num_top)


def _first(logits: NDArray[np.float32], candidates: NDArray[np.int64], num: int) -> list[int]:
    """The ``num`` largest of ascending ids."""
    return candidates[np.argsort(-logits[candidates], kind="stable")[:num]].tolist()
