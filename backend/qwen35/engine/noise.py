"""The noise that makes sampling a pure function: Gumbel noise keyed by seed, sample, generated index and token id.

Knows no logits and no parameters. argmax(logits / T + noise) is a draw from softmax(logits / T), so target and draft
that use the same noise at the same place agree whenever their distributions nearly do (the Gumbel-max coupling).

Letters: R rows (one generated position of one sequence each), N candidates of all rows."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64 (Steele, Lea, Flood 2014): odd, close to 2^64 / golden ratio
_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2 = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)
_UNIT = 2.0**-53
_CHUNK = 1 << 14  # candidates hashed at a time: the temporaries stay in the second-level cache
GUMBEL_MIN, GUMBEL_MAX = (-math.log(-math.log(uniform)) for uniform in (_UNIT, 1.0 - _UNIT))  # -3.6 and 36.7


def row_keys(seeds: ArrayLike, sample_indices: ArrayLike, token_indices: ArrayLike) -> NDArray[np.uint64]:
    """One key a row. ``seeds``: 0 to 2^64 - 1; ``sample_indices``: which of n samples; ``token_indices``: which
    generated token, from 0. All broadcast to [R]; rotary and KV positions play no part."""
    keys = _mix(np.atleast_1d(np.asarray(seeds, dtype=np.uint64)))
    keys = _mix(keys + _GAMMA * (np.atleast_1d(np.asarray(sample_indices, dtype=np.uint64)) + _ONE))
    return _mix(keys + _GAMMA * (np.atleast_1d(np.asarray(token_indices, dtype=np.uint64)) + _ONE))


def words(keys: NDArray[np.uint64], token_ids: ArrayLike) -> NDArray[np.uint64]:
    """53 random bits, 1 to 2^53 - 1, for candidates ``token_ids`` of rows with ``keys`` (broadcast together)."""
    keys, token_ids = np.broadcast_arrays(keys, np.asarray(token_ids))
    result = np.empty(keys.shape, dtype=np.uint64)
    for start in range(0, keys.shape[-1], _CHUNK):
        part = np.s_[..., start : start + _CHUNK]
        hashes = _mix(keys[part] + _GAMMA * (token_ids[part].astype(np.uint64) + _ONE))
        result[part] = np.maximum(hashes >> np.uint64(11), _ONE)
    return result


def gumbel(random_words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Standard Gumbel noise of ``words``: rises with the word, from GUMBEL_MIN to GUMBEL_MAX."""
    return -np.log(-np.log(random_words.astype(np.float64) * _UNIT))


def least_word(noise: NDArray[np.float64]) -> NDArray[np.uint64]:
    """A word below every word whose noise reaches ``noise``; a little too low rather than too high."""
    uniform = np.exp(-np.exp(-noise)) - 2.0**-40  # rounding of the two exponentials stays far below 2^-40
    return (np.maximum(uniform, 0.0) / _UNIT).astype(np.uint64)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, a bijection of 64-bit words (variant 13 of Stafford)."""
    state = (state ^ (state >> np.uint64(30))) * _FACTOR_1
    state = (state ^ (state >> np.uint64(27))) * _FACTOR_2
    return state ^ (state >> np.uint64(31))
