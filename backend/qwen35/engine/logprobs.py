"""Log probabilities of the raw target logits, before any processing, one row at a time: a row's bits depend on no
other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwen35.engine.request import TokenLogprob


def token_logprobs(logits: NDArray[np.float32], token_id: int, num_top: int) -> tuple[TokenLogprob, ...]:
    """The chosen token first, then the ``num_top`` most likely without it. ``logits``: [V], in float64 from here on.

    Ranks count from 1 and are unique: of two equal logits the lower token id comes first.
    """
    values = logits.astype(np.float64)
    top = values.max()
    normaliser = top + np.log(np.exp(values - top).sum())

    def entry(candidate: int) -> TokenLogprob:
        value = values[candidate]
        rank = 1 + np.count_nonzero(values > value) + np.count_nonzero(values[:candidate] == value)
        return TokenLogprob(candidate, float(value - normaliser), int(rank))

    return (entry(token_id), *(entry(other) for other in _most_likely(values, num_top) if other != token_id))


def _most_likely(values: NDArray[np.float64], num: int) -> list[int]:
    """Ids of the ``num`` largest values, largest first, ties by the lowest id."""
    if num == 0:
        return []
    num = min(num, len(values))
    threshold = np.partition(values, len(values) - num)[len(values) - num]
    candidates = np.flatnonzero(values >= threshold)  # ascending ids; ties at the threshold included
    return candidates[np.argsort(-values[candidates], kind="stable")[:num]].tolist()
