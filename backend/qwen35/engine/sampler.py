"""The target's choice at a position, a pure function of its logits, the request's parameters, and noise keyed by place:
argmax over the surviving tokens of logits / T + noise. The draft proposes with the same function on its own logits.

Processing order: processors (bad words, min_tokens, logit bias, penalties), temperature, min-p, top-k, top-p. Rows that
ask for the same temperature and filters are processed together; plain greedy rows cost one argmax.

Letters: R rows (one generated position of one sequence each), V vocabulary, N surviving candidates of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen35.engine.filters import surviving
from qwen35.engine.noise import gumbel, row_keys
from qwen35.engine.processors import Processors
from qwen35.engine.request import SamplingParams

GREEDY_TEMPERATURE = 1e-5  # below it: plain argmax
_MAX_BLOCK_ELEMENTS = 1 << 23  # logits processed at a time, 64 MiB in float64


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


def choose(logits: Tensor, rows: Sequence[Row]) -> Choices:
    """``logits``: [R, V] float32, one row for each of ``rows``; they are not changed."""
    assert len(logits) == len(rows), f"{len(rows)} rows need as many rows of logits, got {len(logits)}"
    choices = Choices(np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.bool_))
    for indices in _groups(rows):
        block_rows = max(1, _MAX_BLOCK_ELEMENTS // logits.shape[1])
        for start in range(0, len(indices), block_rows):
            block = indices[start : start + block_rows]
            selected = logits if len(block) == len(rows) else logits[torch.tensor(block, device=logits.device)]
            choices.token_ids[block], choices.is_valid[block] = _choose_alike(selected, [rows[i] for i in block])
    return choices


def _groups(rows: Sequence[Row]) -> list[list[int]]:
    """Indices of rows that can be processed together."""
    groups: dict[tuple[float | bool, ...], list[int]] = {}
    for index, row in enumerate(rows):
        options = row.sampling
        filters = (options.temperature, options.min_p, options.top_k, options.top_p)
        key = (True, row.processors is None) if row.is_greedy else filters
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _choose_alike(logits: Tensor, rows: Sequence[Row]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    if rows[0].is_greedy and rows[0].processors is None:
        peak, token_ids = logits.max(dim=1)  # the first, hence lowest, of equal ones; NaN wins
        return token_ids.cpu().numpy(), torch.isfinite(peak).cpu().numpy()
    values = logits.to("cpu", torch.float64, copy=True).numpy()
    for row, value in zip(rows, values, strict=True):
        if row.processors is not None:
            row.processors.apply(value, row.drafts)
    is_valid = np.isfinite(values.max(axis=1))
    values[~is_valid] = 0.0
    return (values.argmax(axis=1) if rows[0].is_greedy else _sample(values, rows)), is_valid


def _sample(values: NDArray[np.float64], rows: Sequence[Row]) -> NDArray[np.int64]:
    """Gumbel-max over what the filters leave. ``values``: [R, V], processed, a finite maximum in each row."""
    options = rows[0].sampling
    values /= options.temperature
    row_of, token_ids = np.nonzero(surviving(values, options.min_p, options.top_k, options.top_p))  # [N], row by row
    keys = row_keys([r.seed for r in rows], [r.sample_index for r in rows], [r.token_index for r in rows])
    scores = values[row_of, token_ids] + gumbel(keys[row_of], token_ids)
    starts = np.searchsorted(row_of, np.arange(len(rows)))
    best = np.maximum.reduceat(scores, starts)  # [R]
    winners = np.flatnonzero(scores == best[row_of])  # ascending: the first of a row has its lowest token id
    return token_ids[winners[np.searchsorted(row_of[winners], np.arange(len(rows)))]]
