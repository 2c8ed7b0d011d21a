"""The target's choice at a position, a pure function of its logits, the request's parameters, and noise keyed by place:
argmax over the surviving tokens of logits / T + noise. The draft proposes with the same function on its own logits.

Processing order: processors (see there), temperature, min-p, top-k, top-p, typical. Rows that ask
for the same temperature and filters are processed together; plain greedy rows cost one argmax.

Letters: R rows (one generated position of one sequence each), V vocabulary, N surviving candidates of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen35.engine.filters import Candidates, surviving
from qwen35.engine.leading import MIN_VOCAB, choose_leading
from qwen35.engine.noise import gumbel, least_word, row_keys, words
from qwen35.engine.processors import Processors
from qwen35.engine.request import SamplingParams
from qwen35.kernels.scan import RowScan

GREEDY_TEMPERATURE = 1e-5  # below it: plain argmax
_MAX_BLOCK_ELEMENTS = 1 << 23  # logits processed at a time, 64 MiB in float64
_MANY_CANDIDATES = 4096  # a row: from here on it pays to drop losers before two logarithms a token
_NEAR_NATS = 8.0  # of the others about one in e^8 has enough noise to be looked at


@dataclass(frozen=True)
class Row:
    """One position to choose a token for."""

    sampling: SamplingParams
    seed: int
    token_index: int  # of the generated token, from 0; drafts count
    processors: Processors | None = None
    drafts: tuple[int, ...] = ()  # what stands between the decided tokens and this position
    sample_index: int = 0  # which of n samples

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True)
class Choices:
    """Token ids [R] int64, and where they mean something [R] bool: a row with NaN or without a token left has no
    choice."""

    token_ids: NDArray[np.int64]
    is_valid: NDArray[np.bool_]


def choose(logits: Tensor, rows: Sequence[Row], scan: RowScan | None = None) -> Choices:
    """``logits``: [R, V] float32, one row for each of ``rows``; they are not changed. ``scan`` makes it quicker and
    changes no choice."""
    assert len(logits) == len(rows), f"{len(rows)} rows need as many rows of logits, got {len(logits)}"
    choices = Choices(np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.bool_))
    for indices in _groups(rows):
        block_rows = max(1, _MAX_BLOCK_ELEMENTS // logits.shape[1])
        for start in range(0, len(indices), block_rows):
            block = indices[start : start + block_rows]
            selected = logits if len(block) == len(rows) else logits[torch.tensor(block, device=logits.device)]
            choices.token_ids[block], choices.is_valid[block] = _choose_alike(selected, [rows[i] for i in block], scan)
    return choices


def _groups(rows: Sequence[Row]) -> list[list[int]]:
    """Indices of rows that can be processed together."""
    groups: dict[tuple[float | bool, ...], list[int]] = {}
    for index, row in enumerate(rows):
        options = row.sampling
        filters = (options.temperature, options.min_p, options.top_k, options.top_p, options.typical_p)
        key = (row.processors is None, *(() if row.is_greedy else filters))
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _choose_alike(
    logits: Tensor, rows: Sequence[Row], scan: RowScan | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    if rows[0].is_greedy and rows[0].processors is None:
        peak, token_ids = logits.max(dim=1)  # the first, hence lowest, of equal ones; NaN wins
        return token_ids.cpu().numpy(), torch.isfinite(peak).cpu().numpy()
    values = _processed(logits, rows)
    is_valid = np.isfinite(values.max(axis=1))
    token_ids = np.zeros(len(rows), dtype=np.int64)
    if is_valid.any():
        valid_rows = [row for row, valid in zip(rows, is_valid, strict=True) if valid]
        valid_values = values if is_valid.all() else values[is_valid]
        is_greedy = rows[0].is_greedy
        token_ids[is_valid] = valid_values.argmax(axis=1) if is_greedy else _sample(valid_values, valid_rows, scan)
    return token_ids, is_valid


def _processed(logits: Tensor, rows: Sequence[Row]) -> NDArray[np.float32 | np.float64]:
    """[R, V] on the CPU: the logits as they are, or a float64 copy after the processors of rows that all have them."""
    if rows[0].processors is None:
        return logits.cpu().numpy()
    values = logits.to("cpu", torch.float64, copy=True).numpy()
    for row, value in zip(rows, values, strict=True):
        row.processors.apply(value, row.drafts)
    return values


def _sample(values: NDArray[np.float32 | np.float64], rows: Sequence[Row], scan: RowScan | None) -> NDArray[np.int64]:
    """Gumbel-max over what the filters leave. ``values``: [R, V], processed, a finite maximum in each row."""
    keys = row_keys([r.seed for r in rows], [r.sample_index for r in rows], [r.token_index for r in rows])
    if scan is None or values.shape[1] < MIN_VOCAB:
        return _sample_block(values, rows[0].sampling, keys)
    chosen = [choose_leading(row, rows[0].sampling, key, scan) for row, key in zip(values, keys, strict=True)]
    return np.array(
        [
            _sample_block(values[i : i + 1], rows[0].sampling, keys[i : i + 1])[0] if token_id is None else token_id
            for i, token_id in enumerate(chosen)
        ]
    )


def _sample_block(
    values: NDArray[np.float32 | np.float64], options: SamplingParams, keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """[R] the definition in full: filters, noise, argmax. ``keys``: [R], of the rows' noise."""
    candidates = surviving(values, options.temperature, options.min_p, options.top_k, options.top_p, options.typical_p)
    random_words = words(keys[candidates.row_of], candidates.token_ids)  # [N]
    if len(random_words) > _MANY_CANDIDATES * len(values):
        candidates, random_words = _that_can_win(candidates, random_words, len(values))
    scores = candidates.scaled + gumbel(random_words)
    best = _row_maxima(scores, candidates.row_of, len(values))
    winners = np.flatnonzero(scores == best[candidates.row_of])  # ascending: the first of a row has its lowest token id
    return candidates.token_ids[winners[np.searchsorted(candidates.row_of[winners], np.arange(len(values)))]]


def _that_can_win(
    candidates: Candidates, random_words: NDArray[np.uint64], num_rows: int
) -> tuple[Candidates, NDArray[np.uint64]]:
    """Leaves out most of the losers: a token far below the peak needs more noise than the best of those near the peak
    has left to beat, which its word shows without a logarithm. What can win always stays."""
    row_of, scaled = candidates.row_of, candidates.scaled
    peak = _row_maxima(scaled, row_of, num_rows)  # [R]
    is_near = scaled >= (peak - _NEAR_NATS)[row_of]
    best = _row_maxima(scaled[is_near] + gumbel(random_words[is_near]), row_of[is_near], num_rows)  # [R]
    stays = is_near | (random_words >= least_word(best - peak + _NEAR_NATS)[row_of])
    return Candidates(row_of[stays], candidates.token_ids[stays], scaled[stays]), random_words[stays]


def _row_maxima(values: NDArray[np.float64], row_of: NDArray[np.int64], num_rows: int) -> NDArray[np.float64]:
    """[R] the largest of each row's values [N]; every row has one."""
    return np.maximum.reduceat(values, np.searchsorted(row_of, np.arange(num_rows)))
