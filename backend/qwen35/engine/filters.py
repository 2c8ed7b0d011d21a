"""Which tokens may be sampled: min-p, top-k, top-p, then typical, on logits divided by the temperature.

A first pass over the vocabulary keeps only tokens above a value below which none can survive; the filters proper then
work on those few. Both work on whole blocks of rows, and a row's result has the same bits alone and in any block:
sorts go along the row, and sums add its weights one after the other, so that the zeros which fill up a shorter row
change nothing (pairwise sums would). Ties always go to the lowest token id. A token of value -inf is banned.

Letters: R rows, V vocabulary, M candidates of the row that has most, N candidates of all rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from qwen35.engine.noise import GUMBEL_MAX, GUMBEL_MIN

Floats = NDArray[np.float64]
_SLACK = 1e-3  # in nats, far above rounding: the first pass may keep too much, never too little


@dataclass(frozen=True)
class Candidates:
    """Tokens row by row, ids ascending in each row; at least one a row."""

    row_of: NDArray[np.int64]  # [N]
    token_ids: NDArray[np.int64]  # [N]
    scaled: Floats  # [N] logits / temperature


def surviving(
    values: NDArray, temperature: float, min_p: float, top_k: int, top_p: float, typical_p: float = 1.0
) -> Candidates:
    """``values``: [R, V] float32 or float64 with a finite maximum in each row; ``top_k`` <= 0: all."""
    peak = values.max(axis=1).astype(np.float64) / temperature  # [R]
    top_k = top_k if 0 < top_k < values.shape[1] else 0
    first = _at_least(values, _threshold(values, peak, temperature, min_p, top_k, top_p, typical_p), temperature)
    if not (min_p or top_k or top_p < 1.0 or typical_p < 1.0):
        return first
    columns = np.arange(len(first.row_of)) - np.searchsorted(first.row_of, first.row_of)  # place in its own row
    scaled = np.full((len(values), columns.max() + 1), -np.inf)  # [R, M]
    scaled[first.row_of, columns] = first.scaled
    keep = scaled > -np.inf
    if min_p:
        keep &= scaled >= peak[:, None] + math.log(min_p)
    if top_k:
        keep &= largest(np.where(keep, scaled, -np.inf), top_k)
    if top_p < 1.0:
        mass = np.exp(np.where(keep, scaled, -np.inf) - peak[:, None])  # [R, M]
        total = _sum(mass) if min_p or top_k else _total_mass(values, peak, temperature)  # [R]
        keep &= until(mass, -mass, top_p * total)
    if typical_p < 1.0:
        keep &= _typical(np.where(keep, scaled, -np.inf) - peak[:, None], typical_p)
    kept = keep[first.row_of, columns]
    return Candidates(first.row_of[kept], first.token_ids[kept], first.scaled[kept])


def _threshold(
    values: NDArray, peak: Floats, temperature: float, min_p: float, top_k: int, top_p: float, typical_p: float
) -> Floats:
    """[R] the value, not yet divided by the temperature, that a surviving token has at least."""
    if top_k:
        return torch.from_numpy(values).topk(top_k, dim=1).values[:, -1].double().numpy()
    if min_p:
        depth = -math.log(min_p)
    elif top_p < 1.0:  # all tokens further down together weigh less than 1 - top_p of the most likely one
        depth = math.log(values.shape[1] / (1.0 - top_p))
    elif typical_p < 1.0:  # it may drop the most likely tokens and keep any other
        depth = math.inf
    else:  # no noise could lift a token from further down over the most likely one
        depth = GUMBEL_MAX - GUMBEL_MIN
    return (peak - depth - _SLACK) * temperature


def _at_least(values: NDArray, threshold: Floats, temperature: float) -> Candidates:
    row_of, token_ids = np.nonzero((values >= threshold[:, None]) & (values > -np.inf))
    return Candidates(row_of, token_ids, values[row_of, token_ids].astype(np.float64) / temperature)


def _total_mass(values: NDArray, peak: Floats, temperature: float) -> Floats:
    """[R] sum over the whole vocabulary of exp(scaled - peak)."""
    return np.exp(values.astype(np.float64) / temperature - peak[:, None]).sum(axis=1)


def _sum(mass: Floats) -> Floats:
    """[R] in order of the columns."""
    return np.cumsum(mass, axis=1)[:, -1]


def _typical(logits: Floats, typical_p: float) -> NDArray[np.bool_]:
    """Mask [R, M] of the tokens whose surprise is nearest to the row's entropy until they hold ``typical_p`` of the
    mass (Meister et al., Locally typical sampling, 2022). ``logits``: -inf for tokens that are out already."""
    mass = np.exp(logits)
    total = _sum(mass)  # [R]
    is_in = logits > -np.inf
    surprise = np.log(total)[:, None] - np.where(is_in, logits, 0.0)  # [R, M] -log p
    entropy = _sum(mass * surprise) / total  # [R]
    distance = np.where(is_in, np.abs(surprise - entropy[:, None]), np.inf)
    return until(mass, distance, typical_p * total)


def until(mass: Floats, rank: Floats, needed: Floats) -> NDArray[np.bool_]:
    """Mask [R, M] of the tokens in ascending ``rank`` until they sum to ``needed`` [R], the one that crosses it
    included."""
    order = np.argsort(rank, axis=1, kind="stable")
    sums = np.cumsum(np.take_along_axis(mass, order, axis=1), axis=1)  # [R, M]
    sums_before = np.concatenate([np.zeros_like(sums[:, :1]), sums[:, :-1]], axis=1)  # [R, M]
    keep = np.zeros(mass.shape, dtype=np.bool_)
    np.put_along_axis(keep, order, sums_before < needed[:, None], axis=1)
    return keep


def largest(values: Floats, num: int) -> NDArray[np.bool_]:
    """Mask [R, M] of the ``num`` largest values in each row."""
    if num >= values.shape[1]:
        return np.ones(values.shape, dtype=np.bool_)
    place = values.shape[1] - num
    threshold = np.partition(values, place, axis=1)[:, place, None]  # [R, 1]
    above, equal = values > threshold, values == threshold
    num_missing = num - above.sum(axis=1, keepdims=True)
    return above | (equal & (np.cumsum(equal, axis=1) <= num_missing))
