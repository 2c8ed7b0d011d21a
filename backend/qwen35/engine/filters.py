"""Which tokens may be sampled: min-p, then top-k, then top-p, on logits already divided by the temperature.

Works on whole blocks of rows; each row's result has the same bits alone and in any block (sorts and running sums go
along the row). Ties always go to the lowest token id. A token of value -inf is banned.

Letters: R rows, V vocabulary, M candidates looked at in a row."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_NUM_TOP_P_CANDIDATES = 1024  # nearly always holds the whole nucleus; a full sort of 248,320 takes 20 ms a row


def surviving(scaled: NDArray[np.float64], min_p: float, top_k: int, top_p: float) -> NDArray[np.bool_]:
    """Mask [R, V] of the tokens that stay. ``scaled``: [R, V] logits / temperature; ``top_k`` <= 0: all."""
    keep = scaled > -np.inf
    if min_p > 0.0:
        keep &= scaled >= scaled.max(axis=1, keepdims=True) + math.log(min_p)
    if 0 < top_k < scaled.shape[1]:
        keep &= _largest(np.where(keep, scaled, -np.inf), top_k)
    if top_p < 1.0:
        keep &= _nucleus(np.where(keep, scaled, -np.inf), top_p, max(top_k, _NUM_TOP_P_CANDIDATES))
    return keep


def _nucleus(scaled: NDArray[np.float64], top_p: float, num_candidates: int) -> NDArray[np.bool_]:
    """The most likely tokens until their probabilities sum to ``top_p``, the one that crosses it included."""
    peak = scaled.max(axis=1, keepdims=True)
    needed = top_p * np.exp(scaled - peak).sum(axis=1)  # [R]
    num_candidates = min(num_candidates, scaled.shape[1])
    token_ids = _descending(scaled, num_candidates)  # [R, M]
    mass = np.cumsum(np.exp(np.take_along_axis(scaled, token_ids, axis=1) - peak), axis=1)  # [R, M]
    if num_candidates < scaled.shape[1] and (mass[:, -1] < needed).any():
        return _nucleus(scaled, top_p, scaled.shape[1])
    mass_before = np.concatenate([np.zeros_like(mass[:, :1]), mass[:, :-1]], axis=1)  # [R, M]
    keep = np.zeros(scaled.shape, dtype=np.bool_)
    np.put_along_axis(keep, token_ids, mass_before < needed[:, None], axis=1)
    return keep


def _largest(values: NDArray[np.float64], num: int) -> NDArray[np.bool_]:
    """Mask [R, V] of exactly ``num`` largest values in each row."""
    place = values.shape[1] - num
    threshold = np.partition(values, place, axis=1)[:, place, None]  # [R, 1]
    above, equal = values > threshold, values == threshold
    num_missing = num - above.sum(axis=1, keepdims=True)
    return above | (equal & (np.cumsum(equal, axis=1) <= num_missing))


def _descending(values: NDArray[np.float64], num: int) -> NDArray[np.int64]:
    """Ids [R, num] of the largest values in each row, largest first."""
    if num == values.shape[1]:
        return np.argsort(-values, axis=1, kind="stable")
    token_ids = np.nonzero(_largest(values, num))[1].reshape(-1, num)  # ascending in each row
    order = np.argsort(-np.take_along_axis(values, token_ids, axis=1), axis=1, kind="stable")
    return np.take_along_axis(token_ids, order, axis=1)
