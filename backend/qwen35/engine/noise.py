"""The noise that makes sampling a pure function: Gumbel noise keyed by seed, sample, generated index and token id.

Knows no logits and no parameters. argmax(logits / T + noise) is a draw from softmax(logits / T), so target and draft
that use the same noise at the same place agree whenever their distributions nearly do (the Gumbel-max coupling).

Letters: R rows (one generated position of one sequence each), N candidates of all rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64 (Steele, Lea, Flood 2014): odd, close to 2^64 / golden ratio
_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2 = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)
_UNIT = 2.0**-53


def row_keys(seeds: ArrayLike, sample_indices: ArrayLike, token_indices: ArrayLike) -> NDArray[np.uint64]:
    """One key a row. ``seeds``: 0 to 2^64 - 1; ``sample_indices``: which of n samples; ``token_indices``: which
    generated token, from 0. All broadcast to [R]; rotary and KV positions play no part."""
    keys = _mix(np.atleast_1d(np.asarray(seeds, dtype=np.uint64)))
    keys = _mix(keys + _GAMMA * (np.atleast_1d(np.asarray(sample_indices, dtype=np.uint64)) + _ONE))
    return _mix(keys + _GAMMA * (np.atleast_1d(np.asarray(token_indices, dtype=np.uint64)) + _ONE))


def gumbel(keys: NDArray[np.uint64], token_ids: ArrayLike) -> NDArray[np.float64]:
    """Standard Gumbel noise for candidates ``token_ids`` of rows with ``keys`` (broadcast together), -3.7 to 36.8."""
    hashes = _mix(keys + _GAMMA * (np.atleast_1d(np.asarray(token_ids, dtype=np.uint64)) + _ONE))
    uniform = np.maximum(hashes >> np.uint64(11), _ONE).astype(np.float64) * _UNIT  # 2^-53 <= uniform <= 1 - 2^-53
    return -np.log(-np.log(uniform))


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, a bijection of 64-bit words (variant 13 of Stafford)."""
    words = (words ^ (words >> np.uint64(30))) * _FACTOR_1
    words = (words ^ (words >> np.uint64(27))) * _FACTOR_2
    return words ^ (words >> np.uint64(31))
